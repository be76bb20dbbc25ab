"""Megatron-Core's model over Gloo: every topology finds the logits, loss and gradients of a single process.

Four ranks start once and run every topology; the tests look at what came back.
"""

import dataclasses

import pytest
import torch

from p3o_train.model import ModelConfig, join_shards, take_shard
from p3o_train.runtime import OptimizerSettings, Parallelism, build_trainee, megatron_run
from tests.distributed.ranks import on_all_ranks
from tests.megatron import dense
from tests.megatron.topologies import (
    CONFIG,
    MICRO_BATCHES,
    NEEDS_MEGATRON,
    Topology,
    every_topology,
    forward_backward,
    refusals,
)
from tests.megatron.whole import Whole, whole

pytestmark = pytest.mark.host_only
RANKS = 4
SINGLE = (Topology(), Topology(tied=True))
SPLIT = (
    Topology(tp=2),
    Topology(pp=2),
    Topology(cp=2),
    Topology(cp=4),
    Topology(tp=2, pp=2),
    Topology(tp=2, cp=2),
    Topology(pp=2, cp=2),
    Topology(pp=2, tied=True),
    Topology(tp=2, pp=2, tied=True),
)
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # the same test on a machine with a GPU
        ranks = on_all_ranks(every_topology, RANKS, SINGLE + SPLIT, DTYPES)
    return {key: whole([outcomes[key] for outcomes in ranks], key[0]) for key in ranks[0]}


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative in L2."""
    return ((value.double() - truth.double()).norm() / truth.double().norm()).item()


def errors(value: Whole, truth: Whole) -> dict[str, float]:
    assert value.gradients.keys() == truth.gradients.keys()
    assert {g.dtype for g in value.gradients.values()} == {g.dtype for g in truth.gradients.values()}
    return {name: error(value.gradients[name], gradient) for name, gradient in truth.gradients.items()}


@NEEDS_MEGATRON
@pytest.mark.parametrize("sizes", SPLIT, ids=str)
def test_topology_does_not_change_float32_results(found, sizes):
    value, truth = (found[key, torch.float32] for key in (sizes, Topology(tied=sizes.tied)))
    # TP halves the sums of row-parallel layers, CP those over tokens in weight gradients: some ten roundings of
    # 6e-8 in a row; seen: 5e-7 in the worst gradient, 2e-7 in the logits. PP alone changes no sum.
    limit = 1e-6 if sizes.tp * sizes.cp > 1 else 0.0
    assert abs(value.loss / truth.loss - 1) <= limit
    assert max(map(error, value.logits, truth.logits)) <= limit
    # the two copies of a tied embedding collect the terms of its gradient in another order
    assert max(errors(value, truth).values()) <= max(limit, 1e-6 * sizes.tied)


@NEEDS_MEGATRON
@pytest.mark.parametrize("sizes", SPLIT, ids=str)
def test_topology_does_not_change_float64_results(found, sizes):
    value, truth = (found[key, torch.float64] for key in (sizes, Topology(tied=sizes.tied)))
    # ten roundings of 1e-16; an error of the partition could not hide below float32's rounding here
    assert max(map(error, value.logits, truth.logits)) <= 1e-14
    # TP joins the float32 log-sum-exp of two shards: one rounding of 6e-8 in each token's gradient
    assert max(errors(value, truth).values()) <= (1e-7 if sizes.tp > 1 else 1e-13)


@NEEDS_MEGATRON
@pytest.mark.parametrize("tied", [False, True])
def test_single_process_matches_dense_attention(found, tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    weights = dense.weights(config)
    value = found[Topology(tied=tied), torch.float64]
    for lengths, logits in zip(MICRO_BATCHES, value.logits, strict=True):
        # the same float64 arithmetic in another order
        assert error(logits, dense.batch_logits(lengths, weights, config).detach()) <= 1e-14
    loss = sum(dense.batch_loss(lengths, weights, config) for lengths in MICRO_BATCHES)
    loss.backward()
    # float32 log-probs: one rounding in each token's loss and gradient
    assert value.loss == pytest.approx(loss.item(), rel=1e-6)
    truth = Whole([], 0.0, {name: weight.grad for name, weight in weights.items()})
    assert max(errors(value, truth).values()) <= 1e-6


@NEEDS_MEGATRON
def test_impossible_sizes_are_refused():
    for no_groups, *messages in on_all_ranks(refusals, 2):
        assert "initialize_model_parallel" in no_groups
        assert messages == [
            "num_kv_heads must be a positive multiple of the tensor-parallel size, got 1 and 2",
            "ffn_size must be a positive multiple of the tensor-parallel size, got 3 and 2",
            "num_layers must be a positive multiple of the pipeline-parallel size, got 3 and 2",
        ]


def head_norm_gradients(rank: int) -> dict[int, dict[str, torch.Tensor]]:
    """{tensor-parallel size: gradients of the gains that every rank holds for its own heads}, after the schedule."""
    config = dataclasses.replace(CONFIG, qk_norm=True)
    found = {}
    for size in (1, 2):
        with megatron_run(Parallelism(tensor=size)):
            trainee = build_trainee(config, OptimizerSettings(lr=0.1, total_steps=1))
            forward_backward(trainee.model[0], trainee.layout)
            gains = [(name, value) for name, value in trainee.model[0].named_parameters() if "_layernorm" in name]
            found[size] = {name: value.main_grad.clone() for name, value in gains if "q_" in name or "k_" in name}
    return found


@NEEDS_MEGATRON
def test_gradients_of_head_norms_add_up_over_tensor_parallel_ranks():
    for found in on_all_ranks(head_norm_gradients, 2):
        assert len(found[1]) == 2 * CONFIG.num_layers
        # the sums of the heads join in another order, as above
        assert max(error(found[2][name], gradient) for name, gradient in found[1].items()) <= 1e-6


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"num_heads": 5}, "hidden_size must be a positive multiple of num_heads, got 32 and 5"),
        ({"num_kv_heads": 3}, "num_heads must be a positive multiple of num_kv_heads, got 4 and 3"),
        ({"num_heads": 32}, "hidden_size / num_heads must be even"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"head_dim": 0}, "head_dim must be even"),
        ({"dtype": torch.int64}, "floating-point"),
    ],
)
def test_impossible_architectures_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **wrong)


def test_parameters_are_float32_unless_the_configuration_says_otherwise():
    assert ModelConfig(1, 2, 1, 1, 1, 1).dtype == torch.float32


@pytest.mark.parametrize("name", ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_join_to_what_was_cut(name, dim):
    full = torch.arange(32.0).view(8, 4)
    shards = [take_shard(full, name, dim, rank, 2) for rank in range(2)]
    assert torch.equal(join_shards(shards, name, dim), full)
