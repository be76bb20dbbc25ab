"""The loss with two anchors: masks, layouts, cuts, divisors."""

import math

import pytest
import torch

from p3o_kernels import p4o_loss
from tests.kernels.anchored import TOKENS, UNSANITIZED, run, two_anchor_batch

pytestmark = UNSANITIZED


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_a_masked_slot_changes_no_bit(place, index, poison):
    tensors = two_anchor_batch(place.device)
    clean, clean_grad = run(p4o_loss, tensors)
    tensors[index] = torch.where(tensors[4], tensors[index], poison)
    output, grad = run(p4o_loss, tensors)
    assert torch.equal(output.loss, clean.loss) and torch.equal(grad, clean_grad)
    assert torch.equal(output.metrics.vector, clean.metrics.vector)
    assert torch.equal(output.ess, clean.ess)


def test_several_chunks(monkeypatch):
    tensors = two_anchor_batch()
    want, want_grad = run(p4o_loss, tensors, reduction="none", upstream=tensors[3])
    monkeypatch.setattr("p3o_kernels._eager.CPU_CHUNK", 8)
    got, grad = run(p4o_loss, tensors, reduction="none", upstream=tensors[3])
    # the order of adding the ratios differs, hence e, by float64 roundings
    torch.testing.assert_close(got.loss, want.loss, rtol=2e-7, atol=0)
    torch.testing.assert_close(grad, want_grad, rtol=2e-7, atol=0)
    torch.testing.assert_close(got.metrics.vector, want.metrics.vector, rtol=1e-12, atol=1e-12)


def test_shapes_strides_and_half_precision(place):
    tensors = two_anchor_batch(place.device, tokens=36)
    whole, grad = run(p4o_loss, tensors, reduction="none", upstream=torch.ones(36, device=place.device))
    square = [t.reshape(6, 6).t().contiguous().t() for t in tensors]
    got, square_grad = run(p4o_loss, square, reduction="none", upstream=torch.ones(6, 6, device=place.device))
    assert torch.equal(got.loss.flatten(), whole.loss) and torch.equal(square_grad.flatten(), grad)
    half = [t.half() if t.is_floating_point() else t for t in tensors]
    first, half_grad = run(p4o_loss, half)
    second, float_grad = run(p4o_loss, [t.float() if t.is_floating_point() else t for t in half])
    assert torch.equal(first.loss, second.loss) and torch.equal(half_grad, float_grad.half())


def test_advantages_of_sequences(place):
    log_probs, behavior, proximal, _, mask = two_anchor_batch(place.device)
    cu_seqlens = torch.tensor([0, 10, 10, 11, TOKENS], dtype=torch.int32, device=place.device)
    advantages = torch.tensor([0.5, math.nan, -1.0, 2.0], device=place.device)  # the second sequence is empty
    expanded = torch.repeat_interleave(advantages, cu_seqlens.diff().long())
    got, grad = run(p4o_loss, [log_probs, behavior, proximal, advantages, mask], cu_seqlens=cu_seqlens)
    want, want_grad = run(p4o_loss, [log_probs, behavior, proximal, expanded, mask])
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_valid_tokens(place, tokens):
    tensors = two_anchor_batch(place.device, tokens=tokens)
    tensors[4][:] = False
    output, grad = run(p4o_loss, tensors)
    assert output.loss.item() == 0.0 and output.ess.item() == 1.0 and (grad == 0).all()


def test_num_tokens_divides(place):
    tensors = two_anchor_batch(place.device)
    total = p4o_loss(*tensors, reduction="sum").loss
    for divisor in (7, torch.tensor(7, device=place.device)):
        got = p4o_loss(*tensors, num_tokens=divisor).loss
        torch.testing.assert_close(got, total / 7, rtol=2e-7, atol=0)  # one rounding to float32 each
