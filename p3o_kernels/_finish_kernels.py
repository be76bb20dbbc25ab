"""Kernel K2, the one-program launches that turn partial sums into the numbers a caller sees.

``finish_loss_kernel`` writes the summary vector whose fields ``_summary`` names, in that order.
"""

import triton
import triton.language as tl

from p3o_kernels._math_kernels import column_sums, ess_of_sums

# What the sum of L is divided by: see p3o_loss(reduction, num_tokens)
DIVIDE_NONE = tl.constexpr(0)  # per-token loss
DIVIDE_ONE = tl.constexpr(1)  # sum
DIVIDE_COUNT = tl.constexpr(2)  # mean over this call's valid tokens
DIVIDE_INTEGER = tl.constexpr(3)  # num_tokens, an int
DIVIDE_TENSOR = tl.constexpr(4)  # num_tokens, a float64 tensor


@triton.jit
def _pick(values, index, WIDTH: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, WIDTH) == index, values, 0.0), 0)


@triton.jit
def moments(sum_ratio, sum_ratio_sq, count):
    """Mean and population standard deviation of rho; 1 and 0 without tokens."""
    safe = tl.where(count == 0.0, 1.0, count)
    mean = tl.where(count == 0.0, 1.0, sum_ratio / safe)
    variance = tl.where(count == 0.0, 0.0, sum_ratio_sq / safe - mean * mean)
    return mean, tl.sqrt(tl.maximum(variance, 0.0))


@triton.jit
def overflowed(sum_ratio, sum_ratio_sq):
    """1.0 when a sum left the float64 range although every term was finite."""
    return tl.where((sum_ratio < float("inf")) & (sum_ratio_sq < float("inf")), 0.0, 1.0)


@triton.jit(do_not_specialize=["num_partials"])
def finish_ratio_kernel(partials_ptr, out_ptr, num_partials, MAX_PROGRAMS: tl.constexpr):
    """[S1, S2, N, invalid] from the partial sums of ratio_sums_kernel."""
    sum_ratio, sum_ratio_sq, count, invalid = column_sums(partials_ptr, num_partials, MAX_PROGRAMS)
    tl.store(out_ptr, sum_ratio)
    tl.store(out_ptr + 1, sum_ratio_sq)
    tl.store(out_ptr + 2, count)
    tl.store(out_ptr + 3, invalid + overflowed(sum_ratio, sum_ratio_sq))


@triton.jit
def context_kernel(sums_ptr, out_ptr):
    """[e, N, mean of rho, standard deviation of rho] from (reduced) [S1, S2, N, invalid]."""
    sum_ratio, sum_ratio_sq = tl.load(sums_ptr), tl.load(sums_ptr + 1)
    count, invalid = tl.load(sums_ptr + 2), tl.load(sums_ptr + 3)
    mean, deviation = moments(sum_ratio, sum_ratio_sq, count)
    tl.store(out_ptr, ess_of_sums(sum_ratio, sum_ratio_sq, count, invalid))
    tl.store(out_ptr + 1, count)
    tl.store(out_ptr + 2, mean)
    tl.store(out_ptr + 3, deviation)


@triton.jit(do_not_specialize=["num_partials", "columns", "divide", "num_tokens"])
def finish_loss_kernel(
    partials_ptr, ess_ptr, num_tokens_ptr, summary_ptr, loss_ptr, scale_ptr, count_ptr,
    num_partials, columns, divide, num_tokens: tl.int64, entropy_coef, reference_coef,
    MAX_PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """Summary, loss, d loss / d (sum of L) and the exact count from the partial sums of token_loss_kernel.

    ANCHORED: of the kernels in ``_anchored_kernels``, which sum pull and cap themselves; the summary ends with the
    metrics, and ``ess_ptr`` is not read.
    """
    row, column = tl.arange(0, MAX_PROGRAMS), tl.arange(0, COLUMNS)
    inside = (row[:, None] < num_partials) & (column[None, :] < columns)
    partials = tl.load(partials_ptr + row[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0)
    sums = tl.sum(partials, 0)
    largest = tl.max(tl.load(partials_ptr + row * COLUMNS + 10, mask=row < num_partials, other=0.0), 0)
    if not ANCHORED:
        ess = tl.load(ess_ptr)
    sum_ratio, sum_ratio_sq, count = _pick(sums, 0, COLUMNS), _pick(sums, 1, COLUMNS), _pick(sums, 2, COLUMNS)
    invalid = _pick(sums, 3, COLUMNS) + _pick(sums, 13, COLUMNS) + overflowed(sum_ratio, sum_ratio_sq)
    if ANCHORED:
        adaptive = _pick(sums, 11, COLUMNS)
        reference, entropy = 0.0, 0.0
    else:
        adaptive = (1.0 - ess) * _pick(sums, 9, COLUMNS)
        reference, entropy = _pick(sums, 11, COLUMNS), _pick(sums, 12, COLUMNS)
    total = _pick(sums, 8, COLUMNS) + adaptive + reference_coef * reference - entropy_coef * entropy
    total = tl.where(invalid == 0.0, total, float("nan"))
    mean, deviation = moments(sum_ratio, sum_ratio_sq, count)
    tl.store(summary_ptr + column, sums, mask=(column < 10) & (column != 3))
    tl.store(summary_ptr + 3, invalid)
    tl.store(summary_ptr + 10, reference)
    tl.store(summary_ptr + 11, entropy)
    tl.store(summary_ptr + 12, adaptive)
    tl.store(summary_ptr + 13, total)
    if ANCHORED:
        tl.store(summary_ptr + 14, _pick(sums, 12, COLUMNS))
    else:
        tl.store(summary_ptr + 14, tl.where(count == 0.0, 0.0, ess * count))
    tl.store(summary_ptr + 15, largest)
    if not ANCHORED:
        tl.store(summary_ptr + 16, ess)
        tl.store(summary_ptr + 17, count)
        tl.store(summary_ptr + 18, mean)
        tl.store(summary_ptr + 19, deviation)
    divisor = tl.where(
        divide == DIVIDE_COUNT, count, tl.where(divide == DIVIDE_INTEGER, num_tokens.to(tl.float64), 1.0)
    )
    if divide == DIVIDE_TENSOR:
        divisor = tl.load(num_tokens_ptr)
    # no token: the loss is an exact 0 whatever the divisor
    scale = tl.where(count == 0.0, 0.0, 1.0 / tl.where(count == 0.0, 1.0, divisor))
    tl.store(loss_ptr, tl.where(count == 0.0, 0.0, total * scale).to(tl.float32), mask=divide != DIVIDE_NONE)
    tl.store(scale_ptr, tl.where((invalid == 0.0) | (divide == DIVIDE_NONE), scale, float("nan")))
    tl.store(count_ptr, count.to(tl.int64))
