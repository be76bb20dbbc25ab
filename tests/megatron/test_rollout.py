"""The embedded engine: what it records is what it sampled from, under every topology."""

import math

import pytest
import torch

from p3o_train.parallel import ParallelGroups
from p3o_train.rollout import EmbeddedEngine, Sampling, draw
from p3o_train.types import ContextLayout
from tests.distributed.ranks import on_all_ranks
from tests.megatron.rollouts import END, LIMIT, PROMPTS, every_rollout, with_other_weights
from tests.megatron.topologies import CONFIG, NEEDS_MEGATRON, Topology

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
ALONE = (Topology(),)
PAIRS = (Topology(tp=2), Topology(cp=2), Topology(pp=2), Topology(pp=2, tied=True))


@pytest.fixture(scope="module")
def rollouts():
    made = {}
    for ranks, topologies in ((1, (*ALONE, Topology(tied=True))), (2, PAIRS)):
        collected = on_all_ranks(every_rollout, ranks, topologies)
        made |= {sizes: [rank[sizes] for rank in collected] for sizes in topologies}
    return made


def test_responses_end_where_they_should(rollouts):
    ((responses, _),) = rollouts[Topology()]
    assert len(responses) == len(PROMPTS)
    for tokens, log_probs in responses:
        assert len(tokens) == len(log_probs) and all(value <= 0 for value in log_probs)
        assert END not in tokens[:-1]
        assert tokens[-1] == END or len(tokens) == LIMIT


@pytest.mark.parametrize("sizes", [Topology(), *PAIRS], ids=str)
def test_recorded_log_probs_are_those_of_a_forward_pass(rollouts, sizes):
    differences = [value for _, values in rollouts[sizes] for value in values]
    assert sum(value.numel() for value in differences) >= len(PROMPTS)
    # float32 logits of size 5, from batches of another shape
    assert max(value.abs().max().item() for value in differences if value.numel()) < 5e-6


@pytest.mark.parametrize("sizes", PAIRS, ids=str)
def test_every_topology_samples_the_same(rollouts, sizes):
    ((whole, _),) = rollouts[Topology(tied=sizes.tied)]
    for responses, _ in rollouts[sizes]:
        assert [one.token_ids for one in responses] == [one.token_ids for one in whole]
        for one, other in zip(responses, whole, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=5e-6)
    first, *others = (responses for responses, _ in rollouts[sizes])
    assert all(other == first for other in others)


def test_swapped_weights_are_used_and_given_back():
    ((responses, restored),) = on_all_ranks(with_other_weights, 1)
    assert restored
    uniform = -math.log(CONFIG.vocab_size)
    assert all(value == pytest.approx(uniform) for response in responses for value in response.log_probs)


def test_draw_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.125, 0.375], dtype=torch.float64)
    numbers = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = draw(probabilities.log().expand(1000, 4), numbers)
    tokens, log_probs = drawn[:, 0].long(), drawn[:, 1]
    assert torch.bincount(tokens, minlength=4).tolist() == [500, 0, 125, 375]
    torch.testing.assert_close(log_probs, probabilities[tokens].log())


def test_the_largest_number_draws_the_last_possible_token():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.float64)
    largest = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert draw(logits, largest)[0, 0] == 1


def test_numbers_for_another_length():
    engine = EmbeddedEngine([torch.nn.Linear(1, 1)], ParallelGroups(), ContextLayout(), Sampling(3, END))
    with pytest.raises(ValueError, match=r"uniforms must be \(1, 3\), one for each token .*; got \(1, 2\)"):
        engine.generate([(1,)], torch.zeros(1, 2))
