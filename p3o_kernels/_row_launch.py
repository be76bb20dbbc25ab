"""Launches of the vocabulary kernels K1, K3 and K1K3; the counterpart of ``_row_eager``.

Logits are [T, V] with stride 1 along V and any row stride; their address may be any multiple of the element size.
One launch has one program a row. All else is contiguous.
"""

from typing import Any

import torch
from torch import Tensor

from p3o_kernels import _launch
from p3o_kernels import _row_kernels as row_kernels
from p3o_kernels import _row_loss_kernels as row_loss_kernels
from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._rows import PARTIAL_SIZE, RowGrads, Rows, RowValues
from p3o_kernels._summary import KL_MODES

BLOCK, THREADS = 4096, 256
LOSS_BLOCK, LOSS_THREADS = 32768, 1024  # one program of K1K3 keeps a multiprocessor busy
HOST_PROGRAMS = 3  # under the interpreter: few enough that a program sees several rows
MERGE_BLOCK, MERGE_THREADS = 256, 256
SCALE_BLOCK, SCALE_THREADS = 2048, 256


def vector(dtype: torch.dtype) -> int:
    """Elements in 16 bytes."""
    return 16 // dtype.itemsize


def misaligned(logits: Tensor) -> int:
    """Elements between the last 16-byte boundary and the first logit; storages begin on a boundary."""
    return int(logits.storage_offset() % vector(logits.dtype))


def empty_like_rows(logits: Tensor) -> Tensor:
    """[T, V] whose rows have the same distance to 16-byte boundaries as those of ``logits``."""
    tokens, vocab = logits.shape
    per_vector, offset = vector(logits.dtype), misaligned(logits)
    stride = vocab + (logits.stride(0) - vocab) % per_vector
    flat = logits.new_empty(offset + tokens * stride)
    return flat.as_strided((tokens, vocab), (stride, 1), offset)


def _row_arguments(rows: Rows) -> dict[str, Any]:
    labels, temperatures = rows.labels, rows.row_temperature
    return {
        "mask_ptr": (labels if rows.mask is None else rows.mask).view(torch.uint8),
        "temperature_ptr": labels.view(torch.float32) if temperatures is None else temperatures,
        "temperature": rows.temperature,
        "has_mask": int(rows.mask is not None),
        "per_row": int(temperatures is not None),
    }


def _logits_arguments(logits: Tensor, rows: Rows) -> dict[str, Any]:
    return _row_arguments(rows) | {
        "logits_ptr": logits,
        "labels_ptr": rows.labels,
        "vocab": logits.shape[1],
        "stride": logits.stride(0),
        "misaligned": misaligned(logits),
        "softcap": rows.softcap or 1.0,
    }


def _constexprs(logits: Tensor, rows: Rows) -> dict[str, int | bool]:
    flags = {"HAS_ENTROPY": rows.entropy, "HAS_SOFTCAP": rows.softcap > 0}
    return flags | {"VEC": vector(logits.dtype), "BLOCK": BLOCK}


def _empty_values(like: Tensor, num_rows: int, entropy: bool) -> RowValues:
    def numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return like.new_empty(count, dtype=dtype)

    return RowValues(
        numbers(num_rows), numbers(num_rows * entropy), numbers(num_rows), numbers(num_rows, torch.float16)
    )


def _value_arguments(values: RowValues) -> dict[str, Tensor]:
    return {
        "log_probs_ptr": values.log_probs,
        "entropy_ptr": values.entropy if values.entropy.numel() else values.log_probs,
        "normalizer_ptr": values.normalizer,
        "low_ptr": values.normalizer_low,
    }


def _row_stats(logits: Tensor, rows: Rows, partial: Tensor | None, values: RowValues | None) -> None:
    outputs: dict[str, Any] = {"partial_ptr": partial, "finish": int(values is not None)}
    if values is not None:
        outputs |= {"partial_ptr": values.log_probs} | _value_arguments(values)
    elif partial is not None:
        outputs |= dict.fromkeys(("log_probs_ptr", "entropy_ptr", "normalizer_ptr"), partial)
        outputs["low_ptr"] = partial.view(torch.float16)
    arguments = _logits_arguments(logits, rows) | outputs
    arguments |= {"num_rows": logits.shape[0], "vocab_start": rows.vocab_start}
    if logits.shape[0]:
        _launch.run(row_kernels.row_stats_kernel, logits.shape[0], THREADS, arguments, **_constexprs(logits, rows))


def row_values(logits: Tensor, rows: Rows) -> RowValues:
    """Values of rows that hold the whole vocabulary: 1 launch."""
    values = _empty_values(logits, logits.shape[0], rows.entropy)
    _row_stats(logits, rows, None, values)
    return values


def row_partials(logits: Tensor, rows: Rows) -> Tensor:
    """[4, T] float32 of rows that hold a part of the vocabulary: 1 launch."""
    partial = logits.new_empty((PARTIAL_SIZE, logits.shape[0]), dtype=torch.float32)
    _row_stats(logits, rows, partial, None)
    return partial


def _merge(partials: Tensor, rows: Rows, merged: Tensor | None, values: RowValues | None) -> None:
    num_parts, _, num_rows = partials.shape
    outputs: dict[str, Any] = {"finish": int(values is not None)}
    if values is not None:
        outputs |= {"merged_ptr": values.log_probs} | _value_arguments(values)
    elif merged is not None:
        outputs |= dict.fromkeys(("merged_ptr", "log_probs_ptr", "entropy_ptr", "normalizer_ptr"), merged)
        outputs["low_ptr"] = merged.view(torch.float16)
    arguments = _row_arguments(rows) | outputs
    arguments |= {"partials_ptr": partials, "num_rows": num_rows, "num_parts": num_parts}
    if num_rows:
        _launch.run(
            row_kernels.row_merge_kernel,
            -(-num_rows // MERGE_BLOCK),
            MERGE_THREADS,
            arguments,
            HAS_ENTROPY=rows.entropy,
            BLOCK=MERGE_BLOCK,
        )


def merge_partials(partials: Tensor, rows: Rows) -> Tensor:
    """[4, T] from [parts, 4, T], joined in order: 1 launch."""
    merged = partials.new_empty(partials.shape[1:])
    _merge(partials, rows, merged, None)
    return merged


def finish_partials(partials: Tensor, rows: Rows) -> RowValues:
    """Values from the partials [parts, 4, T] of the whole vocabulary, joined in order: 1 launch."""
    values = _empty_values(partials, partials.shape[2], rows.entropy)
    _merge(partials, rows, None, values)
    return values


def row_grad(logits: Tensor, out: Tensor, rows: Rows, values: RowValues, grads: RowGrads) -> None:
    """dlogits into ``out``, which may be ``logits``: 1 launch."""
    with_entropy = rows.entropy and grads.entropy is not None
    entropy_grad = grads.entropy if with_entropy and grads.entropy is not None else grads.log_probs
    arguments = _logits_arguments(logits, rows) | {
        "out_ptr": out,
        "normalizer_ptr": values.normalizer,
        "low_ptr": values.normalizer_low,
        "entropy_ptr": values.entropy if with_entropy else values.normalizer,
        "grad_ptr": grads.log_probs,
        "entropy_grad_ptr": entropy_grad,
        "vocab_start": rows.vocab_start,
        "out_stride": out.stride(0),
        "grad_stride": grads.log_probs.stride(0),
        "entropy_grad_stride": entropy_grad.stride(0),
    }
    constexprs = _constexprs(logits, rows) | {"HAS_ENTROPY": with_entropy}
    if logits.shape[0]:
        _launch.run(row_kernels.row_grad_kernel, logits.shape[0], THREADS, arguments, **constexprs)


def row_loss(
    logits: Tensor, out: Tensor, rows: Rows, tokens: TokenInputs, options: LossOptions, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """lp and H ([0] when not wanted), and scale * dL/dlogits into ``out``, which may be ``logits``: 1 launch.

    ``tokens`` has e; its log-probs and entropy are not looked at.
    """
    log_probs = logits.new_empty(logits.shape[0], dtype=torch.float32)
    entropy = log_probs.new_empty(logits.shape[0] * rows.entropy)
    per_sequence, reference = tokens.cu_seqlens is not None, tokens.reference_log_probs
    arguments = _logits_arguments(logits, rows) | {
        "out_ptr": out,
        "behavior_ptr": tokens.behavior_log_probs,
        "advantages_ptr": tokens.advantages,
        "cu_seqlens_ptr": log_probs.view(torch.int32) if tokens.cu_seqlens is None else tokens.cu_seqlens,
        "reference_ptr": log_probs if reference is None else reference,
        "ess_ptr": tokens.ess,
        "scale_ptr": scale,
        "log_probs_ptr": log_probs,
        "entropy_ptr": entropy if rows.entropy else log_probs,
        "num_rows": logits.shape[0],
        "out_stride": out.stride(0),
        "num_sequences": tokens.advantages.numel(),
        "per_sequence": int(per_sequence),
        "has_reference": int(reference is not None),
        "kl_mode": KL_MODES.index(options.kl_mode),
        "entropy_coef": options.entropy_coef,
        "reference_coef": options.reference_coef,
    }
    constexprs = _constexprs(logits, rows) | {"BLOCK": loss_block(rows.softcap > 0)}
    if logits.shape[0]:
        _launch.run(row_loss_kernels.row_loss_kernel, rows_under_way(logits), LOSS_THREADS, arguments, **constexprs)
    return log_probs, entropy


def loss_block(softcap: bool) -> int:
    """Columns that K1K3 takes at a time: fewer where tanh needs registers of its own."""
    return LOSS_BLOCK // 2 if softcap else LOSS_BLOCK


def rows_under_way(logits: Tensor) -> int:
    """How many rows K1K3 works on at a time: what half of the L2 cache holds, but one for each multiprocessor."""
    num_rows = logits.shape[0]
    if logits.device.type != "cuda":
        return min(num_rows, HOST_PROGRAMS)
    device = torch.cuda.get_device_properties(logits.device)
    in_cache = (device.L2_cache_size or 0) // 2 // (logits.shape[1] * logits.element_size())
    return min(num_rows, max(device.multi_processor_count, in_cache))


def scale_rows(grad: Tensor, factor: Tensor) -> None:
    """``grad`` *= ``factor`` ([] or one for each row) in place; a factor of 1 moves no data. 1 launch."""
    matrix = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
    arguments = {
        "grad_ptr": matrix,
        "factor_ptr": factor,
        "row_length": matrix.shape[1],
        "stride": matrix.stride(0),
        "factor_stride": factor.stride(0) if factor.dim() else 0,
    }
    if matrix.numel():
        _launch.run(row_loss_kernels.scale_rows_kernel, matrix.shape[0], SCALE_THREADS, arguments, BLOCK=SCALE_BLOCK)
