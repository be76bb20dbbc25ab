"""Micro-batches in a smaller context-parallel group than the model's: same gradients, and the group comes back."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from p3o_train.device_shim import megatron_on_cpu
from p3o_train.model import build_model
from p3o_train.objective import Objective
from p3o_train.packing import pack
from p3o_train.parallel import ParallelGroups
from p3o_train.passes import step_gradients
from p3o_train.replay import MicroBatches
from p3o_train.schedule import run_schedule
from p3o_train.types import ContextLayout
from tests.distributed.ranks import on_all_ranks
from tests.megatron.topologies import CONFIG, NEEDS_MEGATRON, Topology, cross_entropy, groups, samples

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
LENGTHS = (11, 6)


def gradients(model: Any, batches: list[Any], sub_groups: dict[int, Any]) -> torch.Tensor:
    """All gradients in one vector, summed over both ranks."""
    model.zero_grad()

    def loss(rows: torch.Tensor, batch: Any, weight: object) -> Any:
        return cross_entropy(rows[None], batch, None), {}

    run_schedule([model], MicroBatches(batches), loss, training=True, context_groups=sub_groups)
    whole = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(whole)
    return whole


def objective_both_ways(rank: int) -> Any:
    """e and all gradients of a P3O step whose sequences both ranks share, and of one with a sequence for each."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    with megatron_on_cpu(), groups(Topology(cp=2)):
        alone = [dist.new_group([0]), dist.new_group([1])][rank]
        module: Any = build_model(CONFIG)
        module.config.finalize_model_grads_func = finalize_model_grads
        model = [DistributedDataParallel(module.config, DistributedDataParallelConfig(), module)]
        # behavior log-probs far from the policy's, so that e is far from 1
        made = [
            dataclasses.replace(one, behavior_log_probs=torch.linspace(-6, -3, one.response_length))
            for one in samples(LENGTHS)
        ]
        shared = pack(made, [1.0, -0.5], ContextLayout(cp_size=2, cp_rank=rank), pad_token_id=1)
        own = pack(made[rank : rank + 1], [(1.0, -0.5)[rank]], ContextLayout(), pad_token_id=1)
        results = []
        for batch in (shared, own):
            model[0].zero_grad_buffer()
            at = dataclasses.replace(ParallelGroups.from_megatron(), sub_contexts={1: alone})
            step = step_gradients(model, [batch], Objective(ess_scope="step"), at)
            whole = torch.cat([parameter.main_grad.flatten() for parameter in module.parameters()])
            results.append((step.context.ess.item(), whole))
        return results


def both_ways(rank: int) -> Any:
    with megatron_on_cpu(), groups(Topology(cp=2)):
        alone = [dist.new_group([0]), dist.new_group([1])][rank]
        model: Any = build_model(CONFIG)
        made = samples(LENGTHS)
        shared = pack(made, [0.0] * 2, ContextLayout(cp_size=2, cp_rank=rank), pad_token_id=1)
        own = pack(made[rank : rank + 1], [0.0], ContextLayout(), pad_token_id=1)
        usual = gradients(model, [shared], {})
        dynamic = gradients(model, [own], {1: alone})
        again = gradients(model, [shared], {})
        refusals = []
        for broken in ({}, {1: model.pg_collection.cp}):
            try:
                gradients(model, [own], broken)
            except ValueError as error:
                refusals.append(str(error))
        model.decoder.layers[1].forward = None  # any error in the middle of the forward pass
        try:
            gradients(model, [own], {1: alone})
        except TypeError:
            sizes = {module.pg_collection.cp.size() for module in model.modules() if hasattr(module, "pg_collection")}
        return usual, dynamic, again, refusals, sizes


def test_a_step_notices_how_sequences_are_shared():
    for (ess, gradient), (other_ess, other) in on_all_ranks(objective_both_ways, 2):
        assert other_ess == pytest.approx(ess, rel=1e-6) and 0.2 < ess < 0.95
        assert (other - gradient).norm() <= 1e-6 * gradient.norm()


@pytest.fixture(scope="module")
def outcome():
    return on_all_ranks(both_ways, 2)


def test_a_smaller_group_gives_the_same_gradients(outcome):
    usual, dynamic, again, _, _ = outcome[0]
    assert (dynamic - usual).norm() <= 1e-6 * usual.norm()  # other sums in float32
    assert torch.equal(again, usual)


def test_the_group_comes_back_after_an_error(outcome):
    assert [sizes for *_, sizes in outcome] == [{2}, {2}]


def test_a_layout_without_its_group(outcome):
    for rank, (_, _, _, refusals, _) in enumerate(outcome):
        assert "rank 0 of 1 context-parallel ranks, the model for 2" in refusals[0]
        assert "there is none" in refusals[0]
        assert f"this rank is {rank} of 2 there" in refusals[1]
