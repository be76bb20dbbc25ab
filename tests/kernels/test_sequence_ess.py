"""The effective sample size of each sequence, and the loss that is capped by it."""

import math

import pytest
import torch

from p3o_kernels import p3o_loss, p3o_loss_per_sequence, ratio_stats, sequence_ess
from tests.kernels.anchored import KL_MODES, LENGTHS, REDUCTIONS, UNSANITIZED, compare, offsets, run, sequence_batch

pytestmark = UNSANITIZED


def test_values_by_the_definition(place):
    """Ratios 1, 2, 0.5, 4 are one sequence, 3 alone is another."""
    ratios, advantages = [1.0, 2.0, 0.5, 4.0, 3.0], [1.0, -1.0, 2.0, -0.5, 2.0]
    first = 7.5**2 / (4 * (21.25 + 1e-8))
    second = 9.0 / (9.0 + 1e-8)
    log_probs, grads, losses = [-2.0 + math.log(ratio) for ratio in ratios], [], []
    for ratio, advantage, log_prob, cap in zip(ratios, advantages, log_probs, [first] * 4 + [second], strict=True):
        weight, log_ratio = min(ratio, cap), math.log(ratio)
        grads.append(-weight * advantage + (1 - cap) * (1 - 1 / ratio))
        losses.append(-weight * log_prob * advantage + (1 - cap) * (log_ratio + 1 / ratio - 1))
    lp, a = (torch.tensor(values, device=place.device) for values in (log_probs, advantages))
    cu_seqlens = offsets([4, 0, 1], place.device)
    output, grad = run(p3o_loss_per_sequence, [lp, torch.full_like(lp, -2.0), a], cu_seqlens=cu_seqlens)
    # log-probs are rounded to float32, which moves rho by 1e-7 of itself
    assert output.sequence_ess.ess.tolist() == pytest.approx([first, 1.0, second], rel=1e-6)
    assert output.sequence_ess.num_tokens.tolist() == [4, 0, 1]
    assert output.sequence_ess.ratio_mean.tolist() == pytest.approx([1.875, 1.0, 3.0], rel=1e-6)
    assert output.loss.item() == pytest.approx(sum(losses) / 5, rel=1e-6)
    assert grad.tolist() == pytest.approx([value / 5 for value in grads], rel=1e-6)
    assert int(output.num_tokens) == 5 and output.num_tokens.dtype == torch.int64
    metrics = output.metrics.to_dict("")
    assert metrics["normalized_ess"] == pytest.approx((4 * first + second) / 5, rel=1e-6)
    assert metrics["cap_fraction"] == 0.8 and metrics["clip_fraction"] == 0.8  # all but 0.5; all but 1


def test_each_sequence_has_the_ess_it_has_alone(place):
    log_probs, behavior, _, mask = sequence_batch(place.device)
    got = sequence_ess(log_probs, behavior, offsets(device=place.device), mask)
    assert got.ess.dtype == got.num_tokens.dtype == torch.float64 and got.ess.shape == (len(LENGTHS),)
    bounds = offsets().tolist()
    for index, part in enumerate(slice(*bounds[i : i + 2]) for i in range(len(LENGTHS))):
        alone = ratio_stats(log_probs[part], behavior[part], mask[part], backend="eager").to_context()
        # the order of adding differs: float64 roundings
        assert got.ess[index].item() == pytest.approx(alone.ess.item(), rel=1e-14)
        assert got.num_tokens[index].item() == int(mask[part].sum())
        assert got.ratio_mean[index].item() == pytest.approx(alone.ratio_mean.item(), rel=1e-14)
    assert got.ess[[0, 3, 5, 6]].tolist() == [1.0] * 4  # without a token


@pytest.mark.parametrize("kl_mode", KL_MODES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_and_gradient(place, reduction, kl_mode):
    tensors = sequence_batch(place.device)
    upstream = torch.linspace(-1.0, 2.0, sum(LENGTHS), device=place.device) if reduction == "none" else None
    options = {"cu_seqlens": offsets(device=place.device), "reduction": reduction, "kl_mode": kl_mode}
    output, grad = compare(p3o_loss_per_sequence, tensors, place.backend, upstream=upstream, **options)
    assert output.loss.dtype == torch.float32
    assert (grad[~tensors[3]] == 0).all()


@pytest.mark.parametrize("log_ratio", [-20.0, 0.0, 20.0, 90.0])
@pytest.mark.parametrize("kl_mode", KL_MODES)
def test_a_distant_token(kl_mode, log_ratio):
    tensors = sequence_batch(lengths=[4, 3])[:3]
    tensors[1][5] = tensors[0][5] - log_ratio
    compare(p3o_loss_per_sequence, tensors, cu_seqlens=offsets([4, 3]), kl_mode=kl_mode)


def test_several_chunks(monkeypatch):
    tensors, cu_seqlens = sequence_batch(), offsets()
    want, want_grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, reduction="none", upstream=tensors[2])
    monkeypatch.setattr("p3o_kernels._eager.CPU_CHUNK", 4)
    got, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, reduction="none", upstream=tensors[2])
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)
    # the order of adding differs: float64 roundings
    torch.testing.assert_close(got.metrics.vector, want.metrics.vector, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("lengths", [LENGTHS, [1] * 15], ids=["mixed", "ones"])
def test_advantages_of_sequences(place, lengths):
    """[B] also where B = T."""
    log_probs, behavior, _, mask = sequence_batch(place.device, lengths)
    advantages = torch.linspace(-1.0, 2.0, len(lengths), device=place.device)
    expanded = torch.repeat_interleave(advantages, torch.tensor(lengths, device=place.device))
    cu_seqlens = offsets(lengths, place.device)
    got, grad = compare(p3o_loss_per_sequence, [log_probs, behavior, advantages, mask], cu_seqlens=cu_seqlens)
    want, want_grad = run(p3o_loss_per_sequence, [log_probs, behavior, expanded, mask], cu_seqlens=cu_seqlens)
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)


def test_one_sequence_is_p3o(place):
    tensors = sequence_batch(place.device)
    whole = offsets([sum(LENGTHS)], place.device)
    got, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=whole)
    want, want_grad = run(p3o_loss, tensors)
    # float32 terms of another order of operations, in kernels: a few roundings
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, want_grad, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(got.metrics.vector, want.metrics.vector, rtol=1e-6, atol=1e-6)


def test_the_cut_into_micro_batches_changes_no_gradient(place):
    tensors, cu_seqlens = sequence_batch(place.device), offsets(device=place.device)
    _, whole = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, num_tokens=10)
    cut = int(cu_seqlens[3])
    _, first = run(p3o_loss_per_sequence, [t[:cut] for t in tensors], cu_seqlens=cu_seqlens[:4], num_tokens=10)
    rest = cu_seqlens[3:] - cut
    _, second = run(p3o_loss_per_sequence, [t[cut:] for t in tensors], cu_seqlens=rest, num_tokens=10)
    assert torch.equal(torch.cat([first, second]), whole)


def test_other_sequences_have_no_say(place):
    tensors, cu_seqlens = sequence_batch(place.device), offsets(device=place.device)
    _, before = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, reduction="sum")
    tensors[1][5:12] += torch.linspace(-3.0, 3.0, 7, device=place.device)
    _, after = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, reduction="sum")
    assert torch.equal(before[:5], after[:5]) and not torch.equal(before[5:12], after[5:12])


def test_equal_policies_leave_the_policy_gradient(place):
    log_probs, _, advantages, _ = sequence_batch(place.device)
    options = {"cu_seqlens": offsets(device=place.device), "reduction": "sum"}
    _, grad = run(p3o_loss_per_sequence, [log_probs, log_probs, advantages], **options)
    assert torch.equal(grad, -advantages)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_masked_slot_changes_no_bit(place, index, poison):
    tensors, cu_seqlens = sequence_batch(place.device), offsets(device=place.device)
    clean, clean_grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens)
    tensors[index] = torch.where(tensors[3], tensors[index], poison)
    output, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens)
    assert torch.equal(output.loss, clean.loss) and torch.equal(grad, clean_grad)
    assert torch.equal(output.metrics.vector, clean.metrics.vector)
    assert torch.equal(output.sequence_ess.ess, clean.sequence_ess.ess)


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=["no-sequence", "empty"])
def test_no_tokens(place, lengths):
    nothing = [torch.zeros(0, device=place.device)] * 3
    output, grad = run(p3o_loss_per_sequence, nothing, cu_seqlens=offsets(lengths, place.device))
    assert output.loss.item() == 0.0 and grad.shape == (0,) and int(output.num_tokens) == 0
    assert output.sequence_ess.ess.tolist() == [1.0] * len(lengths)


def test_all_masked(place):
    tensors = sequence_batch(place.device)
    tensors[3][:] = False
    output, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=offsets(device=place.device))
    assert output.loss.item() == 0.0 and (grad == 0).all() and (output.sequence_ess.ess == 1).all()


@pytest.mark.parametrize("log_ratio", [355.0, -373.0, math.inf, -math.inf, math.nan])
def test_an_impossible_ratio(place, log_ratio):
    tensors, cu_seqlens = sequence_batch(place.device), offsets(device=place.device)
    tensors[3][6] = True
    tensors[1][6] = tensors[0][6] - log_ratio
    with pytest.raises(ValueError, match=r"invalid data on 1 of \d+ valid tokens.*token 6: log_probs"):
        p3o_loss_per_sequence(*tensors, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match=r"invalid data on 1 of \d+ valid tokens.*token 6: log_probs"):
        sequence_ess(*tensors[:2], cu_seqlens, tensors[3])
    unread = sequence_ess(*tensors[:2], cu_seqlens, tensors[3], validate=False)
    assert unread.ess.isnan().tolist() == [False] * 4 + [True] + [False] * 2
    output, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, validate=False)
    assert output.loss.isnan() and grad.isnan().all()
    assert output.metrics.to_dict("")["invalid_tokens"] == 1


def test_a_bad_advantage(place):
    tensors = sequence_batch(place.device)
    tensors[2] = torch.tensor([0.0, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0], device=place.device)
    count = int(tensors[3][5:12].sum())
    with pytest.raises(ValueError, match=rf"invalid data on {count} of .*advantages nan"):
        p3o_loss_per_sequence(*tensors, cu_seqlens=offsets(device=place.device))


def test_finite_ratios_whose_squares_overflow_in_sum(place):
    log_probs = torch.zeros(8, device=place.device)
    behavior = torch.full_like(log_probs, -354.8)  # rho^2 is 1.5e308
    with pytest.raises(ValueError, match=r"invalid data on 1 of 8.*S2 = inf"):
        sequence_ess(log_probs, behavior, offsets([7, 1], place.device))


def test_same_bits_and_half_precision(place):
    tensors, cu_seqlens = sequence_batch(place.device), offsets(device=place.device)
    half = [t.bfloat16() if t.is_floating_point() else t for t in tensors]
    first, grad = run(p3o_loss_per_sequence, half, cu_seqlens=cu_seqlens)
    second, same = run(p3o_loss_per_sequence, [t.float() if t.is_floating_point() else t for t in half],
                       cu_seqlens=cu_seqlens)  # fmt: skip
    assert torch.equal(first.loss, second.loss) and torch.equal(grad, same.bfloat16())
    spread = [torch.stack([t, t], 1)[:, 0] for t in tensors]  # stride 2
    dense, _ = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens)
    strided = p3o_loss_per_sequence(*spread, cu_seqlens=cu_seqlens)
    assert torch.equal(dense.loss, strided.loss)


def test_num_tokens_divides(place):
    tensors, cu_seqlens = sequence_batch(place.device), offsets(device=place.device)
    total = p3o_loss_per_sequence(*tensors, cu_seqlens=cu_seqlens, reduction="sum").loss
    for divisor in (7, torch.tensor(7, device=place.device)):
        got = p3o_loss_per_sequence(*tensors, cu_seqlens=cu_seqlens, num_tokens=divisor).loss
        torch.testing.assert_close(got, total / 7, rtol=2e-7, atol=0)  # one rounding to float32 each
