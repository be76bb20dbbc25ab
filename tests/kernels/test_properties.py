"""Properties that hold for any data (hypothesis)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p3o_kernels import p3o_loss, ratio_stats

FINITE = st.floats(-30, 30, width=32)
PAIRS = st.lists(st.tuples(FINITE, FINITE, st.booleans()), min_size=1, max_size=40)
settings.register_profile("kernels", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("kernels")


def tensors(pairs, device):
    log_probs, behavior, mask = zip(*pairs, strict=True)
    return (
        torch.tensor(log_probs, device=device),
        torch.tensor(behavior, device=device),
        torch.tensor(mask, device=device),
    )


@given(pairs=PAIRS)
def test_ess_lies_between_one_over_n_and_one(place, pairs):
    log_probs, behavior, mask = tensors(pairs, place.device)
    context = ratio_stats(log_probs, behavior, mask, backend=place.backend).to_context()
    count = int(mask.sum())
    ess = context.ess.item()
    assert ess <= 1.0
    if count:
        # the epsilon of the denominator lowers e where all ratios are tiny
        largest = (log_probs - behavior)[mask].double().exp().square().sum().item()
        assert ess >= (1 / count) * (1 - 1e-12) * largest / (largest + 1e-8)
    else:
        assert ess == 1.0


@given(pairs=PAIRS, cut=st.integers(0, 40), seed=st.integers(0, 5))
def test_sums_add_over_any_partition_in_any_order(place, pairs, cut, seed):
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    whole = ratio_stats(*tensors(pairs, place.device), backend=place.backend).as_vector()
    shuffled = [pairs[index] for index in order]
    parts = [part for part in (shuffled[:cut], shuffled[cut:]) if part]
    total = sum(ratio_stats(*tensors(part, place.device), backend=place.backend).as_vector() for part in parts)
    torch.testing.assert_close(total, whole, rtol=1e-13, atol=0)


@given(pairs=PAIRS, poison=st.sampled_from([math.nan, math.inf, -math.inf, 3e38]))
def test_masked_poison_changes_no_bit(place, pairs, poison):
    log_probs, behavior, mask = tensors(pairs, place.device)
    results = []
    for value in (0.0, poison):
        inputs = [torch.where(mask, tensor, value) for tensor in (log_probs, behavior, behavior * 0.1)]
        inputs[0].requires_grad_()
        output = p3o_loss(*inputs, mask, backend=place.backend)
        output.loss.backward()
        results.append((output.loss.detach(), inputs[0].grad, output.metrics.vector))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@given(pairs=PAIRS, shift=st.floats(-5, 5))
@pytest.mark.host_only
def test_ess_cannot_see_a_uniform_shift_but_ratio_mean_can(place, pairs, shift):
    log_probs, behavior, _ = tensors(pairs, place.device)
    behavior = log_probs - (log_probs - behavior).clamp(-3, 3)  # ratios far above the epsilon
    one = ratio_stats(log_probs, behavior, backend=place.backend).to_context()
    other = ratio_stats(log_probs, behavior - shift, backend=place.backend).to_context()
    assert other.ess.item() == pytest.approx(one.ess.item(), rel=1e-4)
    assert other.ratio_mean.item() == pytest.approx(one.ratio_mean.item() * math.exp(shift), rel=1e-4)
