"""The numeric rules, one test each, named after what goes wrong when a rule is broken."""

import math

import pytest
import torch

from p3o_kernels import RatioStats, p3o_loss, ratio_stats, reference

POISON = [math.nan, math.inf, -math.inf, 1e38]
TOKENS = 300


def batch(device, tokens=TOKENS):
    generator = torch.Generator().manual_seed(3)
    log_probs = -torch.rand(tokens, generator=generator) - 0.1
    tensors = {
        "behavior_log_probs": log_probs + 0.3 * torch.randn(tokens, generator=generator),
        "advantages": torch.randn(tokens, generator=generator),
        "ref_log_probs": log_probs + 0.1,
        "entropy": torch.rand(tokens, generator=generator),
        "mask": torch.rand(tokens, generator=generator) > 0.3,
    }
    return log_probs.to(device), {name: tensor.to(device) for name, tensor in tensors.items()}


def outcome(log_probs, tensors, place, **options):
    log_probs = log_probs.detach().clone().requires_grad_()
    options = {"ref_kl_coef": 0.2, "entropy_coef": 0.1, "backend": place.backend} | options
    output = p3o_loss(log_probs, **tensors, **options)
    output.loss.sum().backward()
    return output.loss.detach(), log_probs.grad, output.metrics.vector, output.context.ess


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("name", ["log_probs", "behavior_log_probs", "advantages", "ref_log_probs", "entropy"])
def test_a_masked_slot_changes_no_bit(place, name, poison):
    log_probs, tensors = batch(place.device)
    clean = outcome(log_probs, tensors, place)
    everything = {"log_probs": log_probs} | tensors
    everything[name] = torch.where(tensors["mask"], everything[name], poison)
    poisoned = outcome(everything.pop("log_probs"), everything, place)
    assert all(torch.equal(one, other) for one, other in zip(clean, poisoned, strict=True))
    assert (poisoned[1][~tensors["mask"]] == 0).all()


def test_a_masked_sequence_may_have_any_advantage(place):
    log_probs, tensors = batch(place.device, 8)
    tensors["mask"] = torch.tensor([True] * 4 + [False] * 4, device=place.device)
    tensors["advantages"] = torch.tensor([0.5, math.nan], device=place.device)
    offsets = torch.tensor([0, 4, 8], dtype=torch.int32, device=place.device)
    assert outcome(log_probs, tensors, place, cu_seqlens=offsets)[0].isfinite()


@pytest.mark.parametrize("log_ratio", [355.0, 500.0, -373.0, -500.0, math.inf, -math.inf, math.nan])
def test_an_impossible_ratio_is_an_error_never_an_ess_of_one(place, log_ratio):
    log_probs, tensors = batch(place.device)
    tensors["mask"][:] = True
    tensors["behavior_log_probs"][7] = log_probs[7] - log_ratio
    with pytest.raises(ValueError, match=r"invalid data on 1 of 300 valid tokens.*token 7: "):
        outcome(log_probs, tensors, place)
    stats = ratio_stats(log_probs, tensors["behavior_log_probs"], backend=place.backend)
    with pytest.raises(ValueError, match="invalid data on 1 of 300"):
        stats.to_context()
    assert stats.to_context(validate=False).ess.isnan()
    loss, grad, _, ess = outcome(log_probs, tensors, place, validate=False)
    assert loss.isnan() and grad.isnan().any() and ess.isnan()


@pytest.mark.parametrize("name", ["advantages", "ref_log_probs", "entropy"])
def test_a_term_that_is_not_finite_is_an_error(place, name):
    log_probs, tensors = batch(place.device)
    tensors["mask"][11] = True
    tensors[name][11] = math.nan
    with pytest.raises(ValueError, match=f"invalid data on 1 of .*token 11: .*{name} nan"):
        outcome(log_probs, tensors, place)
    loss, grad, vector, _ = outcome(log_probs, tensors, place, validate=False)
    assert loss.isnan() and grad.isnan().any() and vector[3] == 1


@pytest.mark.parametrize("log_ratio", [354.8, -372.5])
def test_the_last_usable_ratio_is_used(place, log_ratio):
    log_probs = torch.tensor([0.0, 0.0], device=place.device)
    behavior = torch.tensor([-log_ratio, 0.0], device=place.device)
    stats = ratio_stats(log_probs, behavior, backend=place.backend)
    exact = float(behavior[0].neg().double().exp())
    assert stats.invalid.item() == 0
    assert stats.sum_ratio.item() == pytest.approx(exact + 1.0, rel=1e-12)


def test_n_times_s2_may_overflow_where_s2_does_not(place):
    log_probs = torch.tensor([354.0] + [0.0] * 9, device=place.device)
    behavior = torch.zeros_like(log_probs)
    e = ratio_stats(log_probs, behavior, backend=place.backend).to_context().ess.item()
    # one ratio is everything, so e = 1 / N; 1 / (1 + 1e-8 / S2) is 1 here
    assert e == pytest.approx(0.1, rel=1e-12)
    assert reference.to_context(reference.ratio_stats(log_probs, behavior)).ess.item() == pytest.approx(0.1, rel=1e-12)


def test_finite_terms_whose_sum_overflows_are_invalid(place):
    behavior = torch.full((64,), -354.8, device=place.device)
    stats = ratio_stats(torch.zeros_like(behavior), behavior, backend=place.backend)
    assert stats.sum_ratio_sq.isinf() and stats.invalid.item() == 1
    with pytest.raises(ValueError, match="invalid data"):
        stats.to_context()
    one = ratio_stats(torch.zeros_like(behavior[:1]), behavior[:1], backend=place.backend)
    assert one.invalid.item() == 0
    with pytest.raises(ValueError, match="S2 = inf"):  # each part is finite, the total is not
        (one + one).to_context()


def test_no_token_gives_an_exact_zero_with_a_graph(place):
    log_probs, tensors = batch(place.device)
    tensors["mask"][:] = False
    loss, grad, _, ess = outcome(log_probs, tensors, place)
    assert loss == 0 and (grad == 0).all() and ess == 1


def test_ratio_of_e_to_the_90_has_the_cap_as_weight(place):
    log_probs = torch.tensor([-0.01, -1.0], device=place.device, requires_grad=True)
    behavior = torch.tensor([-90.01, -1.0], device=place.device)
    advantages = torch.ones(2, device=place.device)
    output = p3o_loss(log_probs, behavior, advantages, reduction="sum", backend=place.backend)
    output.loss.backward()
    assert output.loss.isfinite()
    ess = output.context.ess.item()
    # the pull back to the behavior policy saturates at 1 - exp(-10)
    want = -ess + (1 - ess) * (1 - math.exp(-10))
    assert log_probs.grad[0].item() == pytest.approx(want, abs=1e-7)  # two terms of 0.5 cancel


def test_on_policy_data_is_a_plain_policy_gradient(place):
    """An implementation of 2019 set the cap to 1e-7 here and stopped learning."""
    log_probs, tensors = batch(place.device)
    log_probs.requires_grad_()
    output = p3o_loss(log_probs, log_probs.detach(), tensors["advantages"], reduction="sum", backend=place.backend)
    output.loss.backward()
    assert output.context.ess.item() == pytest.approx(1.0, abs=1e-8)
    torch.testing.assert_close(log_probs.grad, -tensors["advantages"], rtol=2e-7, atol=0)


def test_sums_do_not_depend_on_order_or_partition(place):
    log_probs, tensors = batch(place.device)
    behavior, mask = tensors["behavior_log_probs"], tensors["mask"]
    whole = ratio_stats(log_probs, behavior, mask, backend=place.backend).as_vector()
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0)).to(place.device)
    shuffled = ratio_stats(log_probs[order], behavior[order], mask[order], backend=place.backend).as_vector()
    parts = RatioStats.zeros(place.device)
    for part in torch.arange(TOKENS, device=place.device).split(37):
        parts = parts + ratio_stats(log_probs[part], behavior[part], mask[part], backend=place.backend)
    # float64 sums in another order
    torch.testing.assert_close(shuffled, whole, rtol=1e-13, atol=0)
    torch.testing.assert_close(parts.as_vector(), whole, rtol=1e-13, atol=0)


def test_step_scope_does_not_depend_on_micro_batches(place):
    log_probs, tensors = batch(place.device)
    context = ratio_stats(log_probs, tensors["behavior_log_probs"], tensors["mask"], backend=place.backend).to_context()
    total = int(tensors["mask"].sum())
    options = {"context": context, "num_tokens": total}
    loss, grad, vector, _ = outcome(log_probs, tensors, place, **options)
    results = []
    for part in torch.arange(TOKENS, device=place.device).split(64):
        pieces = {name: tensor[part] for name, tensor in tensors.items()}
        results.append(outcome(log_probs[part], pieces, place, **options))
    # the loss is float32 per micro-batch: one rounding each
    torch.testing.assert_close(sum(result[0] for result in results), loss, rtol=1e-6, atol=1e-7)
    assert torch.equal(torch.cat([result[1] for result in results]), grad)
    torch.testing.assert_close(sum(r[2][:15] for r in results), vector[:15], rtol=1e-6, atol=1e-9)


def test_gradient_pushes_back_to_the_behavior_policy_when_safe(place):
    """Far below the behavior policy (l = -20) the plain derivative of the clamped K points away from it."""
    for kl_mode, want in (("proxy", 1.0), ("proxy_safe", -22025.4658)):
        log_probs = torch.tensor([-25.0, -5.0], device=place.device, requires_grad=True)
        behavior = torch.full((2,), -5.0, device=place.device)
        output = p3o_loss(
            log_probs,
            behavior,
            torch.zeros(2, device=place.device),
            reduction="sum",
            kl_mode=kl_mode,
            backend=place.backend,
        )
        output.loss.backward()
        assert log_probs.grad[0].item() == pytest.approx((1 - output.context.ess.item()) * want, rel=1e-6)
