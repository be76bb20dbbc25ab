"""The loss with two anchors: the behavior policy and a proximal one."""

import math

import pytest
import torch

from p3o_kernels import RatioStats, p3o_loss, p4o_loss, ratio_stats
from tests.kernels.anchored import KL_MODES, REDUCTIONS, TOKENS, UNSANITIZED, close, compare, run, two_anchor_batch

pytestmark = UNSANITIZED


def ess_of(ratios):
    return sum(ratios) ** 2 / (len(ratios) * (sum(ratio**2 for ratio in ratios) + 1e-8))


@pytest.mark.parametrize("to_proximal", [[1.5, 1.0, 0.8, 2.0], [0.1, 1.0, 9.0, 0.5]], ids=["b-farther", "prox-farther"])
def test_values_by_the_definition(place, to_proximal):
    ratios, advantages = [1.0, 2.0, 0.5, 4.0], [1.0, -1.0, 2.0, -0.5]
    ess_b, ess_prox = ess_of(ratios), ess_of(to_proximal)
    ess = min(ess_b, ess_prox)
    log_probs, proximal, grads, losses, pulls = [], [], [], [], []
    for ratio, other, advantage in zip(ratios, to_proximal, advantages, strict=True):
        probability = math.exp(-2.0) * ratio
        mixture = ((1 - ess_b) * math.exp(-2.0) + (1 - ess_prox) * probability / other) / (2 - ess_b - ess_prox)
        weight, inverse = min(ratio, ess), mixture / probability
        log_probs.append(math.log(probability))
        proximal.append(math.log(probability / other))
        pulls.append((1 - ess) * (-math.log(inverse) + inverse - 1))
        grads.append(-weight * advantage + (1 - ess) * (1 - inverse))
        losses.append(-weight * log_probs[-1] * advantage + pulls[-1])
    lp, prox, a = (torch.tensor(values, device=place.device) for values in (log_probs, proximal, advantages))
    output, grad = run(p4o_loss, [lp, torch.full_like(lp, -2.0), prox, a], reduction="sum")
    # log-probs are rounded to float32, which moves every ratio by 1e-7 of itself
    assert output.context.ess.item() == pytest.approx(ess_b, rel=1e-6)
    assert output.proximal_context.ess.item() == pytest.approx(ess_prox, rel=1e-6)
    assert output.ess.item() == min(output.context.ess.item(), output.proximal_context.ess.item())
    assert output.loss.item() == pytest.approx(sum(losses), rel=1e-6)
    assert grad.tolist() == pytest.approx(grads, rel=1e-6)
    metrics = output.metrics.to_dict("")
    assert metrics["normalized_ess"] == metrics["adaptive_cap"] == pytest.approx(ess, rel=1e-6)
    assert metrics["adaptive_kl_loss"] * 4 == pytest.approx(sum(pulls), rel=1e-6)
    own = sum(math.log(ratio) + 1 / ratio - 1 for ratio in ratios)
    assert metrics["behavior_kl_proxy"] * 4 == pytest.approx(own, rel=1e-6)
    assert metrics["ratio_mean"] == pytest.approx(1.875, rel=1e-6)


@pytest.mark.parametrize("kl_mode", KL_MODES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_and_gradient(place, reduction, kl_mode):
    tensors = two_anchor_batch(place.device)
    upstream = torch.linspace(-1.0, 2.0, TOKENS, device=place.device) if reduction == "none" else None
    output, grad = compare(
        p4o_loss, tensors, backend=place.backend, upstream=upstream, reduction=reduction, kl_mode=kl_mode
    )
    assert output.loss.dtype == torch.float32 and int(output.num_tokens) == int(tensors[4].sum())
    assert (grad[~tensors[4]] == 0).all()


@pytest.mark.parametrize("log_ratio", [-20.0, 20.0, 90.0])
@pytest.mark.parametrize("index", [1, 2], ids=["behavior", "proximal"])
@pytest.mark.parametrize("kl_mode", KL_MODES)
def test_a_distant_token(kl_mode, index, log_ratio):
    tensors = two_anchor_batch()
    tensors[4][5] = True
    tensors[index][5] = tensors[0][5] - log_ratio
    compare(p4o_loss, tensors, kl_mode=kl_mode)


def test_a_token_far_from_both_is_pulled_back():
    """l = -20 to both anchors: the safe gradient points back, the plain one away."""
    tensors = two_anchor_batch()[:4]
    tensors[1][5] = tensors[2][5] = tensors[0][5] + 20.0
    tensors[3][5] = 0.0
    away = 1.0 - p4o_loss(*tensors).ess.item()
    for kl_mode, slope in (("proxy_safe", 1.0 - math.exp(10.0)), ("proxy", 1.0)):
        _, grad = run(p4o_loss, tensors, reduction="sum", kl_mode=kl_mode)
        assert grad[5].item() == pytest.approx(away * slope, rel=1e-6)  # a few float32 roundings


@pytest.mark.parametrize("kl_mode", KL_MODES)
def test_a_proximal_policy_equal_to_behavior_is_p3o(place, kl_mode):
    """Equal e, equal weights: the mixture is b, bit for bit."""
    log_probs, behavior, _, *rest = two_anchor_batch(place.device)
    got, grad = run(p4o_loss, [log_probs, behavior, behavior, *rest], kl_mode=kl_mode)
    want, want_grad = run(p3o_loss, [log_probs, behavior, *rest], kl_mode=kl_mode, backend=place.backend)
    same = torch.equal if place.backend == "eager" and place.device == "cpu" else close
    assert same(grad, want_grad) and same(got.loss, want.loss)
    # here (1 - e) is multiplied onto each term, there onto their sum: float64 roundings on a CPU
    exact = {"rtol": 1e-14, "atol": 1e-14} if same is torch.equal else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(got.metrics.vector, want.metrics.vector, **exact)


@pytest.mark.parametrize("kl_mode", KL_MODES)
def test_a_fresh_proximal_policy_has_no_share(kl_mode):
    """e_prox = 1 but for 1e-8 / N: the mixture is b but for that share, as in P3O."""
    log_probs, behavior, _, *rest = two_anchor_batch()
    _, grad = run(p4o_loss, [log_probs, behavior, log_probs, *rest], kl_mode=kl_mode)
    _, want = run(p3o_loss, [log_probs, behavior, *rest], kl_mode=kl_mode)
    # a share of 1e-9 is below the rounding of the log-prob of the mixture, 6e-8 of 2, and K' is at most 3 of that
    torch.testing.assert_close(grad, want, rtol=1e-6, atol=3e-7)


def test_an_anchor_without_weight_drops_out_exactly(place):
    """A frozen e of exactly 1, and an anchor 100 nats above the other."""
    log_probs, behavior, proximal, *rest = two_anchor_batch(place.device)
    context = ratio_stats(log_probs, behavior, rest[1]).to_context()
    fresh = RatioStats.zeros(place.device).to_context()
    for far in (proximal + 100.0, proximal - 100.0):
        got, grad = run(
            p4o_loss, [log_probs, behavior, far, *rest], context=context, proximal_context=fresh, reduction="sum"
        )
        want, want_grad = run(p3o_loss, [log_probs, behavior, *rest], context=context, reduction="sum")
        assert close(grad, want_grad) and close(got.loss, want.loss)


def test_equal_policies_leave_the_policy_gradient(place):
    log_probs, _, _, advantages, _ = two_anchor_batch(place.device)
    output, grad = run(p4o_loss, [log_probs, log_probs, log_probs, advantages], reduction="sum")
    assert torch.equal(grad, -advantages)
    assert output.metrics.to_dict("")["adaptive_kl_loss"] == 0.0


@pytest.mark.parametrize(("away", "pulled"), [(0.9e-6, False), (1.1e-6, True)])
def test_the_gate(place, away, pulled):
    """K of one token 20 nats away is 22,000, so that a pull of 1e-6 shows."""
    tensors = two_anchor_batch(place.device)[:4]
    tensors[3][:] = 0.0
    tensors[1][5] = tensors[2][5] = tensors[0][5] + 20.0
    one = RatioStats.zeros(place.device).to_context()
    near = torch.tensor(1.0 - away, dtype=torch.float64, device=place.device)
    context = type(one)(near, near, one.num_tokens, one.ratio_mean, one.ratio_std)
    for first, second in ((context, one), (one, context)):
        output, grad = run(p4o_loss, tensors, context=first, proximal_context=second, reduction="sum")
        want = away * (1.0 - math.exp(10.0)) if pulled else 0.0
        # e - 1 keeps ten digits of float64
        assert grad[5].item() == pytest.approx(want, rel=1e-6)
        assert (output.metrics.to_dict("")["adaptive_kl_loss"] != 0.0) == pulled


def test_importance_is_unbiased_for_the_kl_to_the_mixture():
    """Every entry of a vocabulary once, weighed by b: the sum is KL(pi || mixture), and its gradient in the logits."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(12, generator=generator, dtype=torch.float64).requires_grad_()
    pi = logits.log_softmax(0)
    behavior, proximal = (0.7 * torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(2))
    behavior, proximal = behavior.log_softmax(0), proximal.log_softmax(0)
    log_probs = pi.detach().float().requires_grad_()
    none = torch.zeros(12)
    output = p4o_loss(log_probs, behavior.float(), proximal.float(), none, reduction="none", kl_mode="importance")
    weights = [1.0 - each.ess for each in (output.context, output.proximal_context)]
    mixture = (weights[0] * behavior.exp() + weights[1] * proximal.exp()) / (weights[0] + weights[1])
    want = (1.0 - output.ess) * (pi.exp() * (pi - mixture.log())).sum()
    sampled = (behavior.exp() * output.loss.double()).sum()
    assert sampled.item() == pytest.approx(want.item(), rel=1e-5)  # 12 terms of float32, some cancel
    (want_grad,) = torch.autograd.grad(want, logits, retain_graph=True)
    (slopes,) = torch.autograd.grad(sampled, log_probs)
    (grad,) = torch.autograd.grad(pi, logits, slopes.double())
    torch.testing.assert_close(grad, want_grad, rtol=1e-5, atol=1e-7)  # likewise


def test_step_scope_does_not_depend_on_the_cut(place):
    tensors = two_anchor_batch(place.device)
    cut, mask = 14, tensors[4]
    _, whole = run(p4o_loss, tensors, reduction="sum")
    frozen = {}
    for name, index in (("context", 1), ("proximal_context", 2)):
        halves = [
            ratio_stats(tensors[0][part], tensors[index][part], mask[part]) for part in (slice(cut), slice(cut, None))
        ]
        frozen[name] = (halves[0] + halves[1]).to_context()
    grads = [
        run(p4o_loss, [t[part] for t in tensors], reduction="sum", **frozen)[1]
        for part in (slice(cut), slice(cut, None))
    ]
    torch.testing.assert_close(torch.cat(grads), whole, rtol=2e-7, atol=0)  # e differs by float64 roundings
