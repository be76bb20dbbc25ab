"""Kernel K1K3: with e given, a row of logits becomes its loss gradient in one program.

The program reads the row for its statistics, knows lp and with it g of (5), and reads the row again, from the last
block to the first, while it is still in the L2 cache: as many programs are launched as rows fit there, and each goes
on to its next row. Loss and metrics come from kernel K2 on the log-probs.
"""

import triton
import triton.language as tl

from p3o_kernels._row_kernels import (
    ROW_INTEGERS,
    ROW_POINTERS,
    load_label,
    row_inputs,
    row_statistics,
    write_label_grad,
    write_row_grad,
    write_zero_row,
)
from p3o_kernels._row_math_kernels import finish_row, grad_coefficients
from p3o_kernels._token_kernels import optional_terms, sequence_of, token_terms


@triton.jit
def _token_gradient(
    log_prob, entropy, behavior_ptr, advantages_ptr, cu_seqlens_ptr, reference_ptr, ess_ptr,
    row, num_sequences, kl_mode, per_sequence, has_reference, entropy_coef, reference_coef,
):  # fmt: skip
    """g of one valid token, the same operations as in kernel K2; NaN where the token is invalid data."""
    ess = tl.load(ess_ptr)
    index = row
    if per_sequence != 0:
        index = sequence_of(cu_seqlens_ptr, row.to(tl.int32), num_sequences).to(tl.int64)
    valid = row >= 0
    none = (row * 0).to(tl.int32)
    total = (ess * 0.0, ess * 0.0, none, log_prob * 0.0, none, log_prob * 0.0, log_prob * 0.0, log_prob, log_prob)
    _, grad, loss, _ = token_terms(
        total, log_prob, tl.load(behavior_ptr + row), tl.load(advantages_ptr + index), valid,
        ess, ess.to(tl.float32), (1.0 - ess).to(tl.float32), kl_mode, 0.0, 0.0, True, (), False,
    )  # fmt: skip
    reference = log_prob
    if has_reference != 0:
        reference = tl.load(reference_ptr + row)
    more = (log_prob * 0.0, log_prob * 0.0, none)
    _, grad, _ = optional_terms(more, log_prob, valid, reference, entropy, grad, loss, entropy_coef, reference_coef)
    return grad


@triton.jit
def _row_loss(
    logits_ptr, out_ptr, labels_ptr, mask_ptr, temperature_ptr, behavior_ptr, advantages_ptr, cu_seqlens_ptr,
    reference_ptr, ess_ptr, scale_ptr, log_probs_ptr, entropy_ptr,
    row, vocab, stride, out_stride, misaligned, temperature, softcap, has_mask, per_row,
    num_sequences, per_sequence, has_reference, kl_mode, entropy_coef, reference_coef,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """lp, H and g * scale * dlp/dlogits (- c_H * scale * dH/dlogits) of one row."""
    valid, row_scale, label, owned = row_inputs(
        labels_ptr, mask_ptr, temperature_ptr, row, vocab, 0, temperature, has_mask, per_row
    )
    begin, out_begin = row * stride, row * out_stride
    if valid:
        label_logit = load_label(logits_ptr + begin, label, owned, softcap, HAS_SOFTCAP)
        shift, total, weighted = row_statistics(
            logits_ptr, begin, misaligned, vocab, row_scale, softcap, HAS_ENTROPY, HAS_SOFTCAP, VEC, BLOCK
        )
        log_prob, entropy, high, low = finish_row(shift, total, weighted, label_logit, row_scale)
        if not HAS_ENTROPY:
            entropy = log_prob * 0.0
        grad = _token_gradient(
            log_prob, entropy, behavior_ptr, advantages_ptr, cu_seqlens_ptr, reference_ptr, ess_ptr,
            row, num_sequences, kl_mode, per_sequence, has_reference, entropy_coef, reference_coef,
        )  # fmt: skip
        factor = tl.load(scale_ptr).to(tl.float32)
        softmax, onehot, slope = grad_coefficients(
            grad * factor, -entropy_coef * factor, entropy, low, row_scale, HAS_ENTROPY
        )
        write_row_grad(
            logits_ptr, out_ptr, begin, out_begin, misaligned, vocab, row_scale, softcap, high, softmax, slope,
            HAS_ENTROPY, HAS_SOFTCAP, VEC, BLOCK,
        )  # fmt: skip
        write_label_grad(
            out_ptr + out_begin, label, owned, label_logit, row_scale, softcap, high, softmax, onehot, slope,
            HAS_ENTROPY, HAS_SOFTCAP,
        )  # fmt: skip
        tl.store(log_probs_ptr + row, log_prob)
        if HAS_ENTROPY:
            tl.store(entropy_ptr + row, entropy)
    else:
        write_zero_row(out_ptr, out_begin, misaligned, vocab, VEC, BLOCK)
        tl.store(log_probs_ptr + row, 0.0)
        if HAS_ENTROPY:
            tl.store(entropy_ptr + row, 0.0)


@triton.jit(do_not_specialize=ROW_INTEGERS, do_not_specialize_on_alignment=ROW_POINTERS)
def row_loss_kernel(
    logits_ptr, out_ptr, labels_ptr, mask_ptr, temperature_ptr, behavior_ptr, advantages_ptr, cu_seqlens_ptr,
    reference_ptr, ess_ptr, scale_ptr, log_probs_ptr, entropy_ptr,
    num_rows: tl.int64, vocab, stride: tl.int64, out_stride: tl.int64, misaligned, temperature, softcap, has_mask,
    per_row, num_sequences, per_sequence, has_reference, kl_mode, entropy_coef, reference_coef,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """K1K3. ``out`` may be the logits' memory. The number of programs is the number of rows that are under way."""
    for row in range(tl.program_id(0), num_rows.to(tl.int32), tl.num_programs(0)):
        _row_loss(
            logits_ptr, out_ptr, labels_ptr, mask_ptr, temperature_ptr, behavior_ptr, advantages_ptr, cu_seqlens_ptr,
            reference_ptr, ess_ptr, scale_ptr, log_probs_ptr, entropy_ptr,
            tl.cast(row, tl.int64), vocab, stride, out_stride, misaligned, temperature, softcap, has_mask, per_row,
            num_sequences, per_sequence, has_reference, kl_mode, entropy_coef, reference_coef,
            HAS_ENTROPY, HAS_SOFTCAP, VEC, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=ROW_INTEGERS, do_not_specialize_on_alignment=ROW_POINTERS)
def scale_rows_kernel(
    grad_ptr, factor_ptr, row_length: tl.int64, stride: tl.int64, factor_stride: tl.int64, BLOCK: tl.constexpr
):  # fmt: skip
    """grad[row] *= factor[row] in place; a factor of 1 costs a launch and no traffic."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + row * factor_stride)
    if factor != 1.0:
        row_ptr = grad_ptr + row * stride
        for start in range(0, row_length, BLOCK):
            column = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
            grad = tl.load(row_ptr + column, mask=column < row_length, other=0.0).to(tl.float32)
            tl.store(row_ptr + column, (grad * factor).to(grad_ptr.dtype.element_ty), mask=column < row_length)
