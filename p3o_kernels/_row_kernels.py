"""Kernels K1 and K3: statistics of a row of logits, and the gradient of what was made from them.

Equations (6) to (10) are in ``_row_math_kernels``. One program owns one row, whatever T is, so a row's result does not
depend on its neighbours; rows are on the first grid axis alone. Rows whose mask is False are not read.

    K1  logits -> lp, H, normaliser; or, where other parts of the vocabulary follow, a partial [4]: m, d, label, w
    K3  logits, normaliser, dL/dlp, dL/dH -> dlogits, which may be the logits' own memory
"""

import triton
import triton.language as tl

from p3o_kernels._row_math_kernels import (
    LOWEST,
    block_columns,
    capped,
    edge_columns,
    finish_row,
    fold,
    fold_edges,
    grad_coefficients,
    pieces_inside,
    row_span,
    row_sums,
    scale_of,
    softmax_grad,
    through_softcap,
)

# Rows begin anywhere and the other pointers lead to single numbers: one machine code for every address and size.
ROW_POINTERS = (
    "logits_ptr out_ptr labels_ptr mask_ptr temperature_ptr partial_ptr log_probs_ptr entropy_ptr normalizer_ptr "
    "low_ptr grad_ptr entropy_grad_ptr behavior_ptr advantages_ptr cu_seqlens_ptr reference_ptr ess_ptr scale_ptr "
    "factor_ptr"
).split()
ROW_INTEGERS = (
    "num_rows vocab vocab_start stride out_stride misaligned has_mask per_row finish num_parts grad_stride "
    "entropy_grad_stride num_sequences per_sequence has_reference kl_mode row_length factor_stride"
).split()


@triton.jit
def row_inputs(labels_ptr, mask_ptr, temperature_ptr, row, vocab, vocab_start, temperature, has_mask, per_row):
    """(valid, log2(e) / tau, label counted from this shard's start, whether the shard holds it)."""
    valid = (has_mask == 0) | (tl.load(mask_ptr + row) != 0)
    if per_row != 0:
        temperature = tl.load(temperature_ptr + row)
    label = tl.load(labels_ptr + row) - vocab_start
    return valid, scale_of(temperature), label, (label >= 0) & (label < vocab)


@triton.jit
def load_label(row_ptr, label, owned, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap(z_y), or -inf where this shard does not hold the label."""
    logit = tl.load(row_ptr + tl.where(owned, label, 0), mask=owned, other=float("-inf")).to(tl.float32)
    return capped(logit, softcap, HAS_SOFTCAP)


@triton.jit
def row_statistics(
    logits_ptr, begin, misaligned, vocab, scale, softcap,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(m, d, w) of (7) and (8) in one reading of the row."""
    aligned_ptr, head, aligned = row_span(logits_ptr, begin, misaligned, vocab, VEC)
    whole = aligned // BLOCK * BLOCK
    top = tl.full([BLOCK // VEC], LOWEST, tl.float32)
    total = tl.zeros([BLOCK // VEC], tl.float32)
    weighted = tl.zeros([BLOCK // VEC], tl.float32)
    for start in range(0, whole, BLOCK):
        x = tl.load(aligned_ptr + start + block_columns(VEC, BLOCK)).to(tl.float32)
        x = capped(x, softcap, HAS_SOFTCAP)
        top, total, weighted = fold(top, total, weighted, x, scale, HAS_ENTROPY)
    if whole < aligned:
        inside = pieces_inside(whole, aligned, VEC, BLOCK)
        x = tl.load(aligned_ptr + whole + block_columns(VEC, BLOCK), mask=inside, other=float("-inf")).to(tl.float32)
        x = capped(x, softcap, HAS_SOFTCAP)
        top, total, weighted = fold(top, total, weighted, x, scale, HAS_ENTROPY)
    shift, row_total, row_weighted = row_sums(top, total, weighted, HAS_ENTROPY)
    if aligned < vocab:
        column, inside = edge_columns(head, aligned, vocab, VEC)
        x = tl.load(aligned_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
        x = capped(x, softcap, HAS_SOFTCAP)
        shift, row_total, row_weighted = fold_edges(shift, row_total, row_weighted, x, scale, HAS_ENTROPY)
    return shift, row_total, row_weighted


@triton.jit
def write_row_grad(
    logits_ptr, out_ptr, begin, out_begin, misaligned, vocab, scale, softcap, high, softmax, slope,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The softmax part of a row gradient, last block first: it is the one that a preceding sweep left in the cache."""
    aligned_ptr, head, aligned = row_span(logits_ptr, begin, misaligned, vocab, VEC)
    aligned_out_ptr = tl.multiple_of(out_ptr + (out_begin + head), 16)
    whole = aligned // BLOCK * BLOCK
    if aligned < vocab:
        column, inside = edge_columns(head, aligned, vocab, VEC)
        x = tl.load(aligned_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
        x = capped(x, softcap, HAS_SOFTCAP)
        grad = softmax_grad(x, scale, high, softmax, slope, HAS_ENTROPY)
        grad = through_softcap(grad, x, softcap, HAS_SOFTCAP)
        tl.store(aligned_out_ptr + column, grad.to(out_ptr.dtype.element_ty), mask=inside)
    if whole < aligned:
        inside = pieces_inside(whole, aligned, VEC, BLOCK)
        x = tl.load(aligned_ptr + whole + block_columns(VEC, BLOCK), mask=inside, other=float("-inf")).to(tl.float32)
        x = capped(x, softcap, HAS_SOFTCAP)
        grad = softmax_grad(x, scale, high, softmax, slope, HAS_ENTROPY)
        grad = through_softcap(grad, x, softcap, HAS_SOFTCAP)
        grad = grad.to(out_ptr.dtype.element_ty)
        tl.store(aligned_out_ptr + whole + block_columns(VEC, BLOCK), grad, mask=inside)
    for done in range(0, whole, BLOCK):
        start = whole - BLOCK - done
        x = tl.load(aligned_ptr + start + block_columns(VEC, BLOCK)).to(tl.float32)
        x = capped(x, softcap, HAS_SOFTCAP)
        grad = softmax_grad(x, scale, high, softmax, slope, HAS_ENTROPY)
        grad = through_softcap(grad, x, softcap, HAS_SOFTCAP)
        tl.store(aligned_out_ptr + start + block_columns(VEC, BLOCK), grad.to(out_ptr.dtype.element_ty))


@triton.jit
def write_label_grad(
    out_ptr, label, owned, label_logit, scale, softcap, high, softmax, onehot, slope,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The label's own gradient over what the sweep wrote there, summed in float32 before it is rounded once."""
    tl.debug_barrier()  # the sweep's store of this entry came from another thread
    grad = softmax_grad(label_logit, scale, high, softmax, slope, HAS_ENTROPY) + onehot
    grad = through_softcap(grad, label_logit, softcap, HAS_SOFTCAP)
    tl.store(out_ptr + tl.where(owned, label, 0), grad.to(out_ptr.dtype.element_ty), mask=owned)


@triton.jit
def write_zero_row(out_ptr, out_begin, misaligned, vocab, VEC: tl.constexpr, BLOCK: tl.constexpr):
    aligned_ptr, head, aligned = row_span(out_ptr, out_begin, misaligned, vocab, VEC)
    zero = tl.zeros([BLOCK // VEC, VEC], out_ptr.dtype.element_ty)
    for start in range(0, aligned, BLOCK):
        inside = pieces_inside(start, aligned, VEC, BLOCK)
        tl.store(aligned_ptr + start + block_columns(VEC, BLOCK), zero, mask=inside)
    column, inside = edge_columns(head, aligned, vocab, VEC)
    tl.store(aligned_ptr + column, tl.zeros([2 * VEC], out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_row(
    log_probs_ptr, entropy_ptr, normalizer_ptr, low_ptr, row, values, valid, inside, HAS_ENTROPY: tl.constexpr
):  # fmt: skip
    """The numbers of ``finish_row``, 0 where the row is masked."""
    log_prob, entropy, high, low = values
    tl.store(log_probs_ptr + row, tl.where(valid, log_prob, 0.0), mask=inside)
    tl.store(normalizer_ptr + row, tl.where(valid, high, 0.0), mask=inside)
    tl.store(low_ptr + row, tl.where(valid, low, 0.0).to(tl.float16), mask=inside)
    if HAS_ENTROPY:
        tl.store(entropy_ptr + row, tl.where(valid, entropy, 0.0), mask=inside)


@triton.jit(do_not_specialize=ROW_INTEGERS, do_not_specialize_on_alignment=ROW_POINTERS)
def row_stats_kernel(
    logits_ptr, labels_ptr, mask_ptr, temperature_ptr, partial_ptr, log_probs_ptr, entropy_ptr, normalizer_ptr, low_ptr,
    num_rows: tl.int64, vocab, vocab_start: tl.int64, stride: tl.int64, misaligned, temperature, softcap,
    has_mask, per_row, finish,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """K1."""
    row = tl.program_id(0).to(tl.int64)
    valid, scale, label, owned = row_inputs(
        labels_ptr, mask_ptr, temperature_ptr, row, vocab, vocab_start, temperature, has_mask, per_row
    )
    # a masked row: the neutral element of a merge
    shift, label_logit = tl.full([], LOWEST, tl.float32), tl.full([], float("-inf"), tl.float32)
    total, weighted = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    if valid:
        begin = row * stride
        label_logit = load_label(logits_ptr + begin, label, owned, softcap, HAS_SOFTCAP)
        shift, total, weighted = row_statistics(
            logits_ptr, begin, misaligned, vocab, scale, softcap, HAS_ENTROPY, HAS_SOFTCAP, VEC, BLOCK
        )
    if finish != 0:
        values = finish_row(shift, total, weighted, label_logit, scale)
        store_row(log_probs_ptr, entropy_ptr, normalizer_ptr, low_ptr, row, values, valid, row >= 0, HAS_ENTROPY)
    else:
        tl.store(partial_ptr + row, shift)
        tl.store(partial_ptr + num_rows + row, total)
        tl.store(partial_ptr + 2 * num_rows + row, label_logit)
        tl.store(partial_ptr + 3 * num_rows + row, weighted)


@triton.jit(do_not_specialize=ROW_INTEGERS)
def row_merge_kernel(
    partials_ptr, mask_ptr, temperature_ptr, merged_ptr, log_probs_ptr, entropy_ptr, normalizer_ptr, low_ptr,
    num_rows: tl.int64, num_parts, temperature, has_mask, per_row, finish,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Joins the partials [num_parts, 4, num_rows] of a vocabulary in order; finishes or gives another partial."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    shift = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    label_logit = tl.full([BLOCK], float("-inf"), tl.float32)
    for part in range(0, num_parts):
        part_ptr = partials_ptr + tl.cast(part, tl.int64) * 4 * num_rows + row
        other = tl.load(part_ptr, mask=inside, other=LOWEST)
        new = tl.maximum(shift, other)
        drop, other_drop = tl.maximum(shift - new, -1000.0), tl.maximum(other - new, -1000.0)
        power, other_power = tl.exp2(drop), tl.exp2(other_drop)
        other_total = tl.load(part_ptr + num_rows, mask=inside, other=0.0)
        other_weighted = tl.load(part_ptr + 3 * num_rows, mask=inside, other=0.0)
        weighted = (weighted + drop * total) * power + (other_weighted + other_drop * other_total) * other_power
        total = total * power + other_total * other_power
        label_logit = tl.maximum(label_logit, tl.load(part_ptr + 2 * num_rows, mask=inside, other=float("-inf")))
        shift = new
    if finish != 0:
        valid = (has_mask == 0) | (tl.load(mask_ptr + row, mask=inside, other=0) != 0)
        tau = tl.full([BLOCK], 1.0, tl.float32) * temperature
        if per_row != 0:
            tau = tl.load(temperature_ptr + row, mask=inside, other=1.0)
        values = finish_row(shift, total, weighted, label_logit, scale_of(tau))
        store_row(log_probs_ptr, entropy_ptr, normalizer_ptr, low_ptr, row, values, valid, inside, HAS_ENTROPY)
    else:
        tl.store(merged_ptr + row, shift, mask=inside)
        tl.store(merged_ptr + num_rows + row, total, mask=inside)
        tl.store(merged_ptr + 2 * num_rows + row, label_logit, mask=inside)
        tl.store(merged_ptr + 3 * num_rows + row, weighted, mask=inside)


@triton.jit(do_not_specialize=ROW_INTEGERS, do_not_specialize_on_alignment=ROW_POINTERS)
def row_grad_kernel(
    logits_ptr, out_ptr, labels_ptr, mask_ptr, temperature_ptr, normalizer_ptr, low_ptr, entropy_ptr,
    grad_ptr, entropy_grad_ptr,
    vocab, vocab_start: tl.int64, stride: tl.int64, out_stride: tl.int64, misaligned, temperature, softcap,
    has_mask, per_row, grad_stride: tl.int64, entropy_grad_stride: tl.int64,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """K3. A row without any gradient gets zeros and is not read."""
    row = tl.program_id(0).to(tl.int64)
    valid, scale, label, owned = row_inputs(
        labels_ptr, mask_ptr, temperature_ptr, row, vocab, vocab_start, temperature, has_mask, per_row
    )
    begin, out_begin = row * stride, row * out_stride
    log_prob_grad = tl.load(grad_ptr + row * grad_stride)
    entropy_grad, entropy = 0.0, 0.0
    if HAS_ENTROPY:
        entropy_grad, entropy = tl.load(entropy_grad_ptr + row * entropy_grad_stride), tl.load(entropy_ptr + row)
    if valid & ((log_prob_grad != 0.0) | (entropy_grad != 0.0)):
        high, low = tl.load(normalizer_ptr + row), tl.load(low_ptr + row).to(tl.float32)
        softmax, onehot, slope = grad_coefficients(log_prob_grad, entropy_grad, entropy, low, scale, HAS_ENTROPY)
        label_logit = load_label(logits_ptr + begin, label, owned, softcap, HAS_SOFTCAP)
        tl.debug_barrier()  # in place, another thread's sweep would overwrite the label's logit
        write_row_grad(
            logits_ptr, out_ptr, begin, out_begin, misaligned, vocab, scale, softcap, high, softmax, slope,
            HAS_ENTROPY, HAS_SOFTCAP, VEC, BLOCK,
        )  # fmt: skip
        write_label_grad(
            out_ptr + out_begin, label, owned, label_logit, scale, softcap, high, softmax, onehot, slope,
            HAS_ENTROPY, HAS_SOFTCAP,
        )  # fmt: skip
    else:
        write_zero_row(out_ptr, out_begin, misaligned, vocab, VEC, BLOCK)
