"""Every backend against the float64 reference, over the shapes and options that take different paths."""

import pytest
import torch

from p3o_kernels import ESSContext, p3o_loss, reference
from p3o_kernels._math_kernels import BLOCK

# nothing, one token, one thread's four and a tail, a block less one, whole blocks, a second block with a tail
TOKENS = [0, 1, 5, 1023, BLOCK, BLOCK + 1, 2 * BLOCK + 7]
TERMS = {"ref_kl_coef": 0.3, "entropy_coef": 0.05}


def batch(tokens: int, device: str, dtype=torch.float32, seed=0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + tokens)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(tokens, generator=generator)

    log_probs = -normal(1.0).abs() - 0.01
    tensors = {
        "log_probs": log_probs,
        "behavior_log_probs": log_probs + normal(0.5),
        "advantages": normal(1.0),
        "ref_log_probs": log_probs + normal(0.2),
        "entropy": normal(1.0).abs(),
    }
    tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    return tensors | {"mask": (torch.rand(tokens, generator=generator) > 0.2).to(device)}


def sequences(tokens: int, device: str) -> torch.Tensor:
    """Offsets with an empty sequence, a sequence of one token and long ones."""
    cuts = sorted({0, tokens // 3, min(tokens // 3 + 1, tokens), tokens})
    return torch.tensor([*cuts[:1], *cuts], dtype=torch.int32, device=device)


def run(function, tensors, dtype=None, upstream=None, **options):
    """Loss, gradient of log_probs and, when it is used, of entropy."""
    tensors = {name: t.detach().clone() for name, t in tensors.items()}
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    tensors["log_probs"].requires_grad_()
    if "entropy" in tensors:
        tensors["entropy"].requires_grad_()
    output = function(**tensors, **options)
    loss = output.loss
    loss.backward(None if upstream is None else upstream.to(loss.dtype))
    grads = [tensors[name].grad for name in ("log_probs", "entropy") if name in tensors]
    return loss.detach(), grads, output


def assert_as_exact_as_eager(value, truth, eager):
    """At most 1.5 times the largest error of eager PyTorch in the same dtype, or 1e-6 of the largest value."""
    value, truth, eager = value.double().cpu(), truth.double().cpu(), eager.double().cpu()
    assert value.shape == truth.shape
    if truth.numel() == 0:
        return
    allowed = max(1.5 * (eager - truth).abs().max().item(), 1e-6 * truth.abs().max().item())
    error = (value - truth).abs().max().item()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def compare(place, tensors, upstream=None, context=None, **options):
    loss, grads, output = run(p3o_loss, tensors, upstream=upstream, context=context, backend=place.backend, **options)
    truth, truth_grads, exact = run(reference.p3o_loss, tensors, torch.float64, upstream, context=context, **options)
    eager, eager_grads, _ = run(reference.p3o_loss, tensors, None, upstream, context=context, **options)
    assert_as_exact_as_eager(loss, truth, eager)
    for value, want, plain in zip(grads, truth_grads, eager_grads, strict=True):
        assert_as_exact_as_eager(value, want, plain)
    # sums of float32 terms, in float64; the float64 reference does not round l
    torch.testing.assert_close(output.metrics.vector, exact.metrics.vector, rtol=1e-5, atol=1e-5)
    return output


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def frozen(device, value=0.37) -> ESSContext:
    ess = torch.tensor(value, dtype=torch.float64, device=device)
    return ESSContext(ess, ess, ess, ess, ess)


@pytest.mark.parametrize("context", [False, True], ids=["micro-batch", "step"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_default_loss(place, tokens, context):
    tensors = without(batch(tokens, place.device), "ref_log_probs", "entropy")
    output = compare(place, tensors, context=frozen(place.device) if context else None)
    assert output.num_tokens.dtype == torch.int64
    assert int(output.num_tokens) == int(tensors["mask"].sum())


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("tokens", [0, 1, 5, BLOCK + 1])
def test_advantages_of_sequences(place, tokens, masked):
    tensors = without(batch(tokens, place.device), "ref_log_probs", "entropy", *([] if masked else ["mask"]))
    offsets = sequences(tokens, place.device)
    count = offsets.numel() - 1
    tensors["advantages"] = torch.linspace(-1.0, 2.0, count, device=place.device)
    output = compare(place, tensors, cu_seqlens=offsets)
    expanded = tensors | {"advantages": torch.repeat_interleave(tensors["advantages"], offsets.diff().long())}
    same, _, _ = run(p3o_loss, expanded, backend=place.backend)
    assert torch.equal(output.loss.detach(), same)


def test_many_short_sequences(place):
    """More sequences than a block has warps: every token needs the search."""
    tokens = BLOCK + 300
    tensors = without(batch(tokens, place.device), "ref_log_probs", "entropy")
    lengths = torch.tensor([3, 0, 1, 7, 2] * (tokens // 13 + 1))
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).clamp_max(tokens).int().to(place.device)
    tensors["advantages"] = torch.randn(offsets.numel() - 1, generator=torch.Generator().manual_seed(1)).to(
        place.device
    )
    compare(place, tensors, cu_seqlens=offsets, reduction="sum")


@pytest.mark.parametrize("kl_mode", ["proxy", "proxy_safe", "importance"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [5, BLOCK + 1])
def test_all_terms(place, tokens, reduction, kl_mode):
    upstream = torch.linspace(0.5, 2.0, tokens, device=place.device) if reduction == "none" else None
    compare(place, batch(tokens, place.device), upstream, reduction=reduction, kl_mode=kl_mode, **TERMS)


@pytest.mark.parametrize("term", ["ref", "entropy"])
def test_one_optional_term(place, term):
    dropped = "entropy" if term == "ref" else "ref_log_probs"
    name = "ref_kl_coef" if term == "ref" else "entropy_coef"
    compare(place, without(batch(1023, place.device), dropped), context=frozen(place.device), **{name: 0.7})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(place, dtype):
    tensors = batch(1023, place.device, dtype)
    loss, (grad, entropy_grad), _ = run(p3o_loss, tensors, backend=place.backend, **TERMS)
    truth, (want, want_entropy), _ = run(reference.p3o_loss, tensors, torch.float64, **TERMS)
    assert loss.dtype == torch.float32 and grad.dtype == entropy_grad.dtype == dtype
    assert loss.item() == pytest.approx(truth.item(), rel=1e-5)
    # the gradient is computed in float32 and rounded once: half a unit in the last place
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), want, rtol=unit / 2 + 1e-5, atol=1e-7)
    torch.testing.assert_close(entropy_grad.double(), want_entropy, rtol=unit / 2 + 1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", ["strided", "offset", "expanded"])
def test_any_layout(place, layout):
    tokens = 1023
    tensors = without(batch(tokens, place.device), "ref_log_probs", "entropy")
    dense = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if layout == "strided":
            tensors[name] = torch.stack([tensor, tensor], 1)[:, 0]
        elif layout == "offset":  # the data pointer is not 16-byte aligned
            tensors[name] = torch.cat([tensor[:1], tensor])[1:]
    if layout == "expanded":
        for table in (dense, tensors):
            table["advantages"] = torch.full((1,), 1.5, device=place.device).expand(tokens)
    outputs = [p3o_loss(**table, backend=place.backend) for table in (dense, tensors)]
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert torch.equal(outputs[0].metrics.vector, outputs[1].metrics.vector)


def test_any_shape(place):
    tensors = without(batch(60, place.device), "ref_log_probs", "entropy")
    flat, (flat_grad,), _ = run(p3o_loss, tensors, backend=place.backend)
    square = {name: tensor.reshape(5, 12) for name, tensor in tensors.items()}
    loss, (grad,), _ = run(p3o_loss, square, backend=place.backend)
    assert torch.equal(loss, flat) and torch.equal(grad, flat_grad.reshape(5, 12))
    values = p3o_loss(**square, reduction="none", backend=place.backend).loss
    assert values.shape == (5, 12)


def test_uniform_grad_output_of_a_sum(place):
    """loss.sum() sends one number with stride 0 backward."""
    tensors = without(batch(1023, place.device), "ref_log_probs", "entropy")
    log_probs = tensors.pop("log_probs").requires_grad_()
    p3o_loss(log_probs, **tensors, reduction="none", backend=place.backend).loss.sum().backward()
    _, (want,), _ = run(p3o_loss, {"log_probs": log_probs} | tensors, reduction="sum", backend=place.backend)
    assert torch.equal(log_probs.grad, want)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
def test_given_token_count(place, as_tensor):
    tensors = without(batch(1023, place.device), "ref_log_probs", "entropy")
    total = torch.tensor(4000, device=place.device) if as_tensor else 4000
    mean, (mean_grad,), _ = run(p3o_loss, tensors, num_tokens=total, backend=place.backend)
    whole, (sum_grad,), _ = run(p3o_loss, tensors, reduction="sum", backend=place.backend)
    torch.testing.assert_close(mean, whole / 4000, rtol=2e-7, atol=0)
    torch.testing.assert_close(mean_grad, sum_grad / 4000, rtol=2e-7, atol=0)


def test_backward_twice(place):
    tensors = without(batch(64, place.device), "ref_log_probs", "entropy")
    log_probs = tensors.pop("log_probs").requires_grad_()
    loss = p3o_loss(log_probs, **tensors, backend=place.backend).loss
    (once,) = torch.autograd.grad(loss, log_probs, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, log_probs)
    assert torch.equal(once, twice)
