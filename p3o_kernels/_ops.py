"""Custom operators: the boundary that torch.compile, autograd and CUDA graphs see.

Each operator takes tensors of any layout, makes them what its backend needs, and runs it. Operators
return fresh tensors; gradients flow to ``log_probs`` and ``entropy`` only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from p3o_kernels import _compiled, _eager, _scalars
from p3o_kernels._dense import dense, dense_or_none
from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._summary import CONTEXT_FIELDS, SUMMARY_SIZE


@torch.library.custom_op("p3o::ratio_sums", mutates_args=())
def ratio_sums(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    """[S1, S2, N, invalid] float64."""
    arguments = dense(log_probs), dense(behavior_log_probs), dense_or_none(mask)
    if backend == "triton":
        from p3o_kernels import _launch

        return _launch.ratio_sums(*arguments)
    return _eager.ratio_sums(*arguments)


@ratio_sums.register_fake
def _(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    return log_probs.new_empty(4, dtype=torch.float64)


@torch.library.custom_op("p3o::context", mutates_args=())
def context(sums: Tensor, backend: str) -> Tensor:
    """[e, N, mean of rho, standard deviation of rho] float64 from [S1, S2, N, invalid]."""
    if backend == "triton":
        from p3o_kernels import _launch

        return _launch.context(dense(sums))
    return _scalars.context(sums)


@context.register_fake
def _(sums: Tensor, backend: str) -> Tensor:
    return sums.new_empty(len(CONTEXT_FIELDS))


@torch.library.custom_op("p3o::token_loss", mutates_args=())
def token_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    ess: Tensor | None,
    reference_log_probs: Tensor | None,
    entropy: Tensor | None,
    divisor: Tensor | None,
    num_tokens: int,
    reduction: str,
    kl_mode: str,
    clip_low: float,
    clip_high: float,
    reference_coef: float,
    entropy_coef: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, g, scale, summary and count: the fields of ``TokenLoss``."""
    inputs = TokenInputs(
        dense(log_probs),
        dense(behavior_log_probs),
        dense(advantages),
        *map(dense_or_none, (mask, cu_seqlens, ess, reference_log_probs, entropy, divisor)),
    )
    options = LossOptions(num_tokens, reduction, kl_mode, clip_low, clip_high, reference_coef, entropy_coef)
    if backend == "triton":
        from p3o_kernels import _launch

        result = _launch.token_loss(inputs, options)
    else:
        result = (_compiled if backend == "compiled" else _eager).token_loss(inputs, options)
    return result.loss, result.token_grad, result.scale, result.summary, result.count


@token_loss.register_fake
def _(log_probs: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    reduction = arguments[9]
    token_grad = log_probs.new_empty(log_probs.numel())
    loss = log_probs.new_empty(log_probs.numel() if reduction == "none" else ())
    wide = log_probs.new_empty((), dtype=torch.float64)
    return loss, token_grad, wide, wide.new_empty(SUMMARY_SIZE), wide.new_empty((), dtype=torch.int64)


def _one_or_dense(grad_output: Tensor) -> Tensor:
    """loss.sum() arrives as one number with stride 0; a 0-d one may be an element of a vector, hence unaligned."""
    uniform = grad_output.numel() > 1 and grad_output.stride(0) == 0
    return grad_output[0].clone() if uniform else dense(grad_output)


@torch.library.custom_op("p3o::scale_token_grad", mutates_args=())
def _triton_backward(
    token_grad: Tensor, scale: Tensor, grad_output: Tensor, mask: Tensor | None, entropy_coef: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of log_probs and of entropy ([0] when it has none)."""
    from p3o_kernels import _launch

    grad_output = _one_or_dense(grad_output)
    return _launch.scale_grad(token_grad, scale, grad_output, dense_or_none(mask), entropy_coef, with_entropy)


@_triton_backward.register_fake
def _(
    token_grad: Tensor, scale: Tensor, grad_output: Tensor, mask: Tensor | None, entropy_coef: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(token_grad), token_grad.new_empty(token_grad.numel() if with_entropy else 0)


def _torch_backward(
    token_grad: Tensor, scale: Tensor, grad_output: Tensor, mask: Tensor | None, entropy_coef: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """The same in PyTorch: one product needs no operator around it."""
    factor = scale.float() * grad_output
    if not with_entropy:
        return token_grad * factor, token_grad
    entropy_grad = (-entropy_coef * factor).expand(token_grad.shape)
    entropy_grad = entropy_grad.clone() if mask is None else torch.where(mask, entropy_grad, 0.0)
    return token_grad * factor, entropy_grad


def token_backward(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return _triton_backward if backend == "triton" else _torch_backward


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    mask, entropy, ctx.entropy_coef, ctx.backend = inputs[3], inputs[7], inputs[15], inputs[16]
    _, token_grad, scale, summary, count = output
    ctx.with_entropy = entropy is not None and ctx.needs_input_grad[7]
    ctx.save_for_backward(token_grad, scale, mask if ctx.with_entropy else None)
    ctx.mark_non_differentiable(token_grad, scale, summary, count)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * 17
    if grad_output is not None:
        token_grad, scale, mask = ctx.saved_tensors
        backward = token_backward(ctx.backend)
        log_probs_grad, entropy_grad = backward(
            token_grad, scale, grad_output, mask, ctx.entropy_coef, ctx.with_entropy
        )
        grads[0] = log_probs_grad
        grads[7] = entropy_grad if ctx.with_entropy else None
    return tuple(grads)


token_loss.register_autograd(_backward, setup_context=_save)
