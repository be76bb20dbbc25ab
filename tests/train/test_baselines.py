"""The losses that P3O is compared with, against their definitions in float64, written out token by token."""

import math

import pytest
import torch

from p3o_kernels import ratio_stats, token_log_probs
from p3o_train.baselines import baseline_loss
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
    loss, metrics = baseline_loss("grpo", log_probs, batch, **CLIP)
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


ESS = 0.6
WEIGHTS = {
    # method -> constant weight of a token, by its ratio
    "cispo": lambda ratio: clip(ratio),
    "pg": lambda ratio: 1.0,
    "p3o": lambda ratio: min(ratio, ESS),
}


@pytest.mark.parametrize("method", WEIGHTS)
def test_constant_weights(method):
    batch, log_probs = batch_and_log_probs()
    ess = torch.tensor(ESS, dtype=torch.float64) if method == "p3o" else None
    loss, metrics = baseline_loss(method, log_probs, batch, ess=ess, **CLIP)
    weights = [WEIGHTS[method](r) for r, _ in tokens()]
    want = [-w * a * (BEHAVIOR + math.log(r)) for w, (r, a) in zip(weights, tokens(), strict=True)]
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == pytest.approx(sum(want), rel=1e-6)  # ratios are logarithms in float32
    slopes = [-w * a for w, (_, a) in zip(weights, tokens(), strict=True)]
    assert gradient[batch.mask].tolist() == pytest.approx(slopes, rel=1e-6)
    assert gradient[~batch.mask].tolist() == [0.0] * int((~batch.mask).sum())
    means = metrics.to_dict("")
    ratios = torch.tensor([r for r, _ in tokens()], dtype=torch.float64)
    measured = (ratios.sum() ** 2 / (7 * (ratios**2).sum())).item()
    assert means["normalized_ess"] == pytest.approx(measured if ess is None else ESS, rel=1e-6)
    assert means["adaptive_cap"] == means["normalized_ess"]
    assert means["cap_fraction"] == pytest.approx(0 if ess is None else 6 / 7)  # all but the ratio 0.5
    assert means["cap_removed_mass"] == pytest.approx(1 - sum(weights) / ratios.sum().item(), abs=1e-6)
    assert means["clip_fraction"] == pytest.approx(4 / 7)
    assert means["ratio_mean"] == pytest.approx(ratios.mean().item(), rel=1e-6)
    pull = [1 / r - 1 + math.log(r) for r, _ in tokens()]
    assert means["behavior_kl_proxy"] == pytest.approx(sum(pull) / 7, rel=1e-5)
    assert means["adaptive_kl_loss"] == 0
    assert means["score_loss"] == means["total_loss"] == pytest.approx(sum(want) / 7, rel=1e-6)


def test_cispo_with_a_margin_of_one_has_no_lower_bound():
    batch, log_probs = batch_and_log_probs()
    loss, _ = baseline_loss("cispo", log_probs, batch, clip_low=1.0, clip_high=0.3)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient[batch.mask].tolist() == pytest.approx([-min(r, 1.3) * a for r, a in tokens()], rel=1e-6)


def test_p3o_without_its_pull_is_the_score_of_p3o():
    """Of the whole objective, beside the kernel's own score: the rest of P3O's gradient is its pull."""
    made = [Sample.from_lists([0, 1, 2, 3], 2, [-1.0, -2.0]), Sample.from_lists([3, 2, 1], 2, [-0.7, -1.9])]
    batch = pack(made, [1.0, -0.5])
    logits = torch.randn(batch.tokens.numel(), 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    own = token_log_probs(logits.detach(), batch.labels, mask=batch.mask)
    context = ratio_stats(own, batch.behavior_log_probs, batch.mask).to_context()
    assert context.ess < 0.95
    found = {}
    for mode in ("off", "proxy_safe"):
        objective = Objective(ess_scope="step", kl_mode=mode)
        made = micro_batch_loss(logits, batch, objective, ParallelGroups(), context)
        found[mode] = made.metrics.to_dict("")
        if mode == "off":
            (gradient,) = torch.autograd.grad(made.loss, logits)
    for name in found["off"].keys() - {"adaptive_kl_loss", "total_loss", "entropy"}:
        assert found["off"][name] == pytest.approx(found["proxy_safe"][name], rel=1e-5, abs=1e-7), name
    ratio = (own - batch.behavior_log_probs).double().exp()
    expanded = torch.tensor([1.0] * 4 + [-0.5] * 3, dtype=torch.float64)
    again = logits.detach().double().requires_grad_()
    picked = again.log_softmax(-1).gather(-1, batch.labels[:, None]).squeeze(-1)
    want = -(ratio.clamp(max=context.ess.item()) * expanded * picked)[batch.mask].sum()
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(want, again)[0], rtol=1e-5, atol=1e-6)


def test_entropy_and_reference_terms():
    batch, log_probs = batch_and_log_probs()
    entropy = torch.linspace(0.5, 1.5, batch.tokens.numel()).requires_grad_()
    reference = torch.full((batch.tokens.numel(),), -2.5)
    extra = {"entropy": entropy, "entropy_coef": 0.1, "ref_log_probs": reference, "ref_kl_coef": 0.3}
    loss, metrics = baseline_loss("grpo", log_probs, batch, **CLIP, **extra)
    plain, _ = baseline_loss("grpo", log_probs, batch, **CLIP)
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
        baseline_loss("grpo", log_probs, batch, **CLIP, ref_kl_coef=0.5)


def test_an_unknown_method():
    batch, log_probs = batch_and_log_probs()
    with pytest.raises(ValueError, match=r"method must be one of grpo, cispo, pg or p3o; got 'ppo'"):
        baseline_loss("ppo", log_probs, batch, **CLIP)


def test_p3o_without_its_e():
    batch, log_probs = batch_and_log_probs()
    with pytest.raises(ValueError, match="ess is None; freeze e before the loss"):
        baseline_loss("p3o", log_probs, batch, **CLIP)


def test_no_pull_in_micro_batch_scope():
    with pytest.raises(ValueError, match=r'kl_mode="off" needs ess_scope="step", got \'micro-batch\''):
        Objective(kl_mode="off")
    Objective(kl_mode="off", advantage_estimator="pg")


def test_invalid_data_is_counted_and_never_hidden():
    batch, log_probs = batch_and_log_probs()
    broken = log_probs.detach().clone()
    broken[int(batch.mask.nonzero()[2])] = 500.0
    loss, metrics = baseline_loss("grpo", broken, batch, **CLIP)
    assert loss.isnan() and metrics.to_dict("")["invalid_tokens"] >= 1


@pytest.mark.parametrize("method", ["grpo", "cispo", "pg", "p3o"])
def test_a_dummy_adds_exact_zeros(method):
    logits = torch.full((1, 5), math.nan, requires_grad=True)
    objective = Objective(advantage_estimator=method, kl_mode="off", ess_scope="step")
    stats = ratio_stats(torch.zeros(3), torch.tensor([0.0, 0.5, 1.0]))
    context = stats.to_context() if objective.needs_context else None
    made = micro_batch_loss(logits, dummy_batch(), objective, ParallelGroups(), context)
    made.loss.backward()
    assert made.loss == 0 and torch.equal(logits.grad, torch.zeros(1, 5))
    assert made.metrics.vector.tolist() == [0.0] * 16
