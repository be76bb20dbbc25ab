"""The histogram of one step, and short runs with and without it, as one rank sees them."""

import dataclasses
from typing import Any
from unittest import mock

from p3o_train.device_shim import megatron_on_cpu
from p3o_train.histogram import PREFIX, RatioHistogram
from p3o_train.metrics import MetricSums, global_means
from p3o_train.objective import Objective
from p3o_train.passes import policy_log_probs
from p3o_train.runtime import megatron_run
from tests.megatron.product import build_product
from tests.megatron.runs import SMALL, run
from tests.megatron.steps import Cut, batches
from tests.megatron.topologies import CONFIG, Topology, groups

SHORT = dataclasses.replace(SMALL, num_rollouts=2, save_interval=0)


def of_a_step(rank: int, cut: Cut, objectives: tuple[Objective, ...]) -> list[dict[str, float]]:
    """Counts of the whole step by lower edge, under each objective."""
    found = []
    with megatron_on_cpu(), groups(Topology(cut.tp, cut.pp, cut.cp)):
        for objective in objectives:
            product = build_product(CONFIG)
            made = batches(cut, product.dp_rank, product.layout)
            more: dict[str, Any] = {}
            if objective.context_source == "reuse":
                more["log_probs"] = policy_log_probs([product.model], made, objective, product.groups)
            counts = product.gradients(made, objective, **more).histogram
            named = global_means(MetricSums({}), None, product.groups, "cpu", histogram=counts)
            found.append({name.removeprefix(PREFIX): count for name, count in named.items()})
    return found


def with_and_without(rank: int, objectives: tuple[Objective, ...]) -> list[Any]:
    """(run, run that counts nothing) for each objective."""
    found = []
    for objective in objectives:
        with megatron_run(SHORT.parallelism):
            counted = run(SHORT, objective)
        with megatron_run(SHORT.parallelism), mock.patch.object(RatioHistogram, "add"):
            found.append((counted, run(SHORT, objective)))
    return found
