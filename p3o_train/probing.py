"""The recorded log-probs of a few responses against the trainer's own, computed with the weights that sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from p3o_train.agreement import everywhere
from p3o_train.contract import Contract
from p3o_train.objective import Objective
from p3o_train.packing import unpack_responses
from p3o_train.parallel import ParallelGroups
from p3o_train.passes import policy_log_probs
from p3o_train.probe import check_alignment, probe_temperature
from p3o_train.types import PackedBatch, Sample

_TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}


def probe_recordings(
    model: Sequence[Any],
    batches: Sequence[PackedBatch],
    samples: Sequence[Sample],
    objective: Objective,
    groups: ParallelGroups,
    contract: Contract,
) -> None:
    """Refuses log-probs that are not what they are declared to be, or belong to a neighbour of their token.

    Every rank calls. Two forward passes over the micro-batches: at the temperature of the rollouts, and at 1.

    Args:
        batches: this rank's micro-batches; every rank has the same number of them.
        samples: all samples that are in the micro-batches of any rank.

    Raises:
        ContractViolation: on every rank, with the differences that were found.
    """
    kind = "truncated" if any(batch.kept_token_ids is not None for batch in batches) else contract.log_prob_kind
    scaled = "scaled" if kind == "raw" else kind
    named = {sample.sample_id: sample for sample in samples}
    computed: dict[str, dict[str, Tensor]] = {}
    for name, temperature in ((scaled, contract.temperature), ("raw", 1.0)):
        own = dataclasses.replace(objective, temperature=temperature)
        values = policy_log_probs(model, batches, own, groups).values
        computed[name] = _by_sample(values, batches, groups)

    def check() -> None:
        chosen = [name for name in computed["raw"] if named[name].valid_mask.any()]
        if not chosen:  # not the last pipeline stage, or only dummies here
            return
        masks = [named[name].valid_mask for name in chosen]

        def tokens(of: dict[str, Tensor]) -> Tensor:
            return torch.cat([of[name][mask] for name, mask in zip(chosen, masks, strict=True)])

        recorded = tokens({name: named[name].behavior_log_probs for name in chosen})
        candidates = {name: tokens(values) for name, values in computed.items()}
        tolerance = _TOLERANCES[next(model[0].parameters()).dtype]
        # first: log-probs that are shifted fit no temperature either
        check_alignment([named[name] for name in chosen], [computed[kind][name] for name in chosen], max_lag=1)
        probe_temperature(recorded, candidates, kind, temperature=contract.temperature, tolerance=tolerance)

    everywhere(check)


def _by_sample(values: Sequence[Tensor], batches: Sequence[PackedBatch], groups: ParallelGroups) -> dict[str, Tensor]:
    """Name of the sample -> [R] on the CPU, for the samples of this replica; empty on stages before the last."""
    made: dict[str, Tensor] = {}
    for value, batch in zip(values, batches, strict=False):
        shards = [value]
        if groups.context is not None:
            shards = [torch.empty_like(value) for _ in range(groups.context.size())]
            torch.distributed.all_gather(shards, value.contiguous(), group=groups.context)
        made |= dict(zip(batch.sample_ids, (one.cpu() for one in unpack_responses(shards, batch)), strict=True))
    made.pop("dummy", None)
    return made
