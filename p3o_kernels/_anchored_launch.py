"""Launches of the losses with an e for each sequence or with two anchors; the counterpart of ``_anchored_eager``.

Tensors are as in ``_launch``. The sums of a sequence are those of one program that walks it: no partial sums of others
have to be joined, and a batch has more sequences than a GPU has room for programs. Where it has few and they are long,
several programs share a sequence and one more launch joins their sums.
"""

from typing import Any

import torch
from torch import Tensor

from p3o_kernels import _anchored_kernels as anchored
from p3o_kernels import _launch
from p3o_kernels._inputs import LossOptions, TokenInputs, TokenLoss
from p3o_kernels._math_kernels import BLOCK, COLUMNS, MAX_PROGRAMS
from p3o_kernels._summary import ANCHOR_SIZE

SEQUENCE_BLOCK, SEQUENCE_THREADS = 1024, 256  # short sequences leave most of a larger program idle
SEQUENCE_PROGRAMS = 1024  # what fills a GPU
MIN_CHUNK = 4 * SEQUENCE_BLOCK  # tokens worth a program of their own
COLUMNS_ANCHORED = 13  # partial sums that the loss kernels write


def _anchor_partials(inputs: TokenInputs, proximal: Tensor) -> Tensor:
    """[2, programs, 4]: 1 launch."""
    programs = _launch.programs(inputs.log_probs.numel())
    partials = inputs.log_probs.new_empty((2, programs, 4), dtype=torch.float64)
    arguments = {
        "log_probs_ptr": inputs.log_probs,
        "behavior_ptr": inputs.behavior_log_probs,
        "proximal_ptr": proximal,
        "mask_ptr": _launch.mask_bytes(inputs.mask, inputs.log_probs),
        "partials_ptr": partials,
        "num_tokens": inputs.log_probs.numel(),
    }
    constexprs = {"HAS_MASK": inputs.mask is not None, "BLOCK": BLOCK}
    _launch.run(anchored.anchor_sums_kernel, programs, _launch.THREADS, arguments, **constexprs)
    return partials


def _join(partials: Tensor, out: Tensor, field_distance: int, distance: int) -> None:
    """Partial sums [n, programs, 4] -> ANCHOR_SIZE numbers of each of the n, as far apart as said: 1 launch."""
    arguments = {
        "partials_ptr": partials,
        "out_ptr": out,
        "num_partials": partials.shape[1],
        "field_distance": field_distance,
        "distance": distance,
    }
    kernel, programs, threads = anchored.join_sums_kernel, partials.shape[0], _launch.FINISH_THREADS
    _launch.run(kernel, programs, threads, arguments, MAX_PROGRAMS=MAX_PROGRAMS)


def anchors(inputs: TokenInputs, proximal: Tensor) -> Tensor:
    """[2, ANCHOR_SIZE] of b and of the proximal policy: 2 launches."""
    partials = _anchor_partials(inputs, proximal)
    out = partials.new_empty((2, ANCHOR_SIZE))
    _join(partials, out, 1, ANCHOR_SIZE)
    return out


def two_anchor_loss(
    inputs: TokenInputs, proximal: Tensor, proximal_ess: Tensor, options: LossOptions
) -> tuple[TokenLoss, Tensor]:
    """The loss and e []; ``inputs.ess`` is e_b: 2 launches."""
    partials, arguments = _outputs(inputs, options)
    cap = partials.new_empty(())
    given = {"proximal_ptr": proximal, "ess_ptr": inputs.ess, "proximal_ess_ptr": proximal_ess, "cap_ptr": cap}
    per_sequence = inputs.cu_seqlens is not None
    kernel = anchored.two_anchor_loss_kernel
    return _run_loss(kernel, inputs, options, partials, arguments | given, PER_SEQUENCE=per_sequence), cap


def sequence_sums(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[ANCHOR_SIZE, B]: 1 launch, or 2 for few long sequences; none without a sequence."""
    sequences = cu_seqlens.numel() - 1
    out = log_probs.new_empty((ANCHOR_SIZE, sequences), dtype=torch.float64)
    if sequences == 0:
        return out
    chunks = _chunks(sequences, log_probs.numel())
    partials = out.new_empty((sequences, chunks, 4)) if chunks > 1 else out
    arguments = {
        "log_probs_ptr": log_probs,
        "behavior_ptr": behavior_log_probs,
        "mask_ptr": _launch.mask_bytes(mask, log_probs),
        "cu_seqlens_ptr": cu_seqlens,
        "partials_ptr": partials,
        "out_ptr": out,
        "num_tokens": log_probs.numel(),
        "chunks": chunks,
    }
    flags = {"HAS_MASK": mask is not None, "IN_CHUNKS": chunks > 1}
    kernel = anchored.sequence_sums_kernel
    _launch.run(kernel, sequences * chunks, SEQUENCE_THREADS, arguments, **flags, BLOCK=SEQUENCE_BLOCK)
    if chunks > 1:
        _join(partials, out, sequences, 1)
    return out


def _chunks(sequences: int, tokens: int) -> int:
    """Programs for each sequence: as many as fill a GPU, but for MIN_CHUNK tokens each on average."""
    return max(min(SEQUENCE_PROGRAMS // sequences, tokens // (sequences * MIN_CHUNK), MAX_PROGRAMS), 1)


def sequence_loss(inputs: TokenInputs, options: LossOptions) -> TokenLoss:
    """``inputs.ess`` is [B]: 2 launches."""
    partials, arguments = _outputs(inputs, options)
    arguments["ess_ptr"] = inputs.ess
    per_sequence = inputs.advantages.numel() == arguments["num_sequences"]
    return _run_loss(anchored.sequence_loss_kernel, inputs, options, partials, arguments, PER_SEQUENCE=per_sequence)


def _outputs(inputs: TokenInputs, options: LossOptions) -> tuple[Tensor, dict[str, Any]]:
    """Partial sums, and the arguments that both loss kernels take."""
    log_probs = inputs.log_probs
    partials = log_probs.new_empty((_launch.programs(log_probs.numel()), COLUMNS), dtype=torch.float64)
    loss = torch.empty_like(log_probs) if options.reduction == "none" else log_probs.new_empty(())
    outputs = {"grad_ptr": torch.empty_like(log_probs), "loss_ptr": loss, "partials_ptr": partials}
    return partials, _launch.pass_arguments(inputs, options) | outputs


def _run_loss(
    kernel: Any,
    inputs: TokenInputs,
    options: LossOptions,
    partials: Tensor,
    arguments: dict[str, Any],
    **constexprs: int | bool,
) -> TokenLoss:
    constexprs |= {"HAS_MASK": inputs.mask is not None, "BLOCK": BLOCK, "COLUMNS": COLUMNS}
    _launch.run(kernel, partials.shape[0], _launch.THREADS, arguments, **constexprs)
    grad, loss = arguments["grad_ptr"], arguments["loss_ptr"]
    return _launch.finish_loss(inputs, options, partials, partials, grad, loss, COLUMNS_ANCHORED, anchored=True)
