"""One optimizer step gives the same statistics, loss and gradient however packing cuts it.

Eleven tokens with given ratios, whose results were computed by hand, travel through samples, plans and shards.
"""

import pytest
import torch
from samples import layouts

from p3o_kernels import RatioStats, p3o_loss, ratio_stats
from p3o_train.batching import plan_micro_batches
from p3o_train.packing import pack_responses, pack_step
from p3o_train.types import Sample

RATIOS = [1, 2, 0.5, 4, 0.8, 1.4, 0.25, 3, 1.1, 0.6, 2.5]
MASK = [1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1]
ADVANTAGES = [1, -1, 0.5, 2, -0.2, 0.7, -1.5, 1.2, 0.4, -0.8, 1.8]
GRADIENT = [-0.0878736, 0.1064368, 0, -0.1479024, 0.0082931, 0, -0.0645042, -0.0806974, -0.0317743, 0, -0.1358967]
S1, S2, N, ESS, LOSS = 14.65, 38.1625, 8, 0.7029888632, 0.4240193727
BEHAVIOR = -2.0

# prompt and response lengths: ragged, with an empty response, responses on either side of a cut and across it
RAGGED = [(1, 4), (5, 2), (3, 0), (2, 3), (7, 1), (1, 1)]
SINGLE = [(1 + index % 4, 1) for index in range(11)]


def cut_into_samples(shapes):
    """Samples of these shapes and, for each, the places of its response tokens among the eleven."""
    samples, places, begin = [], [], 0
    for index, (prompt, response) in enumerate(shapes):
        here = list(range(begin, begin + response))
        mask = [MASK[place] for place in here]
        log_probs = [BEHAVIOR if valid else float("nan") for valid in mask]
        samples.append(Sample.from_lists([7] * (prompt + response), response, log_probs, mask, sample_id=f"s{index}"))
        places.append(here)
        begin += response
    assert begin == len(RATIOS)
    return samples, places


def micro_batches(shapes, micro_batch_size, dp_size, order, cp_size):
    """(batch, log-probs [T] of the policy, place [T] of each row's token) of every rank."""
    samples, places = cut_into_samples(shapes)
    advantages = [ADVANTAGES[here[0]] if len(here) == 1 else 0.0 for here in places]
    costs = [sample.token_ids.numel() for sample in samples]
    policy = torch.tensor(RATIOS, dtype=torch.float64).log().float() + BEHAVIOR
    for rank_plan in plan_micro_batches(costs, dp_size, micro_batch_size=micro_batch_size):
        for layout in layouts(order, cp_size):
            for indices, batch in zip(rank_plan, pack_step(samples, advantages, rank_plan, layout), strict=True):
                here = [places[index] for index in indices] if indices else [[]]
                log_probs = pack_responses([policy[some] for some in here], batch)
                where = pack_responses([torch.tensor(some, dtype=torch.int64) for some in here], batch)
                yield batch, torch.where(batch.mask, log_probs, torch.nan), where


def step_context(batches):
    stats = RatioStats.zeros()
    for batch, log_probs, _ in batches:
        local = ratio_stats(log_probs, batch.behavior_log_probs, batch.mask)
        assert local.num_tokens.item() == batch.num_tokens
        stats = stats + local
    return stats, stats.to_context()


CUTS = [(size, dp, "zigzag", 1) for size in (1, 2, 4) for dp in (1, 2, 4)]
CUTS += [
    (size, dp, order, cp) for order in ("zigzag", "contiguous") for size, dp, cp in ((1, 2, 2), (4, 1, 4), (2, 2, 4))
]


@pytest.mark.parametrize(("size", "dp_size", "order", "cp_size"), CUTS)
@pytest.mark.parametrize("shapes", [RAGGED, SINGLE], ids=["ragged", "single"])
def test_step_statistics_do_not_depend_on_the_cut(shapes, size, dp_size, order, cp_size):
    batches = list(micro_batches(shapes, size, dp_size, order, cp_size))
    stats, context = step_context(batches)
    # log-probs near -2 are rounded to float32, 1e-7 in a ratio
    assert stats.sum_ratio.item() == pytest.approx(S1, rel=2e-7)
    assert stats.sum_ratio_sq.item() == pytest.approx(S2, rel=4e-7)
    assert stats.num_tokens.item() == sum(batch.num_tokens for batch, _, _ in batches) == N
    assert context.ess.item() == pytest.approx(ESS, rel=4e-7)


@pytest.mark.parametrize(("size", "dp_size", "order", "cp_size"), CUTS)
def test_loss_and_gradient_do_not_depend_on_the_cut(size, dp_size, order, cp_size):
    """Samples of one token: advantages per sequence, looked up with the offsets of the rank."""
    batches = list(micro_batches(SINGLE, size, dp_size, order, cp_size))
    _, context = step_context(batches)
    loss, gradient = 0.0, torch.zeros(len(RATIOS))
    for batch, log_probs, where in batches:
        log_probs.requires_grad_()
        output = p3o_loss(
            log_probs,
            batch.behavior_log_probs,
            batch.advantages,
            batch.mask,
            cu_seqlens=batch.local_cu_seqlens,
            context=context,
            num_tokens=N,
        )
        output.loss.backward()
        loss += output.loss.item()
        gradient.index_add_(0, where, log_probs.grad)
        assert output.num_tokens.item() == batch.num_tokens
        assert batch.num_tokens or (output.loss.item(), log_probs.grad.abs().max().item()) == (0.0, 0.0)
    # the goldens have 10 and 7 digits; float32 log-probs as above
    assert loss == pytest.approx(LOSS, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(GRADIENT), rtol=1e-6, atol=1e-7)
