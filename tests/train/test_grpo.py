"""GRPO's token loss against its definition in float64, written out token by token."""

import math

import pytest
import torch

from p3o_train.grpo import grpo_loss
from p3o_train.objective import Objective, micro_batch_loss
from p3o_train.packing import dummy_batch, pack
from p3o_train.parallel import ParallelGroups
from p3o_train.types import Sample

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
# one response for each sign of the advantage; ratios 1, 2, 0.5, 1.25 and a masked token, then 1.4, 0.7, 0.9
RATIOS = ((1.0, 2.0, 0.5, 1.25, 9.0), (1.4, 0.7, 0.9))
MASKS = ((1, 1, 1, 1, 0), (1, 1, 1))
ADVANTAGES = (1.5, -0.8)
BEHAVIOR = -2.0


def batch_and_log_probs():
    made = [
        Sample.from_lists(list(range(len(row) + 2)), len(row), [BEHAVIOR] * len(row), mask)
        for row, mask in zip(RATIOS, MASKS, strict=True)
    ]
    batch = pack(made, ADVANTAGES)
    log_probs = torch.full((batch.tokens.numel(),), math.nan)
    begin = 0
    for sample, row in zip(made, RATIOS, strict=True):
        end = begin + sample.token_ids.numel() - 1
        log_probs[end - len(row) : end] = BEHAVIOR + torch.tensor(row, dtype=torch.float64).log().float()
        begin = end + 1
    return batch, log_probs.requires_grad_()


def tokens():
    """(ratio, advantage) of every valid token, in packed order."""
    rows = zip(RATIOS, MASKS, ADVANTAGES, strict=True)
    return [(r, a) for row, mask, a in rows for r, keep in zip(row, mask, strict=True) if keep]


def clip(ratio):
    return min(max(ratio, 0.8), 1.3)


def test_loss_and_gradient_of_both_signs():
    batch, log_probs = batch_and_log_probs()
    loss, metrics = grpo_loss(log_probs, batch, **CLIP)
    want = [-min(r * a, clip(r) * a) for r, a in tokens()]
    # d/dlp of r a is r a, where the minimum takes the unclipped branch
    slopes = [-r * a if r * a <= clip(r) * a else 0.0 for r, a in tokens()]
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == pytest.approx(sum(want), rel=1e-6)  # ratios are logarithms in float32
    assert gradient[batch.mask].tolist() == pytest.approx(slopes, rel=1e-6)
    assert gradient[~batch.mask].tolist() == [0.0] * int((~batch.mask).sum())
    means = metrics.to_dict("")
    assert means["score_loss"] == pytest.approx(sum(want) / 7, rel=1e-6)
    assert means["clip_fraction"] == pytest.approx(4 / 7)  # 2, 0.5, 1.4 and 0.7
    assert means["valid_tokens"] == 7 and means["invalid_tokens"] == 0
    ratios = torch.tensor([r for r, _ in tokens()])
    assert means["normalized_ess"] == pytest.approx((ratios.sum() ** 2 / (7 * (ratios**2).sum())).item(), rel=1e-6)
    assert means["log_ratio_abs_max"] == pytest.approx(math.log(2.0), rel=1e-6)


def test_entropy_and_reference_terms():
    batch, log_probs = batch_and_log_probs()
    entropy = torch.linspace(0.5, 1.5, batch.tokens.numel()).requires_grad_()
    reference = torch.full((batch.tokens.numel(),), -2.5)
    extra = {"entropy": entropy, "entropy_coef": 0.1, "ref_log_probs": reference, "ref_kl_coef": 0.3}
    loss, metrics = grpo_loss(log_probs, batch, **CLIP, **extra)
    plain, _ = grpo_loss(log_probs, batch, **CLIP)
    distances = [BEHAVIOR + math.log(r) + 2.5 for r, _ in tokens()]
    k3 = sum(d + math.exp(-d) - 1 for d in distances)
    entropies = entropy.detach()[batch.mask].sum().item()
    assert loss.item() - plain.item() == pytest.approx(0.3 * k3 - 0.1 * entropies, rel=1e-5)
    assert torch.autograd.grad(loss, entropy)[0].tolist() == pytest.approx((-0.1 * batch.mask.float()).tolist())
    means = metrics.to_dict("")
    assert means["reference_kl"] == pytest.approx(k3 / 7, rel=1e-5)
    assert means["entropy"] == pytest.approx(entropies / 7, rel=1e-5)
    assert means["total_loss"] == pytest.approx(loss.item() / 7, rel=1e-6)


def test_a_term_without_its_tensor():
    batch, log_probs = batch_and_log_probs()
    with pytest.raises(ValueError, match=r"the ref term has the coefficient 0\.5, but its tensor is None"):
        grpo_loss(log_probs, batch, **CLIP, ref_kl_coef=0.5)


def test_invalid_data_is_counted_and_never_hidden():
    batch, log_probs = batch_and_log_probs()
    broken = log_probs.detach().clone()
    broken[int(batch.mask.nonzero()[2])] = 500.0
    loss, metrics = grpo_loss(broken, batch, **CLIP)
    assert loss.isnan() and metrics.to_dict("")["invalid_tokens"] >= 1


def test_a_dummy_adds_exact_zeros():
    logits = torch.full((1, 5), math.nan, requires_grad=True)
    made = micro_batch_loss(logits, dummy_batch(), Objective(advantage_estimator="grpo"), ParallelGroups())
    made.loss.backward()
    assert made.loss == 0 and torch.equal(logits.grad, torch.zeros(1, 5))
    assert made.metrics.vector.tolist() == [0.0] * 16
