"""Pieces that the token kernels share: block loads, the float64 exp pair, K, e and the order-fixed sums.

    l = lp - blp                    rho = exp(l)                                                   (1)
    e = clamp((S1 / N) * (S1 / (S2 + 1e-8)), 0, 1),  S1 = sum rho, S2 = sum rho^2, N = count       (2)
    K = l + exp(clamp(-l, -10, 10)) - 1                                                            (3)

Precision: l is float32; rho, 1 / rho, S1, S2, N and e are float64; what follows (K, L, g) is
float32 arithmetic on correctly rounded inputs, summed per thread in float32 over a few dozen tokens
and across threads in float64.
"""

import triton
import triton.language as tl

BLOCK = 4096  # four consecutive tokens, 16 bytes of float32, for each of 1024 threads
MAX_PROGRAMS = 512
COLUMNS = 16  # partial sums that one program of the loss kernel writes

KL_PROXY = tl.constexpr(0)
KL_PROXY_SAFE = tl.constexpr(1)
KL_IMPORTANCE = tl.constexpr(2)
EXP_10 = tl.constexpr(22026.465794806718)
EXP_MINUS_10 = tl.constexpr(4.5399929762484854e-05)
ONE_MINUS_EXP_10 = tl.constexpr(-22025.465794806718)
ONE_MINUS_EXP_MINUS_10 = tl.constexpr(0.9999546000702375)
# 1 / (n! 4^n), the upper 32 bits
EVEN_8 = tl.constexpr(3.7844216649318696e-10)
EVEN_6 = tl.constexpr(3.390841811778955e-07)
ODD_7 = tl.constexpr(1.2110149327781983e-08)
ODD_5 = tl.constexpr(8.138020348269492e-06)
SQRT_HALF_BITS = tl.constexpr(0x3FE6A09E00000000)
# ln 2 in two parts: the first has 14 bits, so that its product with an exponent is exact
LN2_HIGH = tl.constexpr(0.693145751953125)
LN2_LOW = tl.constexpr(1.428606765330187e-06)


@triton.jit
def load_block(block_ptr, remaining, BLOCK: tl.constexpr):
    """One block; whole blocks take 128-bit loads whatever T is, only the tail is masked per token."""
    column = tl.arange(0, BLOCK)
    if remaining >= BLOCK:
        values = tl.load(block_ptr + column)
    else:
        values = tl.load(block_ptr + column, mask=column < remaining, other=0)
    return values


@triton.jit
def store_block(block_ptr, values, remaining, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    if remaining >= BLOCK:
        tl.store(block_ptr + column, values)
    else:
        tl.store(block_ptr + column, values, mask=column < remaining)


@triton.jit
def load_valid(mask_ptr, remaining, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    if HAS_MASK:
        return load_block(mask_ptr, remaining, BLOCK) != 0  # the tail loads 0
    return tl.arange(0, BLOCK) < remaining


@triton.jit
def quarters(x, BLOCK: tl.constexpr):
    """[BLOCK] -> four [BLOCK / 4]: the first, second, third and fourth of the tokens that a thread owns.

    Working on one quarter at a time keeps one token's float64 temporaries in registers instead of four tokens'.
    """
    even, odd = tl.split(tl.reshape(x, [BLOCK // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def whole(first, second, third, fourth, BLOCK: tl.constexpr):
    """The inverse of quarters."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [BLOCK])


@triton.jit
def exp_pair(x):
    """exp(x) and exp(-x) in float64 for |x| <= 400, relative error below 1e-13.

    x = k ln2 + r, |r| <= 0.35; exp(+-r / 4) = E +- O from one even and one odd Taylor polynomial, squared twice;
    2^k goes straight into the exponent bits. Both together cost what one libdevice exp costs. Coefficients whose
    rounding does not show are cut to 32 bits: they travel inside the instruction instead of in two registers.
    """
    x = x.to(tl.float64)
    shifted = x * 1.4426946640014648 + 6755399441055744.0  # 1.5 * 2^52: rounds to an integer in the low bits
    power = shifted.to(tl.int64, bitcast=True) << 52
    r = (shifted - 6755399441055744.0) * -0.6931471805599453 + x
    s = r * r
    even = (((s * EVEN_8 + EVEN_6) * s + 1.6276041666666666e-04) * s + 0.03125) * s + 1.0
    odd = (((s * ODD_7 + ODD_5) * s + 2.6041666666666665e-03) * s + 0.25) * r
    up = even + odd
    down = even - odd
    up = up * up
    down = down * down
    up = (up * up).to(tl.int64, bitcast=True) + power
    down = (down * down).to(tl.int64, bitcast=True) - power
    return up.to(tl.float64, bitcast=True), down.to(tl.float64, bitcast=True)


@triton.jit
def log_rounded(x):
    """log(x) in float32 of a positive normal float64; relative error below 4e-7 also next to 1, where it is 0.

    x = 2^k m, 0.7 < m < 1.42; log m = 2 artanh(s) with s = (m - 1) / (m + 1) from its odd series: |s| < 0.1716.
    """
    bits = x.to(tl.int64, bitcast=True)
    power = (bits - SQRT_HALF_BITS) >> 52
    m = (bits - (power << 52)).to(tl.float64, bitcast=True)
    # m - 1 is exact, so the digits of a small logarithm are all there before the rounding
    s = (m - 1.0).to(tl.float32) / (m + 1.0).to(tl.float32)
    square = s * s
    series = ((square * 0.22222222 + 0.28571429) * square + 0.4) * square + 0.66666667
    k = power.to(tl.float32)
    return k * LN2_HIGH + (k * LN2_LOW + (series * square * s + 2.0 * s))


@triton.jit
def usable_log_ratio(log_probs, behavior, valid):
    """l of (1) and which tokens are usable: valid, and rho^2 is a finite float64 above 0 (NaN fails both)."""
    # select before exp: whatever is parked in a masked slot must not reach any arithmetic
    log_ratio = tl.where(valid, log_probs - behavior, 0.0)
    usable = valid & (log_ratio < 354.891) & (log_ratio > -372.566)
    return log_ratio, usable


@triton.jit
def ess_of_sums(sum_ratio, sum_ratio_sq, num_tokens, invalid):
    """(2); 1 without tokens, NaN (never 1) on invalid data. This grouping cannot overflow."""
    count = tl.where(num_tokens == 0.0, 1.0, num_tokens)
    ess = (sum_ratio / count) * (sum_ratio / (sum_ratio_sq + 1e-8))
    ess = tl.where(num_tokens == 0.0, 1.0, tl.minimum(tl.maximum(ess, 0.0), 1.0))
    usable = (invalid == 0.0) & (sum_ratio < float("inf")) & (sum_ratio_sq < float("inf"))
    return tl.where(usable, ess, float("nan"))


@triton.jit
def column_sums(partials_ptr, num_partials, MAX_PROGRAMS: tl.constexpr):
    """Sums over programs of a [programs, 4] scratch, in an order that depends on MAX_PROGRAMS alone."""
    row = tl.arange(0, MAX_PROGRAMS)[:, None]
    column = tl.arange(0, 4)[None, :]
    part = tl.load(partials_ptr + row * 4 + column, mask=row < num_partials, other=0.0)
    sums = tl.sum(part, 0)
    even, odd = tl.split(tl.reshape(sums, [2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def store_sum(ptr, values):
    tl.store(ptr, tl.sum(values.to(tl.float64), 0))


@triton.jit
def k3(log_ratio, inverse, kl_mode):
    """(3) and its derivative in float32; 1 - 1 / rho is still float64, so small l lose no digits to it."""
    slope = (1.0 - inverse).to(tl.float32)
    slope = tl.minimum(tl.maximum(slope, ONE_MINUS_EXP_10), ONE_MINUS_EXP_MINUS_10)
    kl = log_ratio - slope
    if kl_mode == KL_PROXY:  # the derivative of the clamped value: +1, away from the behavior policy, below l = -10
        slope = tl.where(tl.abs(log_ratio) > 10.0, 1.0, slope)
    return kl, slope
