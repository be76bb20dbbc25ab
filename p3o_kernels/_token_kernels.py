"""Kernel K2, the passes over [T] tokens: ratio sums, token loss with its gradient, and the backward scaling.

    L_i = -min(rho_i, e) * lp_i * A_i + (1 - e) * K_i - c_H * H_i + c_ref * K(lp_i - ref_i)         (4)
    g_i = dL_i / dlp_i = -min(rho_i, e) * A_i + (1 - e) * K'_i + c_ref * K'(lp_i - ref_i)           (5)

with l, rho, e and K of ``_math_kernels`` (1)-(3). Layout: T packed tokens, B sequences; at most
MAX_PROGRAMS programs stride over blocks of BLOCK tokens. Every program writes its partial sums to
its own row of a scratch and the next launch adds the rows, so results are the same bits run after
run and there are no atomics.

A token is usable when it is valid (mask) and l, rho, rho^2, A, ref and H are finite and rho^2 > 0.
Valid tokens that are not usable are counted; their g and L are NaN.
"""

import triton
import triton.language as tl

from p3o_kernels._math_kernels import (
    EXP_10,
    EXP_MINUS_10,
    KL_IMPORTANCE,
    KL_PROXY_SAFE,
    column_sums,
    ess_of_sums,
    exp_pair,
    k3,
    load_block,
    load_valid,
    log_rounded,
    quarters,
    store_block,
    store_sum,
    usable_log_ratio,
    whole,
)


@triton.jit
def ratio_terms(total, log_probs, behavior, valid):
    """``total`` with S1, S2, N and the number of invalid tokens of one token per thread."""
    log_ratio, usable = usable_log_ratio(log_probs, behavior, valid)
    ratio, _ = exp_pair(tl.where(usable, log_ratio, 0.0))
    ratio = tl.where(usable, ratio, 0.0)
    return (
        total[0] + ratio,
        total[1] + ratio * ratio,
        total[2] + valid.to(tl.int32),
        total[3] + (valid & (usable == 0)).to(tl.int32),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def ratio_sums_kernel(
    log_probs_ptr, behavior_ptr, mask_ptr, partials_ptr, num_tokens: tl.int64,
    HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial S1, S2, N and number of invalid tokens of this program's blocks."""
    wide = tl.zeros([BLOCK // 4], tl.float64)
    count = tl.zeros([BLOCK // 4], tl.int32)
    total = (wide, wide, count, count)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK).to(tl.int32), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        remaining = tl.minimum(num_tokens - start, BLOCK).to(tl.int32)
        log_probs = quarters(load_block(log_probs_ptr + start, remaining, BLOCK), BLOCK)
        behavior = quarters(load_block(behavior_ptr + start, remaining, BLOCK), BLOCK)
        valid = quarters(load_valid(mask_ptr + start, remaining, HAS_MASK, BLOCK), BLOCK)
        for k in tl.static_range(4):
            total = ratio_terms(total, log_probs[k], behavior[k], valid[k])
    for k in tl.static_range(4):
        store_sum(partials_ptr + tl.program_id(0) * 4 + k, total[k])


@triton.jit
def sequence_of(cu_seqlens_ptr, token, num_sequences):
    """Index of the last sequence that starts at or before ``token`` (a scalar)."""
    low = 0
    width = num_sequences - 1
    while width > 0:
        half = (width + 1) // 2
        probe = tl.minimum(low + half, num_sequences - 1)
        low = tl.where(tl.load(cu_seqlens_ptr + probe) <= token, probe, low)
        width -= half
    return low


@triton.jit
def token_sequences(cu_seqlens_ptr, start, num_tokens, num_sequences, BLOCK: tl.constexpr):
    """Index of the sequence of each token of a block; beyond T it repeats the last one.

    The first and last token bound the search, so a block inside one sequence skips it.
    """
    start = start.to(tl.int32)  # cu_seqlens is int32, so T < 2^31
    token = start + tl.arange(0, BLOCK)
    end = tl.minimum(start.to(tl.int64) + BLOCK, num_tokens).to(tl.int32)
    first = sequence_of(cu_seqlens_ptr, start, num_sequences)
    last = sequence_of(cu_seqlens_ptr, end - 1, num_sequences)
    sequence = tl.zeros([BLOCK], tl.int32) + first
    width = last - first
    while width > 0:
        half = (width + 1) // 2
        probe = tl.minimum(sequence + half, last)
        sequence = tl.where(tl.load(cu_seqlens_ptr + probe) <= token, probe, sequence)
        width -= half
    return sequence


@triton.jit
def _load_tokens(
    log_probs_ptr, behavior_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, start, num_tokens, num_sequences,
    HAS_MASK: tl.constexpr, PER_SEQUENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    remaining = tl.minimum(num_tokens - start, BLOCK).to(tl.int32)
    log_probs = load_block(log_probs_ptr + start, remaining, BLOCK)
    behavior = load_block(behavior_ptr + start, remaining, BLOCK)
    if PER_SEQUENCE:
        # looked up, so that there is no [T] tensor of them in memory
        sequence = token_sequences(cu_seqlens_ptr, start, num_tokens, num_sequences, BLOCK)
        advantages = tl.load(advantages_ptr + sequence)
    else:
        advantages = load_block(advantages_ptr + start, remaining, BLOCK)
    valid = load_valid(mask_ptr + start, remaining, HAS_MASK, BLOCK)
    log_probs, behavior = quarters(log_probs, BLOCK), quarters(behavior, BLOCK)
    return remaining, log_probs, behavior, quarters(advantages, BLOCK), quarters(valid, BLOCK)


@triton.jit
def sampled_kl(log_ratio, inverse, ratio, usable, kl_mode, GENERAL: tl.constexpr):
    """K and K' of ``log_ratio`` = -log ``inverse``; importance weighs by rho, because b sampled the token."""
    kl, slope = k3(log_ratio, inverse, kl_mode if GENERAL else KL_PROXY_SAFE)
    if GENERAL:
        if kl_mode == KL_IMPORTANCE:
            clamped = tl.minimum(tl.maximum(ratio.to(tl.float32), EXP_MINUS_10), EXP_10)
            slope = clamped * log_ratio
            kl = tl.where(usable, slope - clamped + 1.0, 0.0)
    return kl, slope


@triton.jit
def token_terms(
    total, log_probs, behavior, advantages, valid, ess, narrow_ess, away, kl_mode, log_clip_low, log_clip_high,
    GENERAL: tl.constexpr, mixture, TWO_ANCHORS: tl.constexpr,
):  # fmt: skip
    """(4) and (5) without the optional terms for one token per thread: sums, g, L and (1 - e) K.

    Unusable tokens get l = lp = A = 0 and rho = 0 up front: every sum then grows by an exact 0. With TWO_ANCHORS
    ``mixture`` is prox and the shares of both policies, and K is that of the log-ratio to the mixture:

        exp(m - lp) = share / rho + share_prox / rho_prox
    """
    log_ratio, usable = usable_log_ratio(log_probs, behavior, valid)
    if TWO_ANCHORS:
        proximal_ratio, near = usable_log_ratio(log_probs, mixture[0], valid)
        usable = usable & near
    usable = usable & (tl.abs(advantages) < float("inf"))
    log_ratio = tl.where(usable, log_ratio, 0.0)
    advantages = tl.where(usable, advantages, 0.0)
    ratio, inverse = exp_pair(log_ratio)
    ratio = tl.where(usable, ratio, 0.0)
    over = ratio > ess
    capped = tl.where(over, narrow_ess, ratio.to(tl.float32))
    kl, slope = sampled_kl(log_ratio, inverse, ratio, usable, kl_mode, GENERAL)
    pulled = kl
    if TWO_ANCHORS:
        _, proximal_inverse = exp_pair(tl.where(usable, proximal_ratio, 0.0))
        # the shares add up to 1 but for a rounding, and an unusable token must add nothing at all
        inverse = tl.where(usable, mixture[1] * inverse + mixture[2] * proximal_inverse, 1.0)
        pulled, slope = sampled_kl(-log_rounded(inverse), inverse, ratio, usable, kl_mode, GENERAL)
    grad = away * slope - capped * advantages
    score = -(capped * advantages) * tl.where(usable, log_probs, 0.0)
    pull = away * pulled
    loss = score + pull
    rejected = valid & (usable == 0)
    clipped = (log_ratio < log_clip_low) | (log_ratio > log_clip_high)  # never where l was set to 0
    total = (
        total[0] + ratio,
        total[1] + ratio * ratio,
        # two counts in one register: a thread sees T / 2^19 tokens, far below 2^16
        total[2] + valid.to(tl.int32) + (rejected.to(tl.int32) << 16),
        total[3] + tl.abs(log_ratio),
        total[4] + over.to(tl.int32) + (clipped.to(tl.int32) << 16),
        total[5] + capped,
        total[6] + score,
        total[7] + kl,
        tl.maximum(total[8], tl.abs(log_ratio)),
    )
    return total, tl.where(rejected, float("nan"), grad), tl.where(rejected, float("nan"), loss), pull


@triton.jit
def optional_terms(total, log_probs, valid, reference, entropy, grad, loss, entropy_coef, reference_coef):
    """Adds the optional terms of (4) and (5) to one token per thread; their KL always has the safe gradient."""
    fresh = grad == grad  # tokens rejected before have g = NaN and are counted already
    log_ratio = tl.where(valid, log_probs - reference, 0.0)
    entropy = tl.where(valid, entropy, 0.0)
    usable = fresh & (tl.abs(log_ratio) < float("inf")) & (tl.abs(entropy) < float("inf"))
    log_ratio = tl.where(usable, log_ratio, 0.0)
    entropy = tl.where(usable, entropy, 0.0)
    _, inverse = exp_pair(tl.minimum(tl.maximum(log_ratio, -10.0), 10.0))
    kl, kl_slope = k3(log_ratio, inverse, KL_PROXY_SAFE)
    total = (total[0] + kl, total[1] + entropy, total[2] + (fresh & (usable == 0)).to(tl.int32))
    grad = tl.where(usable, grad + reference_coef * kl_slope, float("nan"))
    loss = tl.where(usable, loss + reference_coef * kl - entropy_coef * entropy, float("nan"))
    return total, grad, loss


@triton.jit
def store_token_sums(out, total):
    """The columns of the loss kernel's scratch that every variant writes; column 10 is a maximum."""
    store_sum(out, total[0])
    store_sum(out + 1, total[1])
    store_sum(out + 2, total[2] & 65535)
    store_sum(out + 3, total[2] >> 16)
    store_sum(out + 4, total[3])
    store_sum(out + 5, total[4] & 65535)
    store_sum(out + 6, total[4] >> 16)
    store_sum(out + 7, total[5])
    store_sum(out + 8, total[6])
    store_sum(out + 9, total[7])
    tl.store(out + 10, tl.max(total[8], 0).to(tl.float64))


@triton.jit
def _general_sweep(
    total, log_probs_ptr, behavior_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, reference_ptr, entropy_ptr,
    grad_ptr, loss_ptr, out, num_tokens, num_sequences, ess, narrow_ess, away, kl_mode, entropy_coef, reference_coef,
    has_entropy, write_loss, HAS_MASK: tl.constexpr, PER_SEQUENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The second sweep of the general variant: g, L and the sums of the optional terms.

    A sweep of its own, because all sums at once would not fit in 64 registers; its loads hit the cache.
    """
    narrow = tl.zeros([BLOCK // 4], tl.float32)
    more = (narrow, narrow, tl.zeros([BLOCK // 4], tl.int32))
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK).to(tl.int32), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        remaining, log_probs, behavior, advantages, valid = _load_tokens(
            log_probs_ptr, behavior_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, start, num_tokens, num_sequences,
            HAS_MASK, PER_SEQUENCE, BLOCK,
        )  # fmt: skip
        reference = quarters(load_block(reference_ptr + start, remaining, BLOCK), BLOCK)
        # nothing remains to be loaded of a tensor that is not there: the masked load gives zeros
        entropy = quarters(load_block(entropy_ptr + start, remaining * has_entropy, BLOCK), BLOCK)
        grad = ()
        loss = ()
        for k in tl.static_range(4):
            _, token_grad, token_loss, _ = token_terms(
                total,
                log_probs[k],
                behavior[k],
                advantages[k],
                valid[k],
                ess,
                narrow_ess,
                away,
                kl_mode,
                0.0,
                0.0,
                True,
                (),
                False,
            )
            more, token_grad, token_loss = optional_terms(
                more, log_probs[k], valid[k], reference[k], entropy[k], token_grad, token_loss,
                entropy_coef, reference_coef,
            )  # fmt: skip
            grad = grad + (token_grad,)
            loss = loss + (token_loss,)
        store_block(grad_ptr + start, whole(grad[0], grad[1], grad[2], grad[3], BLOCK), remaining, BLOCK)
        if write_loss:
            store_block(loss_ptr + start, whole(loss[0], loss[1], loss[2], loss[3], BLOCK), remaining, BLOCK)
    for k in tl.static_range(3):
        store_sum(out + 11 + k, more[k])


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "num_partials", "kl_mode", "has_entropy", "write_loss"])
def token_loss_kernel(
    log_probs_ptr, behavior_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, reference_ptr, entropy_ptr,
    ess_ptr, ratio_partials_ptr, grad_ptr, loss_ptr, partials_ptr, num_tokens: tl.int64, num_sequences, num_partials,
    kl_mode, log_clip_low, log_clip_high, entropy_coef, reference_coef, has_entropy, write_loss,
    HAS_MASK: tl.constexpr, PER_SEQUENCE: tl.constexpr, HAS_CONTEXT: tl.constexpr, GENERAL: tl.constexpr,
    BLOCK: tl.constexpr, MAX_PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """g and the partial sums of this program's blocks, with e given (HAS_CONTEXT) or from ratio_sums_kernel.

    GENERAL adds the reference and entropy terms, the other KL modes and the per-token loss.
    """
    if HAS_CONTEXT:
        ess = tl.load(ess_ptr)
    else:
        sum_ratio, sum_ratio_sq, count, invalid = column_sums(ratio_partials_ptr, num_partials, MAX_PROGRAMS)
        ess = ess_of_sums(sum_ratio, sum_ratio_sq, count, invalid)
        if tl.program_id(0) == 0:
            tl.store(ess_ptr, ess)
    narrow_ess, away = ess.to(tl.float32), (1.0 - ess).to(tl.float32)
    wide, narrow = tl.zeros([BLOCK // 4], tl.float64), tl.zeros([BLOCK // 4], tl.float32)
    count = tl.zeros([BLOCK // 4], tl.int32)
    total = (wide, wide, count, narrow, count, narrow, narrow, narrow, narrow)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK).to(tl.int32), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        remaining, log_probs, behavior, advantages, valid = _load_tokens(
            log_probs_ptr, behavior_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, start, num_tokens, num_sequences,
            HAS_MASK, PER_SEQUENCE, BLOCK,
        )  # fmt: skip
        grad = ()
        for k in tl.static_range(4):
            total, token_grad, _, _ = token_terms(
                total, log_probs[k], behavior[k], advantages[k], valid[k], ess, narrow_ess, away,
                kl_mode, log_clip_low, log_clip_high, GENERAL, (), False,
            )  # fmt: skip
            grad = grad + (token_grad,)
        if not GENERAL:
            store_block(grad_ptr + start, whole(grad[0], grad[1], grad[2], grad[3], BLOCK), remaining, BLOCK)
    out = partials_ptr + tl.program_id(0) * COLUMNS
    store_token_sums(out, total)
    if GENERAL:
        _general_sweep(
            total, log_probs_ptr, behavior_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, reference_ptr, entropy_ptr,
            grad_ptr, loss_ptr, out, num_tokens, num_sequences, ess, narrow_ess, away, kl_mode,
            entropy_coef, reference_coef, has_entropy, write_loss, HAS_MASK, PER_SEQUENCE, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def scale_grad_kernel(
    token_grad_ptr, mask_ptr, scale_ptr, grad_output_ptr, log_probs_grad_ptr, entropy_grad_ptr,
    num_tokens: tl.int64, entropy_coef,
    PER_TOKEN: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Backward: g * scale * grad_output, and -c_H * scale * grad_output on valid tokens for the entropy."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    remaining = tl.minimum(num_tokens - start, BLOCK).to(tl.int32)
    scale = tl.load(scale_ptr).to(tl.float32)
    if PER_TOKEN:
        scale = scale * load_block(grad_output_ptr + start, remaining, BLOCK)
    else:
        scale = scale * tl.load(grad_output_ptr)
    grad = load_block(token_grad_ptr + start, remaining, BLOCK) * scale
    store_block(log_probs_grad_ptr + start, grad, remaining, BLOCK)
    if HAS_ENTROPY:
        valid = load_valid(mask_ptr + start, remaining, HAS_MASK, BLOCK)
        entropy_grad = tl.where(valid, -entropy_coef * scale, 0.0)
        store_block(entropy_grad_ptr + start, entropy_grad, remaining, BLOCK)
