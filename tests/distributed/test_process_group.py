"""Micro-batch scope over a process group: real processes over Gloo."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_all_ranks

from p3o_kernels import p3o_loss, ratio_stats

pytestmark = pytest.mark.host_only
RANKS, TOKENS = 2, 41


def batch():
    generator = torch.Generator().manual_seed(5)
    log_probs, noise, advantages = (torch.randn(TOKENS, generator=generator) for _ in range(3))
    return log_probs, log_probs + 0.5 * noise, advantages, torch.rand(TOKENS, generator=generator) > 0.2


def share(rank):
    """Unequal parts: 30 tokens and 11."""
    part = slice(0, 30) if rank == 0 else slice(30, TOKENS)
    return [tensor[part] for tensor in batch()]


def loss_and_gradient(rank):
    log_probs, *rest = share(rank)
    log_probs.requires_grad_()
    total = int(batch()[3].sum())
    output = p3o_loss(log_probs, *rest, process_group=dist.group.WORLD, num_tokens=total)
    output.loss.backward()
    metrics = output.metrics.all_reduce(dist.group.WORLD).to_dict("")
    stats = ratio_stats(share(rank)[0], rest[0], rest[2]).all_reduce(dist.group.WORLD)
    return output.loss.item(), log_probs.grad.tolist(), output.context.ess.item(), metrics, stats.as_vector().tolist()


def test_two_ranks_equal_one_process():
    log_probs, *rest = batch()
    log_probs.requires_grad_()
    whole = p3o_loss(log_probs, *rest)
    whole.loss.backward()
    first, second = on_all_ranks(loss_and_gradient, RANKS)
    assert first[2] == second[2] == pytest.approx(whole.context.ess.item(), rel=1e-13)
    assert first[3:] == second[3:]  # the same bits on every rank
    assert first[0] + second[0] == pytest.approx(whole.loss.item(), rel=1e-6)
    torch.testing.assert_close(torch.tensor(first[1] + second[1]), log_probs.grad, rtol=1e-6, atol=1e-8)
    for name, value in whole.metrics.to_dict("").items():
        assert first[3][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def raise_then_go_on(rank):
    """Only rank 1 has bad data; both must raise, and the group must still work."""
    texts = []
    for name in ("behavior_log_probs", "advantages"):
        log_probs, behavior, advantages, mask = share(rank)
        named = {"behavior_log_probs": behavior, "advantages": advantages}
        mask[3] = True
        if rank == 1:
            named[name][3] = float("nan")
        try:
            p3o_loss(log_probs, **named, mask=mask, process_group=dist.group.WORLD)
        except ValueError as error:
            texts.append(str(error))
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return texts, ones.item()


def test_every_rank_raises_and_the_group_stays_usable():
    first, second = on_all_ranks(raise_then_go_on, RANKS)
    assert first[1] == second[1] == RANKS
    assert len(first[0]) == len(second[0]) == 2
    for text, other in zip(first[0], second[0], strict=True):
        assert text.startswith("invalid data on 1 of ") and "no single token of this rank is the cause" in text
        assert other.split(":")[0] == text.split(":")[0] and "the first is token 3" in other


def no_token_on_one_rank(rank):
    log_probs, behavior, advantages, mask = share(rank)
    log_probs.requires_grad_()
    output = p3o_loss(log_probs, behavior, advantages, mask & (rank == 0), process_group=dist.group.WORLD)
    output.loss.backward()
    return output.context.ess.item(), output.loss.item(), log_probs.grad.abs().sum().item()


def test_a_rank_without_tokens_takes_part():
    first, second = on_all_ranks(no_token_on_one_rank, RANKS)
    assert first[0] == second[0] and first[2] > 0
    assert second[1:] == (0.0, 0.0)
