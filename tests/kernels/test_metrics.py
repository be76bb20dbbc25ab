"""Metrics against their definitions in float64, and how they add."""

import dataclasses

import pytest
import torch

from p3o_kernels import ESSContext, P3OMetrics, RatioStats, exact_kl, p3o_loss, ratio_stats

NAMES = {
    *("normalized_ess", "adaptive_cap", "ratio_mean", "ratio_std", "log_ratio_abs_mean", "log_ratio_abs_max"),
    *("cap_fraction", "cap_removed_mass", "clip_fraction", "score_loss", "behavior_kl_proxy", "adaptive_kl_loss"),
    *("reference_kl", "entropy", "valid_tokens", "total_loss", "invalid_tokens"),
}


def batch(device, tokens=500, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(tokens, generator=generator)
    tensors = (log_probs, log_probs + 0.4 * torch.randn(tokens, generator=generator))
    mask = torch.rand(tokens, generator=generator) > 0.2
    return *(t.to(device) for t in tensors), torch.randn(tokens, generator=generator).to(device), mask.to(device)


def test_definitions(place):
    log_probs, behavior, advantages, mask = batch(place.device)
    entropy, reference = -log_probs, log_probs - 0.3
    output = p3o_loss(
        *(log_probs, behavior, advantages, mask),
        **{"ref_log_probs": reference, "ref_kl_coef": 0.5, "entropy": entropy, "entropy_coef": 0.1},
        **{"clip_low": 0.1, "clip_high": 0.3, "backend": place.backend},
    )
    means = output.metrics.to_dict(prefix="")
    assert set(means) == NAMES
    assert set(output.metrics.to_dict()) == {f"p3o/{name}" for name in NAMES}
    lp, lr, adv = (t[mask].double().cpu() for t in (log_probs, log_probs - behavior, advantages))
    ratio = lr.exp()
    ess = (ratio.sum() ** 2 / (len(ratio) * (ratio.square().sum() + 1e-8))).item()
    capped = ratio.clamp_max(ess)
    k3 = lr + (-lr).exp() - 1
    reference_kl = 0.3 + torch.tensor(-0.3).double().exp() - 1
    score = -(capped * lp * adv).mean()
    want = {
        "normalized_ess": ess,
        "adaptive_cap": ess,
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(correction=0),
        "log_ratio_abs_mean": lr.abs().mean(),
        "log_ratio_abs_max": lr.abs().max(),
        "cap_fraction": (ratio > ess).double().mean(),
        "cap_removed_mass": 1 - capped.sum() / ratio.sum(),
        "clip_fraction": ((ratio < 0.9) | (ratio > 1.3)).double().mean(),
        "score_loss": score,
        "behavior_kl_proxy": k3.mean(),
        "adaptive_kl_loss": (1 - ess) * k3.mean(),
        "reference_kl": reference_kl,
        "entropy": -lp.mean(),
        "valid_tokens": len(lp),
        "invalid_tokens": 0,
        "total_loss": score + (1 - ess) * k3.mean() + 0.5 * reference_kl + 0.1 * lp.mean(),
    }
    for name, value in want.items():
        assert means[name] == pytest.approx(float(value), rel=2e-6, abs=1e-7), name
    assert output.loss.item() == pytest.approx(means["total_loss"], rel=1e-6)
    context = output.context
    assert context.cap.item() == context.ess.item() and int(context.num_tokens) == len(lp)
    assert context.ratio_mean.item() == pytest.approx(ratio.mean().item(), rel=1e-12)
    assert context.ratio_std.item() == pytest.approx(ratio.std(correction=0).item(), rel=1e-9)


def test_total_is_not_a_mean_of_means(place):
    long, short = batch(place.device, 500), batch(place.device, 20, seed=1)
    outputs = [p3o_loss(*tensors, backend=place.backend) for tensors in (long, short)]
    total = (outputs[0].metrics + outputs[1].metrics).to_dict("")
    counts = [output.metrics.to_dict("")["valid_tokens"] for output in outputs]
    assert total["valid_tokens"] == sum(counts)
    for name in ("normalized_ess", "score_loss", "behavior_kl_proxy", "clip_fraction", "ratio_mean"):
        parts = [output.metrics.to_dict("")[name] for output in outputs]
        weighted = sum(part * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
        assert total[name] == pytest.approx(weighted, rel=1e-12)
    assert total["log_ratio_abs_max"] == max(o.metrics.to_dict("")["log_ratio_abs_max"] for o in outputs)


def test_nothing_adds_nothing(place):
    log_probs, behavior, advantages, _ = batch(place.device, 8)
    none = torch.zeros(8, dtype=torch.bool, device=place.device)
    empty = p3o_loss(log_probs, behavior, advantages, none, backend=place.backend).metrics
    some = p3o_loss(log_probs, behavior, advantages, backend=place.backend).metrics
    assert torch.equal((some + empty).vector, some.vector)
    assert torch.equal((some + P3OMetrics.zeros(place.device)).vector, some.vector)
    means = empty.to_dict("")
    ones = {"normalized_ess", "adaptive_cap", "ratio_mean"}
    assert means == {name: 1.0 if name in ones else 0.0 for name in NAMES}


def test_statistics_are_frozen_values(place):
    log_probs, behavior, _, mask = batch(place.device)
    stats = ratio_stats(log_probs, behavior, mask, backend=place.backend)
    assert all(getattr(stats, field.name).shape == () for field in dataclasses.fields(RatioStats))
    assert stats.as_vector().dtype == torch.float64 and not stats.as_vector().requires_grad
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.invalid = stats.num_tokens
    context = stats.to_context()
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.ess = context.cap
    assert all(getattr(context, field.name).shape == () for field in dataclasses.fields(ESSContext))
    zero = RatioStats.zeros(place.device) + stats
    assert torch.equal(zero.as_vector(), stats.as_vector())


def test_step_context_is_the_micro_batch_context(place):
    """One call without a group and the pre-pass over the same tokens agree to the last bits of float64."""
    log_probs, behavior, advantages, mask = batch(place.device)
    own = p3o_loss(log_probs, behavior, advantages, mask, backend=place.backend).context
    given = ratio_stats(log_probs, behavior, mask, backend=place.backend).to_context()
    for field in dataclasses.fields(ESSContext):
        assert getattr(own, field.name).item() == pytest.approx(getattr(given, field.name).item(), rel=1e-12)


@pytest.mark.host_only
def test_exact_kl():
    generator = torch.Generator().manual_seed(0)
    policy, behavior = (torch.randn(5, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    policy.requires_grad_()
    want = torch.nn.functional.kl_div(
        behavior.log_softmax(-1), policy.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    mask = torch.tensor([True, True, False, True, True])
    torch.testing.assert_close(exact_kl(policy, behavior), want)
    poisoned = torch.where(mask[:, None], behavior, torch.nan)
    torch.testing.assert_close(exact_kl(policy, poisoned, mask), torch.where(mask, want, 0.0))
    exact_kl(policy, poisoned, mask).sum().backward()
    assert policy.grad.isfinite().all() and (policy.grad[2] == 0).all()
    masked = torch.where(torch.arange(11) > 2, policy.detach(), -torch.inf)
    assert exact_kl(masked, behavior).isfinite().all()  # pi = 0 contributes 0
    assert exact_kl(behavior, masked).isinf().all()
    assert exact_kl(policy.detach().bfloat16(), behavior.bfloat16()).dtype == torch.float32


@pytest.mark.host_only
def test_importance_mode_estimates_the_exact_kl_and_the_proxy_does_not():
    """E_b[rho l - rho + 1] is KL(pi || b); E_b[k3] is chi^2(b || pi) - KL(b || pi)."""
    generator = torch.Generator().manual_seed(1)
    policy, behavior = (0.7 * torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2))
    policy, behavior = policy.log_softmax(-1), behavior.log_softmax(-1)
    tokens = torch.multinomial(behavior.exp(), 400_000, replacement=True, generator=generator)
    arguments = (policy[tokens].float(), behavior[tokens].float(), torch.zeros(len(tokens)))
    estimate = {
        mode: p3o_loss(*arguments, kl_mode=mode).metrics.to_dict("")["behavior_kl_proxy"]
        for mode in ("importance", "proxy_safe")
    }
    exact = exact_kl(policy, behavior).item()
    chi_squared = ((behavior - policy).exp() * behavior.exp()).sum().item() - 1
    reverse = exact_kl(behavior, policy).item()
    # 400,000 samples: the standard error is below 0.5%
    assert estimate["importance"] == pytest.approx(exact, rel=0.02)
    assert estimate["proxy_safe"] == pytest.approx(chi_squared - reverse, rel=0.02)
    assert abs(estimate["proxy_safe"] - exact) > 0.05 * exact
