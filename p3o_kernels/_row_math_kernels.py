"""Pieces that the vocabulary kernels share: how a row is walked, its running maximum and sum, and its gradient.

    x_v = softcap(z_v) / tau                      logits z of one row, softcap(z) = c tanh(z / c)         (6)
    u_v = x_v log2(e) - m                         m: the shift, a running maximum of x log2(e)            (7)
    d = sum_v 2^u_v,   w = sum_v 2^u_v u_v                                                                (8)
    lp = ln2 u_y - ln d                           y: the label                                            (9)
    H = ln d - ln2 w / d                                                                                  (10)

The shift is whatever float32 number the kernel settles on; all of (7) to (10) use the same one and the
same log2(e) / tau through a fused multiply-add, so a large common offset of the logits costs no digits.

Rows start at any address. Columns before the first 16-byte boundary and after the last one, fewer than 2 VEC together,
are the edges of the row; everything between moves in 128-bit pieces of VEC columns, whole blocks without any mask.
"""

import triton
import triton.language as tl

from p3o_kernels._math_kernels import exp_pair

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # the first shift: finite, so that a block of -inf gives 2^-inf = 0 and not NaN
TINY_LOG2 = tl.constexpr(-1000.0)  # 2^this is 0, and 0 * this is 0 where 0 * -inf would be NaN


@triton.jit
def scale_of(temperature):
    """log2(e) / tau."""
    return 1.4426950408889634 / temperature  # a literal: the interpreter would make constexpr / tensor a constexpr


@triton.jit
def row_span(logits_ptr, begin, misaligned, vocab, VEC: tl.constexpr):
    """(pointer to the first aligned column, columns before it, columns in whole 16-byte pieces after it)."""
    head = ((VEC - (begin + misaligned) % VEC) % VEC).to(tl.int32)
    head = tl.minimum(head, vocab)
    return tl.multiple_of(logits_ptr + (begin + head), 16), head, (vocab - head) // VEC * VEC


@triton.jit
def block_columns(VEC: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK / VEC, VEC]: a thread owns whole rows of it, 16 bytes each."""
    return tl.arange(0, BLOCK // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def pieces_inside(start, aligned, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of the last block: the same for the VEC columns of a piece, so that it still moves in 128 bits."""
    inside = start + tl.arange(0, BLOCK // VEC) * VEC < aligned
    return tl.broadcast_to(inside[:, None], [BLOCK // VEC, VEC])


@triton.jit
def edge_columns(head, aligned, vocab, VEC: tl.constexpr):
    """([2 VEC] columns of both edges, counted from the aligned pointer, and which of them exist)."""
    position = tl.arange(0, 2 * VEC)
    return tl.where(position < head, position, aligned + position) - head, position < vocab - aligned


@triton.jit
def _tanh(x):
    """In float32: an odd polynomial fitted to tanh below 0.65, where 1 - 2 / (e^2x + 1) would cancel."""
    s = x * x
    near = (((-0.00593298 * s + 0.02088132) * s - 0.05382585) * s + 0.133326016) * s - 0.33333327
    near = near * s * x + x
    size = tl.minimum(tl.abs(x), 20.0)
    far = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2_E)) + 1.0)
    return tl.where(tl.abs(x) < 0.65, near, tl.where(x < 0, -far, far))


@triton.jit
def capped(x, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap(z) of (6); -inf stays -inf, so that an excluded entry does not come back with logit -c."""
    if HAS_SOFTCAP:
        return tl.where(x == float("-inf"), x, softcap * _tanh(x * (1.0 / softcap)))
    return x


@triton.jit
def fold(top, total, weighted, x, scale, HAS_ENTROPY: tl.constexpr):
    """One block into the running shift, d and w that each thread keeps for its own columns.

    The maximum over the VEC columns of a thread comes first: one rescaling serves all of them.
    """
    new = tl.maximum(top, tl.max(x, 1) * scale)
    u = tl.fma(x, scale, -new[:, None])
    power = tl.exp2(u)
    drop = top - new
    if HAS_ENTROPY:
        drop = tl.maximum(drop, TINY_LOG2)
        weighted = (weighted + drop * total) * tl.exp2(drop) + tl.sum(power * tl.maximum(u, TINY_LOG2), 1)
    total = total * tl.exp2(drop) + tl.sum(power, 1)
    return new, total, weighted


@triton.jit
def row_sums(top, total, weighted, HAS_ENTROPY: tl.constexpr):
    """The row's m, d and w from those of its threads."""
    shift = tl.max(top, 0)
    drop = tl.maximum(top - shift, TINY_LOG2)
    power = tl.exp2(drop)
    if HAS_ENTROPY:
        weighted_sum = tl.sum((weighted + drop * total) * power, 0)
    else:
        weighted_sum = shift * 0.0
    return shift, tl.sum(total * power, 0), weighted_sum


@triton.jit
def fold_edges(shift, total, weighted, x, scale, HAS_ENTROPY: tl.constexpr):
    """The edges of a row into its m, d and w; what does not exist is -inf."""
    new = tl.maximum(shift, tl.max(x, 0) * scale)
    u = tl.fma(x, scale, -new)
    power = tl.exp2(u)
    drop = tl.maximum(shift - new, TINY_LOG2)
    if HAS_ENTROPY:
        weighted = (weighted + drop * total) * tl.exp2(drop) + tl.sum(power * tl.maximum(u, TINY_LOG2), 0)
    return new, total * tl.exp2(drop) + tl.sum(power, 0), weighted


@triton.jit
def finish_row(shift, total, weighted, label_logit, scale):
    """(lp, H, normaliser, its rest) of (9) and (10).

    The normaliser m + log2 d is kept in two pieces, float32 and what float32 cannot hold: 2^(x log2(e) - normaliser)
    is the probability to full precision at any offset. The logarithm is made exact by one Newton step in float64.
    """
    rough = tl.log2(total) * LN_2
    usable = (total > 0.0) & (total < float("inf"))  # else 0, NaN or inf: the rough one is what torch gives
    _, inverse = exp_pair(tl.where(usable, rough, 0.0))
    log_total = rough.to(tl.float64) + tl.where(usable, total.to(tl.float64) * inverse - 1.0, 0.0)
    u = tl.fma(label_logit, scale, -shift)
    log_prob = (u.to(tl.float64) * LN_2 - log_total).to(tl.float32)
    log_prob = tl.where(log_prob > 0.0, 0.0, log_prob)  # the last bit of d; not minimum(), which would hide a NaN
    entropy = (log_total - (weighted / total).to(tl.float64) * LN_2).to(tl.float32)
    entropy = tl.where(entropy < 0.0, 0.0, entropy)
    normalizer = shift.to(tl.float64) + log_total * LOG2_E
    high = normalizer.to(tl.float32)
    low = (normalizer - high.to(tl.float64)).to(tl.float32)
    return log_prob, entropy, high, low


@triton.jit
def grad_coefficients(log_prob_grad, entropy_grad, entropy, low, scale, HAS_ENTROPY: tl.constexpr):
    """a, b, c of the row gradient dz_v = (a + c u_v) 2^u_v + b [v = y], with u_v = x_v log2(e) - high.

    From d lp / dx_v = [v = y] - p_v and dH / dx_v = -p_v (ln p_v + H), p_v = 2^(u_v - low); times 1 / tau.
    """
    inverse = scale * LN_2  # 1 / tau
    power = tl.exp2(-low)
    onehot = log_prob_grad * inverse
    softmax = -onehot * power
    slope = 0.0
    if HAS_ENTROPY:
        slope = -entropy_grad * inverse * LN_2 * power
        softmax = softmax - entropy_grad * inverse * (entropy - low * LN_2) * power
    return softmax, onehot, slope


@triton.jit
def softmax_grad(x, scale, high, softmax, slope, HAS_ENTROPY: tl.constexpr):
    """(a + c u) 2^u for a block."""
    u = tl.fma(x, scale, -high)
    if HAS_ENTROPY:
        return (softmax + slope * tl.maximum(u, TINY_LOG2)) * tl.exp2(u)
    return softmax * tl.exp2(u)


@triton.jit
def through_softcap(grad, x, softcap, HAS_SOFTCAP: tl.constexpr):
    """grad times d softcap(z) / dz = 1 - (softcap(z) / c)^2, from the capped value x; 0 at -inf."""
    if HAS_SOFTCAP:
        curve = x * (1.0 / softcap)
        return tl.where(x == float("-inf"), 0.0, grad * (1.0 - curve * curve))
    return grad
