"""Matrix products with the accumulator that the error budget needs: float32 under half-precision factors."""

import torch
from torch import Tensor


def product(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """out = a @ b, or out += a @ b; ``out`` has the dtype of the factors or is float32."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif a.is_cuda and torch.cuda.get_device_capability(a.device) >= (8, 0):
        if accumulate:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # CPUs and older GPUs round such a product to the dtype of its factors
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=1.0 if accumulate else 0.0)


def linear(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out = hidden @ weight^T + bias."""
    if bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)
