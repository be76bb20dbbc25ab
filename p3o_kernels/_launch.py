"""Launches of kernel K2; ``_variants`` lists what can be launched.

All inputs are contiguous, 16-byte aligned [T] float32 (mask: bool) on one device; ``_ops`` makes
them so. Absent tensors are replaced by a view of another one with the right type, so that presence
costs no extra variant; the kernels never read them.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from p3o_kernels import _finish_kernels as finish
from p3o_kernels import _token_kernels as token
from p3o_kernels._inputs import LossOptions, TokenInputs, TokenLoss
from p3o_kernels._math_kernels import BLOCK, COLUMNS, MAX_PROGRAMS
from p3o_kernels._summary import KL_MODES, NUM_METRICS, SUMMARY_SIZE

THREADS = 1024  # also what makes the compiler stay within 64 registers
SCALE_BLOCK, SCALE_THREADS = 1024, 256
FINISH_THREADS = 512
COLUMNS_LEAN, COLUMNS_GENERAL = 11, 14  # partial sums that the two forms of the loss kernel write


def warps(threads: int, warp_size: int) -> int:
    return max(threads // warp_size, 1)


def _warp_size() -> int:
    return 64 if torch.version.hip else 32


def run(kernel: Any, programs: int, threads: int, arguments: dict[str, Any], **constexprs: int | bool) -> None:
    """One launch, on the device of its tensors."""
    device = next(value for value in arguments.values() if isinstance(value, Tensor)).device
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        kernel[(programs,)](**arguments, **constexprs, num_warps=warps(threads, _warp_size()), num_stages=1)


def mask_bytes(mask: Tensor | None, like: Tensor) -> Tensor:
    values = like if mask is None else mask
    # without a token a stride may be left that a view cannot have
    return values.view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)


def programs(num_tokens: int) -> int:
    return min(max(-(-num_tokens // BLOCK), 1), MAX_PROGRAMS)


def _ratio_partials(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    num_programs = programs(log_probs.numel())
    partials = log_probs.new_empty((num_programs, 4), dtype=torch.float64)
    arguments = {
        "log_probs_ptr": log_probs,
        "behavior_ptr": behavior_log_probs,
        "mask_ptr": mask_bytes(mask, log_probs),
        "partials_ptr": partials,
        "num_tokens": log_probs.numel(),
    }
    run(token.ratio_sums_kernel, num_programs, THREADS, arguments, HAS_MASK=mask is not None, BLOCK=BLOCK)
    return partials


def ratio_sums(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    """[S1, S2, N, invalid]: 2 launches."""
    partials = _ratio_partials(log_probs, behavior_log_probs, mask)
    sums = partials.new_empty(4)
    finish_ratio(partials, sums)
    return sums


def finish_ratio(partials: Tensor, out: Tensor) -> None:
    """``out`` [4] from the partial sums [programs, 4] of one anchor: 1 launch."""
    arguments = {"partials_ptr": partials, "out_ptr": out, "num_partials": partials.shape[0]}
    run(finish.finish_ratio_kernel, 1, FINISH_THREADS, arguments, MAX_PROGRAMS=MAX_PROGRAMS)


def context(sums: Tensor) -> Tensor:
    """[e, N, mean of rho, standard deviation of rho] from [S1, S2, N, invalid]: 1 launch."""
    out = sums.new_empty(4)
    run(finish.context_kernel, 1, 32, {"sums_ptr": sums, "out_ptr": out})
    return out


def token_loss(inputs: TokenInputs, options: LossOptions) -> TokenLoss:
    """2 launches with e given, else 3."""
    log_probs = inputs.log_probs
    num_programs = programs(log_probs.numel())
    partials = log_probs.new_empty((num_programs, COLUMNS), dtype=torch.float64)
    token_grad = torch.empty_like(log_probs)
    loss = torch.empty_like(log_probs) if options.reduction == "none" else log_probs.new_empty(())
    general = (
        options.reduction == "none"
        or options.kl_mode != "proxy_safe"
        or inputs.reference_log_probs is not None
        or inputs.entropy is not None
    )
    ess, ratio_partials = inputs.ess, partials
    if ess is None:
        ess = partials.new_empty(())
        ratio_partials = _ratio_partials(log_probs, inputs.behavior_log_probs, inputs.mask)
    outputs = {"ess_ptr": ess, "ratio_partials_ptr": ratio_partials, "grad_ptr": token_grad}
    outputs |= {"loss_ptr": loss, "partials_ptr": partials}
    run(
        token.token_loss_kernel,
        num_programs,
        THREADS,
        pass_arguments(inputs, options) | _term_arguments(inputs, options) | outputs,
        HAS_MASK=inputs.mask is not None,
        PER_SEQUENCE=inputs.cu_seqlens is not None,
        HAS_CONTEXT=inputs.ess is not None,
        GENERAL=general,
        BLOCK=BLOCK,
        MAX_PROGRAMS=MAX_PROGRAMS,
        COLUMNS=COLUMNS,
    )
    columns = COLUMNS_GENERAL if general else COLUMNS_LEAN
    return finish_loss(inputs, options, partials, ess, token_grad, loss, columns)


def pass_arguments(inputs: TokenInputs, options: LossOptions) -> dict[str, Any]:
    """What every pass over tokens that forms a loss takes."""
    log_probs, cu_seqlens = inputs.log_probs, inputs.cu_seqlens
    return {
        "log_probs_ptr": log_probs,
        "behavior_ptr": inputs.behavior_log_probs,
        "advantages_ptr": inputs.advantages,
        "mask_ptr": mask_bytes(inputs.mask, log_probs),
        "cu_seqlens_ptr": log_probs.view(torch.int32) if cu_seqlens is None else cu_seqlens,
        "num_tokens": log_probs.numel(),
        "num_sequences": 0 if cu_seqlens is None else cu_seqlens.numel() - 1,
        "kl_mode": KL_MODES.index(options.kl_mode),
        "log_clip_low": options.log_clip_bounds()[0],
        "log_clip_high": options.log_clip_bounds()[1],
        "write_loss": int(options.reduction == "none"),
    }


def _term_arguments(inputs: TokenInputs, options: LossOptions) -> dict[str, Any]:
    log_probs = inputs.log_probs
    return {
        "reference_ptr": log_probs if inputs.reference_log_probs is None else inputs.reference_log_probs,
        "entropy_ptr": log_probs if inputs.entropy is None else inputs.entropy,
        "num_partials": programs(log_probs.numel()),
        "entropy_coef": options.entropy_coef,
        "reference_coef": options.reference_coef,
        "has_entropy": int(inputs.entropy is not None),
    }


def finish_loss(
    inputs: TokenInputs,
    options: LossOptions,
    partials: Tensor,
    ess: Tensor,
    token_grad: Tensor,
    loss: Tensor,
    columns: int,
    anchored: bool = False,
) -> TokenLoss:
    """What follows the pass of a loss kernel, ``anchored`` for those of ``_anchored_kernels``: 1 launch."""
    if options.reduction != "mean":
        divide = finish.DIVIDE_NONE if options.reduction == "none" else finish.DIVIDE_ONE
    elif inputs.divisor is not None:
        divide = finish.DIVIDE_TENSOR
    else:
        divide = finish.DIVIDE_INTEGER if options.num_tokens else finish.DIVIDE_COUNT
    summary = partials.new_empty(NUM_METRICS if anchored else SUMMARY_SIZE)
    scale = partials.new_empty(())
    count = partials.new_empty((), dtype=torch.int64)
    arguments = {
        "partials_ptr": partials,
        "ess_ptr": ess,
        "num_tokens_ptr": ess if inputs.divisor is None else inputs.divisor,
        "summary_ptr": summary,
        "loss_ptr": loss,
        "scale_ptr": scale,
        "count_ptr": count,
        "num_partials": partials.shape[0],
        "columns": columns,
        "divide": divide.value,
        "num_tokens": options.num_tokens,
        "entropy_coef": options.entropy_coef,
        "reference_coef": options.reference_coef,
    }
    constexprs = {"MAX_PROGRAMS": MAX_PROGRAMS, "COLUMNS": COLUMNS, "ANCHORED": anchored}
    run(finish.finish_loss_kernel, 1, FINISH_THREADS, arguments, **constexprs)
    return TokenLoss(loss, token_grad, scale, summary, count)


def scale_grad(
    token_grad: Tensor,
    scale: Tensor,
    grad_output: Tensor,
    mask: Tensor | None,
    entropy_coef: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of log_probs and of entropy ([0] when it has none): 1 launch.

    ``grad_output`` is [] or contiguous [T] float32.
    """
    log_probs_grad = torch.empty_like(token_grad)
    entropy_grad = torch.empty_like(token_grad) if with_entropy else token_grad.new_empty(0)
    arguments = {
        "token_grad_ptr": token_grad,
        "mask_ptr": mask_bytes(mask, token_grad),
        "scale_ptr": scale,
        "grad_output_ptr": grad_output,
        "log_probs_grad_ptr": log_probs_grad,
        "entropy_grad_ptr": entropy_grad if with_entropy else log_probs_grad,
        "num_tokens": token_grad.numel(),
        "entropy_coef": entropy_coef,
    }
    run(
        token.scale_grad_kernel,
        max(-(-token_grad.numel() // SCALE_BLOCK), 1),
        SCALE_THREADS,
        arguments,
        PER_TOKEN=grad_output.dim() > 0,
        HAS_ENTROPY=with_entropy,
        HAS_MASK=mask is not None and with_entropy,
        BLOCK=SCALE_BLOCK,
    )
    return log_probs_grad, entropy_grad
