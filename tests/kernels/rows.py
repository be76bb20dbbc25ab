"""Rows of logits with everything that belongs to them, and how close a result has to be."""

from typing import Any

import torch

from p3o_kernels import reference, token_log_probs

TINY = 1e-6  # of the largest value: what float32 arithmetic on one row costs in any order
# and absolutely: half a unit each of the sum of exponentials, a power and a product near 1, times gradients of up to 2
UNIT = 2.0**-22


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def row_case(rows: int, vocab: int, device: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Logits with a spread of 3, so that probabilities range over a few orders of magnitude."""
    generator = torch.Generator().manual_seed(rows + vocab)
    return {
        "logits": (3.0 * normal(rows, vocab)).to(dtype).to(device),
        "labels": torch.randint(0, vocab, (rows,), generator=generator).to(device),
    }


def run_rows(
    function: Any, case: dict[str, torch.Tensor], dtype: torch.dtype | None = None, entropy: bool = True, **options: Any
) -> list[torch.Tensor]:
    """lp, H if wanted, and dlogits under gradients that differ from row to row."""
    logits = case["logits"].detach().clone() if dtype is None else case["logits"].detach().to(dtype)
    logits = _with_layout_of(logits, case["logits"]).requires_grad_()
    made = function(logits, case["labels"], return_entropy=entropy, **options)
    values = list(made) if entropy else [made]
    rows = logits.shape[0]
    weights = [normal(rows, seed=1 + place).to(logits.device, value.dtype) for place, value in enumerate(values)]
    torch.autograd.backward(values, weights)
    return [*(value.detach() for value in values), logits.grad]


def _with_layout_of(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same strides and storage offset, in a storage of its own."""
    if like.numel() == 0:
        return values
    size = like.storage_offset() + (like.shape[0] - 1) * like.stride(0) + (like.shape[1] - 1) * like.stride(1) + 1
    laid_out = values.new_zeros(size).as_strided(like.shape, like.stride(), like.storage_offset())
    return laid_out.copy_(values)


def off_target(grad: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``grad`` without the entry of each label, which is larger than all others by orders of magnitude."""
    known = (labels >= 0) & (labels < grad.shape[1])
    return grad.clone().scatter_(1, torch.where(known, labels, 0)[:, None], 0.0)


def assert_as_exact(value, truth, eager, rounding: float = 0.0) -> None:
    """At most 1.5 times eager's largest error, or TINY of the largest value; ``rounding`` relative on top."""
    value, truth, eager = (tensor.double().cpu() for tensor in (value, truth, eager))
    assert value.shape == truth.shape
    if truth.numel() == 0:
        return
    allowed = torch.maximum(1.5 * (eager - truth).abs().max(), TINY * truth.abs().max() + UNIT)
    allowed = allowed + rounding * truth.abs()
    error = (value - truth).abs()
    worst = (error - allowed).argmax()
    assert bool((error <= allowed).all()), f"error {error.flatten()[worst]:.3g}, allowed {allowed.flatten()[worst]:.3g}"


def compare_rows(place, case: dict[str, torch.Tensor], **options: Any) -> None:
    """Against the float64 reference, not worse than the reference in the logits' own dtype."""
    for entropy in (False, True):
        options["entropy"] = entropy
        *values, grad = run_rows(token_log_probs, case, backend=place.backend, **options)
        *truths, want = run_rows(reference.token_log_probs, case, torch.float64, **options)
        *plains, plain_grad = run_rows(reference.token_log_probs, case, **options)
        for value, truth, plain in zip(values, truths, plains, strict=True):
            assert value.dtype == torch.float32
            assert_as_exact(value, truth, plain)
        assert grad.dtype == case["logits"].dtype
        rounding = stored_rounding(place, grad.dtype)
        assert_as_exact(grad, want, plain_grad, rounding)
        # on its own, or the rounding of the label's entry would hide zeros everywhere else
        assert_as_exact(*(off_target(tensor, case["labels"]) for tensor in (grad, want, plain_grad)), rounding)


def stored_rounding(place, dtype: torch.dtype) -> float:
    """Triton's interpreter truncates when it stores bfloat16: up to one unit in the last place, not half of one."""
    interpreted = place.backend == "triton" and place.device == "cpu"
    return torch.finfo(dtype).eps if interpreted and dtype == torch.bfloat16 else 0.0
