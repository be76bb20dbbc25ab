"""Rollouts of Megatron's weights: what the engine records is what the trainer computes, under every topology."""

import pytest

from tests.distributed.ranks import on_all_ranks
from tests.megatron.rollouts import SCALED, TRUNCATED, every_rollout, with_other_weights, wrongly_declared
from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
PAIRS = ({"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {})


@pytest.fixture(scope="module", params=[SCALED, TRUNCATED], ids=["scaled", "truncated"])
def rollouts(request):
    """(alone, [each pair of ranks]) of each rank's outcome."""
    ((alone,),) = on_all_ranks(every_rollout, 1, ({},), request.param)
    ranks = on_all_ranks(every_rollout, 2, PAIRS, request.param)
    return alone, [list(pair) for pair in zip(*ranks, strict=True)]


def test_recorded_log_probs_are_those_of_a_forward_pass(rollouts):
    alone, pairs = rollouts
    for outcome in (alone, *(one for pair in pairs for one in pair)):
        for difference in outcome[1]:
            # another implementation in float32, logits of size 5, and log-probs down to -10
            assert not difference.numel() or difference.abs().max().item() < 2e-5
    assert sum(difference.numel() for difference in alone[1]) >= 16


def test_every_topology_samples_the_same(rollouts):
    (whole, _), pairs = rollouts
    assert len({tuple(tokens) for tokens, _ in whole}) > 8
    for pair in pairs:
        for responses, _ in pair:
            assert [tokens for tokens, _ in responses] == [tokens for tokens, _ in whole]
            for (_, made), (_, expected) in zip(responses, whole, strict=True):
                assert made == pytest.approx(expected, abs=2e-5)


def test_swapped_weights_are_given_back():
    assert on_all_ranks(with_other_weights, 1) == [True]


@pytest.mark.parametrize(("ranks", "cut"), [(1, {}), (2, {"context_parallel_size": 2}), (2, {})], ids=str)
def test_the_first_rollout_shows_what_log_probs_really_are(ranks, cut):
    for raw, divided, late, right in on_all_ranks(wrongly_declared, ranks, cut):
        assert "they are 'raw'" in raw
        assert "raw log-probs divided by the temperature" in divided
        assert "1 token too late" in late
        assert right == "nothing was raised"
