"""Custom operators of the losses with an e for each sequence or with two anchors; see ``_ops``.

Gradients flow to ``log_probs`` only. The vector of metrics is [NUM_METRICS], the fields of ``P3OMetrics``.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from p3o_kernels import _anchored_eager, _ops
from p3o_kernels._dense import dense, dense_or_none
from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._summary import ANCHOR_SIZE, NUM_METRICS

_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _implementation(backend: str) -> ModuleType:
    """The module that does the work: ``_anchored_launch``, or ``_anchored_eager`` for "eager" and "compiled"."""
    if backend == "triton":
        from p3o_kernels import _anchored_launch

        return _anchored_launch
    return _anchored_eager


def _inputs(log_probs: Tensor, behavior: Tensor, advantages: Tensor, *optional: Tensor | None) -> TokenInputs:
    """``optional``: mask, cu_seqlens, ess, divisor."""
    mask, cu_seqlens, ess, divisor = map(dense_or_none, optional)
    return TokenInputs(dense(log_probs), dense(behavior), dense(advantages), mask, cu_seqlens, ess, None, None, divisor)


@torch.library.custom_op("p3o::sequence_sums", mutates_args=())
def sequence_sums(
    log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None, cu_seqlens: Tensor, backend: str
) -> Tensor:
    """[ANCHOR_SIZE, B] float64: S1, S2, N, invalid of each sequence, and its context."""
    arguments = dense(log_probs), dense(behavior_log_probs), dense_or_none(mask), dense(cu_seqlens)
    result: Tensor = _implementation(backend).sequence_sums(*arguments)
    return result


@sequence_sums.register_fake
def _(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None, cu_seqlens: Tensor, backend: str) -> Tensor:
    return log_probs.new_empty((ANCHOR_SIZE, cu_seqlens.numel() - 1), dtype=torch.float64)


@torch.library.custom_op("p3o::anchors", mutates_args=())
def anchors(
    log_probs: Tensor, behavior_log_probs: Tensor, proximal_log_probs: Tensor, mask: Tensor | None, backend: str
) -> Tensor:
    """[2, ANCHOR_SIZE] float64 of b and of the proximal policy: S1, S2, N, invalid of the ratios, and their context."""
    inputs = _inputs(log_probs, behavior_log_probs, log_probs, mask, None, None, None)
    result: Tensor = _implementation(backend).anchors(inputs, dense(proximal_log_probs))
    return result


@anchors.register_fake
def _(log_probs: Tensor, *arguments: Any) -> Tensor:
    return log_probs.new_empty((2, ANCHOR_SIZE), dtype=torch.float64)


@torch.library.custom_op("p3o::sequence_loss", mutates_args=())
def sequence_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor,
    ess: Tensor,
    divisor: Tensor | None,
    num_tokens: int,
    reduction: str,
    kl_mode: str,
    clip_low: float,
    clip_high: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, g, scale, metrics and count, as in ``TokenLoss``; ``ess`` and perhaps ``advantages`` are [B]."""
    inputs = _inputs(log_probs, behavior_log_probs, advantages, mask, cu_seqlens, ess, divisor)
    options = LossOptions(num_tokens, reduction, kl_mode, clip_low, clip_high, 0.0, 0.0)
    result = _implementation(backend).sequence_loss(inputs, options)
    return result.loss, result.token_grad, result.scale, result.summary, result.count


def _fake_loss(log_probs: Tensor, reduction: str) -> _Outputs:
    token_grad = log_probs.new_empty(log_probs.numel())
    loss = log_probs.new_empty(log_probs.numel() if reduction == "none" else ())
    wide = log_probs.new_empty((), dtype=torch.float64)
    return loss, token_grad, wide, wide.new_empty(NUM_METRICS), wide.new_empty((), dtype=torch.int64)


@sequence_loss.register_fake
def _(log_probs: Tensor, *arguments: Any) -> _Outputs:
    return _fake_loss(log_probs, arguments[7])


@torch.library.custom_op("p3o::two_anchor_loss", mutates_args=())
def two_anchor_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    proximal_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    ess: Tensor,
    proximal_ess: Tensor,
    divisor: Tensor | None,
    num_tokens: int,
    reduction: str,
    kl_mode: str,
    clip_low: float,
    clip_high: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, g, scale, metrics and count, as in ``TokenLoss``, and e; ``ess`` and ``proximal_ess`` are []."""
    inputs = _inputs(log_probs, behavior_log_probs, advantages, mask, cu_seqlens, ess, divisor)
    options = LossOptions(num_tokens, reduction, kl_mode, clip_low, clip_high, 0.0, 0.0)
    proximal = dense(proximal_log_probs), dense(proximal_ess)
    result, cap = _implementation(backend).two_anchor_loss(inputs, *proximal, options)
    return result.loss, result.token_grad, result.scale, result.summary, result.count, cap


@two_anchor_loss.register_fake
def _(log_probs: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _fake_loss(log_probs, arguments[9])
    return *outputs, outputs[2].new_empty(())


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, token_grad, scale, *_ = output
    ctx.backend, ctx.num_inputs = inputs[-1], len(inputs)
    ctx.save_for_backward(token_grad, scale)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grad: Tensor | None = None
    if grad_output is not None:
        grad = _ops.token_backward(ctx.backend)(*ctx.saved_tensors, grad_output, None, 0.0, False)[0]
    return grad, *(None,) * (ctx.num_inputs - 1)


sequence_loss.register_autograd(_backward, setup_context=_save)
two_anchor_loss.register_autograd(_backward, setup_context=_save)
