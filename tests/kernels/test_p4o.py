"""The loss with two anchors: the behavior policy and a proximal one."""

import math

import pytest
import torch
import torch.distributed as dist

from p3o_kernels import RatioStats, p3o_loss, ratio_stats, reference
from p3o_kernels.p4o import p4o_loss
from tests.distributed.ranks import on_all_ranks

TOKENS = 37
NAMES = ("log_probs", "behavior_log_probs", "proximal_log_probs", "advantages", "mask")
REDUCTIONS = ["mean", "sum", "none"]
KL_MODES = ["proxy", "proxy_safe", "importance"]


def batch(device="cpu", tokens=TOKENS, drift=0.6, proximal_drift=0.3):
    generator = torch.Generator().manual_seed(1)
    log_probs = -torch.rand(tokens, generator=generator) - 0.1
    behavior = log_probs + drift * torch.randn(tokens, generator=generator)
    proximal = log_probs + proximal_drift * torch.randn(tokens, generator=generator)
    advantages = torch.randn(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) > 0.2
    return [tensor.to(device) for tensor in (log_probs, behavior, proximal, advantages, mask)]


def run(function, tensors, dtype=None, upstream=None, **options):
    tensors = [t.to(dtype) if dtype and t.is_floating_point() else t.clone() for t in tensors]
    tensors[0].requires_grad_()
    output = function(*tensors, **options)
    output.loss.backward(None if upstream is None else upstream.to(output.loss.dtype))
    return output, tensors[0].grad


def assert_as_exact_as_eager(value, truth, eager):
    """At most 1.5 times the largest error of eager autograd in float32, or 1e-6 of the largest value."""
    value, truth, eager = value.detach().double().cpu(), truth.detach().cpu(), eager.detach().double().cpu()
    allowed = max(1.5 * (eager - truth).abs().max().item(), 1e-6 * truth.abs().max().item())
    assert (value - truth).abs().max().item() <= allowed


def compare(tensors, **options):
    output, grad = run(p4o_loss, tensors, **options)
    truth, truth_grad = run(reference.p4o_loss, tensors, torch.float64, **options)
    eager, eager_grad = run(reference.p4o_loss, tensors, **options)
    assert_as_exact_as_eager(output.loss, truth.loss, eager.loss)
    assert_as_exact_as_eager(grad, truth_grad, eager_grad)
    # sums of float32 terms, in float64; the float64 reference does not round l
    torch.testing.assert_close(output.metrics.vector, truth.metrics.vector, rtol=1e-5, atol=1e-5)
    return output, grad


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
    tensors = batch(place.device)
    upstream = torch.linspace(-1.0, 2.0, TOKENS, device=place.device) if reduction == "none" else None
    output, grad = compare(tensors, upstream=upstream, reduction=reduction, kl_mode=kl_mode)
    assert output.loss.dtype == torch.float32 and int(output.num_tokens) == int(tensors[4].sum())
    assert (grad[~tensors[4]] == 0).all()


@pytest.mark.parametrize("log_ratio", [-20.0, 20.0, 90.0])
@pytest.mark.parametrize("index", [1, 2], ids=["behavior", "proximal"])
@pytest.mark.parametrize("kl_mode", KL_MODES)
def test_a_distant_token(kl_mode, index, log_ratio):
    tensors = batch()
    tensors[4][5] = True
    tensors[index][5] = tensors[0][5] - log_ratio
    compare(tensors, kl_mode=kl_mode)


def test_a_token_far_from_both_is_pulled_back():
    """l = -20 to both anchors: the safe gradient points back, the plain one away."""
    tensors = batch()[:4]
    tensors[1][5] = tensors[2][5] = tensors[0][5] + 20.0
    tensors[3][5] = 0.0
    away = 1.0 - p4o_loss(*tensors).ess.item()
    for kl_mode, slope in (("proxy_safe", 1.0 - math.exp(10.0)), ("proxy", 1.0)):
        _, grad = run(p4o_loss, tensors, reduction="sum", kl_mode=kl_mode)
        assert grad[5].item() == pytest.approx(away * slope, rel=1e-6)  # a few float32 roundings


@pytest.mark.parametrize("kl_mode", KL_MODES)
def test_a_proximal_policy_equal_to_behavior_is_p3o(place, kl_mode):
    """Equal e, equal weights: the mixture is b, bit for bit."""
    log_probs, behavior, _, *rest = batch(place.device)
    got, grad = run(p4o_loss, [log_probs, behavior, behavior, *rest], kl_mode=kl_mode)
    want, want_grad = run(p3o_loss, [log_probs, behavior, *rest], kl_mode=kl_mode, backend=place.backend)
    same = torch.equal if place.backend == "eager" and place.device == "cpu" else close
    assert same(grad, want_grad) and same(got.loss, want.loss)
    # here (1 - e) is multiplied onto each term, there onto their sum: float64 roundings on a CPU
    exact = {"rtol": 1e-14, "atol": 1e-14} if same is torch.equal else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(got.metrics.vector, want.metrics.vector, **exact)


def close(value, want):
    # float32 terms of another order of operations, in kernels: a few roundings
    return torch.allclose(value, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())


@pytest.mark.parametrize("kl_mode", KL_MODES)
def test_a_fresh_proximal_policy_has_no_share(kl_mode):
    """e_prox = 1 but for 1e-8 / N: the mixture is b but for that share, as in P3O."""
    log_probs, behavior, _, *rest = batch()
    _, grad = run(p4o_loss, [log_probs, behavior, log_probs, *rest], kl_mode=kl_mode)
    _, want = run(p3o_loss, [log_probs, behavior, *rest], kl_mode=kl_mode)
    # a share of 1e-9 is below the rounding of the log-prob of the mixture, 6e-8 of 2, and K' is at most 3 of that
    torch.testing.assert_close(grad, want, rtol=1e-6, atol=3e-7)


def test_an_anchor_without_weight_drops_out_exactly(place):
    """A frozen e of exactly 1, and an anchor 100 nats above the other."""
    log_probs, behavior, proximal, *rest = batch(place.device)
    context = ratio_stats(log_probs, behavior, rest[1]).to_context()
    fresh = RatioStats.zeros(place.device).to_context()
    for far in (proximal + 100.0, proximal - 100.0):
        got, grad = run(
            p4o_loss, [log_probs, behavior, far, *rest], context=context, proximal_context=fresh, reduction="sum"
        )
        want, want_grad = run(p3o_loss, [log_probs, behavior, *rest], context=context, reduction="sum")
        assert close(grad, want_grad) and close(got.loss, want.loss)


def test_equal_policies_leave_the_policy_gradient(place):
    log_probs, _, _, advantages, _ = batch(place.device)
    output, grad = run(p4o_loss, [log_probs, log_probs, log_probs, advantages], reduction="sum")
    assert torch.equal(grad, -advantages)
    assert output.metrics.to_dict("")["adaptive_kl_loss"] == 0.0


@pytest.mark.parametrize(("away", "pulled"), [(0.9e-6, False), (1.1e-6, True)])
def test_the_gate(place, away, pulled):
    """K of one token 20 nats away is 22,000, so that a pull of 1e-6 shows."""
    tensors = batch(place.device)[:4]
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
    tensors = batch(place.device)
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


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_a_masked_slot_changes_no_bit(place, index, poison):
    tensors = batch(place.device)
    clean, clean_grad = run(p4o_loss, tensors)
    tensors[index] = torch.where(tensors[4], tensors[index], poison)
    output, grad = run(p4o_loss, tensors)
    assert torch.equal(output.loss, clean.loss) and torch.equal(grad, clean_grad)
    assert torch.equal(output.metrics.vector, clean.metrics.vector)
    assert torch.equal(output.ess, clean.ess)


def test_several_chunks(monkeypatch):
    tensors = batch()
    want, want_grad = run(p4o_loss, tensors, reduction="none", upstream=tensors[3])
    monkeypatch.setattr("p3o_kernels._eager.CPU_CHUNK", 8)
    got, grad = run(p4o_loss, tensors, reduction="none", upstream=tensors[3])
    # the order of adding the ratios differs, hence e, by float64 roundings
    torch.testing.assert_close(got.loss, want.loss, rtol=2e-7, atol=0)
    torch.testing.assert_close(grad, want_grad, rtol=2e-7, atol=0)
    torch.testing.assert_close(got.metrics.vector, want.metrics.vector, rtol=1e-12, atol=1e-12)


def test_shapes_strides_and_half_precision(place):
    tensors = batch(place.device, tokens=36)
    whole, grad = run(p4o_loss, tensors, reduction="none", upstream=torch.ones(36, device=place.device))
    square = [t.reshape(6, 6).t().contiguous().t() for t in tensors]
    got, square_grad = run(p4o_loss, square, reduction="none", upstream=torch.ones(6, 6, device=place.device))
    assert torch.equal(got.loss.flatten(), whole.loss) and torch.equal(square_grad.flatten(), grad)
    half = [t.half() if t.is_floating_point() else t for t in tensors]
    first, half_grad = run(p4o_loss, half)
    second, float_grad = run(p4o_loss, [t.float() if t.is_floating_point() else t for t in half])
    assert torch.equal(first.loss, second.loss) and torch.equal(half_grad, float_grad.half())


def test_advantages_of_sequences(place):
    log_probs, behavior, proximal, _, mask = batch(place.device)
    cu_seqlens = torch.tensor([0, 10, 10, 11, TOKENS], dtype=torch.int32, device=place.device)
    advantages = torch.tensor([0.5, math.nan, -1.0, 2.0], device=place.device)  # the second sequence is empty
    expanded = torch.repeat_interleave(advantages, cu_seqlens.diff().long())
    got, grad = run(p4o_loss, [log_probs, behavior, proximal, advantages, mask], cu_seqlens=cu_seqlens)
    want, want_grad = run(p4o_loss, [log_probs, behavior, proximal, expanded, mask])
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_valid_tokens(place, tokens):
    tensors = batch(place.device, tokens=tokens)
    tensors[4][:] = False
    output, grad = run(p4o_loss, tensors)
    assert output.loss.item() == 0.0 and output.ess.item() == 1.0 and (grad == 0).all()


def test_num_tokens_divides(place):
    tensors = batch(place.device)
    total = p4o_loss(*tensors, reduction="sum").loss
    for divisor in (7, torch.tensor(7, device=place.device)):
        got = p4o_loss(*tensors, num_tokens=divisor).loss
        torch.testing.assert_close(got, total / 7, rtol=2e-7, atol=0)  # one rounding to float32 each


@pytest.mark.parametrize("log_ratio", [355.0, -373.0, math.inf, math.nan])
@pytest.mark.parametrize("index", [1, 2], ids=["behavior", "proximal"])
@pytest.mark.parametrize("frozen", [False, True], ids=["micro-batch", "step"])
def test_an_impossible_ratio(place, frozen, index, log_ratio):
    tensors = batch(place.device)
    tensors[4][6] = True
    one = RatioStats.zeros(place.device).to_context()
    options = {"context": one, "proximal_context": one} if frozen else {}
    tensors[index][6] = tensors[0][6] - log_ratio
    with pytest.raises(ValueError, match=r"invalid data on 1 of \d+ valid.*token 6: log_probs.*proximal_log_probs"):
        p4o_loss(*tensors, **options)
    output, grad = run(p4o_loss, tensors, validate=False, **options)
    assert output.loss.isnan() and grad.isnan().all()
    assert output.metrics.to_dict("")["invalid_tokens"] == 1


@pytest.mark.parametrize("index", [1, 2], ids=["behavior", "proximal"])
def test_finite_ratios_whose_squares_overflow_in_sum(index):
    tensors = batch()[:4]
    tensors[index] = tensors[0] - 354.8  # rho^2 is 1.5e308
    with pytest.raises(ValueError, match="invalid data on 1 of 37"):
        p4o_loss(*tensors)


CONTEXT = RatioStats.zeros().to_context()
NO_NUMBER = type(CONTEXT)(*[torch.tensor(math.nan, dtype=torch.float64)] * 5)
BAD = {
    "proximal shape": ({"proximal_log_probs": torch.zeros(3)}, ValueError, r"proximal_log_probs \(3,\)"),
    "proximal dtype": (
        {"proximal_log_probs": torch.zeros(TOKENS).int()},
        TypeError,
        "proximal_log_probs must be float32",
    ),
    "proximal device": (
        {"proximal_log_probs": torch.zeros(TOKENS, device="meta")},
        ValueError,
        "proximal_log_probs meta",
    ),
    "mask": ({"mask": torch.ones(TOKENS)}, TypeError, "mask must be torch.bool"),
    "one context": ({"context": CONTEXT}, ValueError, "proximal_context is missing: give both"),
    "other context": ({"proximal_context": CONTEXT}, ValueError, "together, context is missing"),
    "context type": (
        {"context": CONTEXT, "proximal_context": 0.5},
        TypeError,
        "proximal_context must be an ESSContext.*got float",
    ),
    "context and group": (
        {"context": CONTEXT, "proximal_context": CONTEXT, "process_group": object()},
        ValueError,
        "context and process_group exclude each other",
    ),
    "NaN context": ({"context": CONTEXT, "proximal_context": NO_NUMBER}, ValueError, "proximal_context.ess is NaN"),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be one of"),
    "kl_mode": ({"kl_mode": "exact"}, ValueError, "rollouts do not record"),
    "clip_high": ({"clip_high": math.nan}, ValueError, "clip_high must be finite"),
    "num_tokens": ({"num_tokens": 0}, ValueError, "num_tokens must be >= 1"),
    "num_tokens tensor": ({"num_tokens": torch.tensor(0)}, ValueError, "num_tokens must be >= 1, got 0"),
    "offsets": ({"cu_seqlens": torch.tensor([0, 5]).int()}, ValueError, r"end at T = 37, got \[0, 5\]"),
}


@pytest.mark.host_only
@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name):
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        p4o_loss(**(dict(zip(NAMES, batch(), strict=True)) | changes))


@pytest.mark.host_only
def test_operator_and_compile_without_a_host_read():
    log_probs, behavior, proximal, advantages, mask = batch()
    ess = torch.tensor([0.7, 0.9], dtype=torch.float64)
    arguments = (log_probs.requires_grad_(), behavior, proximal, advantages, mask, None, ess, None, 0)
    for reduction in ("mean", "none"):
        torch.library.opcheck(torch.ops.p3o.anchored_loss, (*arguments, reduction, "importance", 0.2, 0.2))
    compiled = torch.compile(p4o_loss, fullgraph=True, backend="aot_eager")  # a read breaks the graph
    got, grad = run(compiled, batch(), validate=False)
    want, want_grad = run(p4o_loss, batch(), validate=False)
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)


def share(rank):
    return [t[:25] if rank == 0 else t[25:] for t in batch()]


def on_a_rank(rank):
    group = dist.group.WORLD
    output, grad = run(p4o_loss, share(rank), process_group=group, reduction="sum")
    texts = []
    for index in (1, 2, 3):  # only rank 1 has bad data
        bad = [t.clone() for t in share(rank)]
        bad[4][3] = True
        if rank == 1:
            bad[index][3] = math.nan
        try:
            p4o_loss(*bad, process_group=group)
        except ValueError as error:
            texts.append(str(error))
    used = [output.ess.item(), output.context.ess.item(), output.proximal_context.ess.item()]
    return output.loss.item(), grad.tolist(), used, texts


@pytest.mark.host_only
def test_two_ranks_equal_one_process():
    whole, whole_grad = run(p4o_loss, batch(), reduction="sum")
    first, second = on_all_ranks(on_a_rank, 2)
    assert first[2] == second[2]  # the same bits on every rank
    assert first[2][1:] == pytest.approx([whole.context.ess.item(), whole.proximal_context.ess.item()], rel=1e-13)
    assert first[0] + second[0] == pytest.approx(whole.loss.item(), rel=1e-6)
    # e differs by float64 roundings at most
    torch.testing.assert_close(torch.tensor(first[1] + second[1]), whole_grad, rtol=2e-7, atol=0)
    assert len(first[3]) == len(second[3]) == 3
    for text, other in zip(first[3], second[3], strict=True):
        assert text.startswith("invalid data on 1 of ") and other.startswith("invalid data on 1 of ")
        assert "no single token of this rank" in text and "the first is token 3" in other
