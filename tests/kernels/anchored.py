"""What the tests of the losses with two anchors and with an e for each sequence share."""

import pytest
import torch

from p3o_kernels import p3o_loss_per_sequence, p4o_loss, reference
from tests.conftest import lane

# every path through memory is in test_anchored_kernels
UNSANITIZED = pytest.mark.skipif(lane() == "sanitize", reason="values; the sanitizer checks memory")
REDUCTIONS = ["mean", "sum", "none"]
KL_MODES = ["proxy", "proxy_safe", "importance"]
TOKENS = 37
# lengths with an empty first, middle and last sequence, one of one token, one wholly masked
LENGTHS = [0, 4, 1, 0, 7, 3, 0]
MASKED = slice(12, 15)  # the sequence of three
REFERENCES = {p4o_loss: reference.p4o_loss, p3o_loss_per_sequence: reference.p3o_loss_per_sequence}


def two_anchor_batch(device="cpu", tokens=TOKENS, drift=0.6, proximal_drift=0.3):
    generator = torch.Generator().manual_seed(1)
    log_probs = -torch.rand(tokens, generator=generator) - 0.1
    behavior = log_probs + drift * torch.randn(tokens, generator=generator)
    proximal = log_probs + proximal_drift * torch.randn(tokens, generator=generator)
    advantages = torch.randn(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) > 0.2
    return [tensor.to(device) for tensor in (log_probs, behavior, proximal, advantages, mask)]


def offsets(lengths=LENGTHS, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def sequence_batch(device="cpu", lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    log_probs = -torch.rand(tokens, generator=generator) - 0.1
    behavior = log_probs + 0.6 * torch.randn(tokens, generator=generator)
    advantages = torch.randn(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) > 0.2
    mask[MASKED] = False
    return [tensor.to(device) for tensor in (log_probs, behavior, advantages, mask)]


def run(function, tensors, dtype=None, upstream=None, **options):
    """The output, and the gradient of the first tensor."""
    tensors = [t.to(dtype) if dtype and t.is_floating_point() else t.clone() for t in tensors]
    tensors[0].requires_grad_()
    output = function(*tensors, **options)
    output.loss.backward(None if upstream is None else upstream.to(output.loss.dtype))
    return output, tensors[0].grad


def assert_as_exact_as_eager(value, truth, eager):
    """At most 1.5 times the largest error of eager autograd in float32, or 1e-6 of the largest value."""
    value, truth, eager = value.detach().double().cpu(), truth.detach().cpu(), eager.detach().double().cpu()
    if truth.numel() == 0:
        return
    allowed = max(1.5 * (eager - truth).abs().max().item(), 1e-6 * truth.abs().max().item())
    error = (value - truth).abs().max().item()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def compare(function, tensors, backend="auto", **options):
    """``function`` against its reference in float64: loss, gradient, metrics."""
    output, grad = run(function, tensors, backend=backend, **options)
    truth, truth_grad = run(REFERENCES[function], tensors, torch.float64, **options)
    eager, eager_grad = run(REFERENCES[function], tensors, **options)
    assert_as_exact_as_eager(output.loss, truth.loss, eager.loss)
    assert_as_exact_as_eager(grad, truth_grad, eager_grad)
    # sums of float32 terms, in float64; the float64 reference does not round l
    torch.testing.assert_close(output.metrics.vector, truth.metrics.vector, rtol=1e-5, atol=1e-5)
    return output, grad


def close(value, want):
    # float32 terms of another order of operations, in kernels: a few roundings
    return torch.allclose(value, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())
