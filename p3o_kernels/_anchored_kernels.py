"""Kernel K2 with an e for each sequence, or with a proximal policy as second anchor.

    sequences:    e_i = e of the token's sequence                                                   (1)
    two anchors:  e = min(e_b, e_prox), a pull of at most GATE is left out, and K is that of the log-ratio to
                  m_i = log((w_b exp(blp_i) + w_prox exp(prox_i)) / (w_b + w_prox)),  w = 1 - e     (2)

The rest is that of ``_token_kernels``: its terms of a token, its layout of programs and partial sums, to which the
loss kernels here add the sums of (1 - e_i) K_i and of e_i.
"""

import triton
import triton.language as tl

from p3o_kernels._finish_kernels import moments, overflowed
from p3o_kernels._math_kernels import (
    column_sums,
    ess_of_sums,
    load_block,
    load_valid,
    quarters,
    store_block,
    store_sum,
    whole,
)
from p3o_kernels._token_kernels import ratio_terms, store_token_sums, token_sequences, token_terms

GATE = tl.constexpr(1e-6)


@triton.jit(do_not_specialize=["num_tokens"])
def anchor_sums_kernel(
    log_probs_ptr, behavior_ptr, proximal_ptr, mask_ptr, partials_ptr, num_tokens: tl.int64,
    HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Two ratio_sums_kernel in one pass: of the ratios to b, and behind them of those to the proximal policy."""
    wide = tl.zeros([BLOCK // 4], tl.float64)
    count = tl.zeros([BLOCK // 4], tl.int32)
    total = (wide, wide, count, count)
    proximal_total = (wide, wide, count, count)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK).to(tl.int32), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        remaining = tl.minimum(num_tokens - start, BLOCK).to(tl.int32)
        log_probs = quarters(load_block(log_probs_ptr + start, remaining, BLOCK), BLOCK)
        behavior = quarters(load_block(behavior_ptr + start, remaining, BLOCK), BLOCK)
        proximal = quarters(load_block(proximal_ptr + start, remaining, BLOCK), BLOCK)
        valid = quarters(load_valid(mask_ptr + start, remaining, HAS_MASK, BLOCK), BLOCK)
        for k in tl.static_range(4):
            total = ratio_terms(total, log_probs[k], behavior[k], valid[k])
            proximal_total = ratio_terms(proximal_total, log_probs[k], proximal[k], valid[k])
    out = partials_ptr + tl.program_id(0) * 4
    for k in tl.static_range(4):
        store_sum(out + k, total[k])
        store_sum(out + tl.num_programs(0) * 4 + k, proximal_total[k])


@triton.jit
def _store_ess(out_ptr, stride, sum_ratio, sum_ratio_sq, count, invalid):
    """[S1, S2, N, invalid, e, N, mean of rho, standard deviation of rho], ``stride`` numbers apart."""
    invalid = invalid + overflowed(sum_ratio, sum_ratio_sq)
    mean, deviation = moments(sum_ratio, sum_ratio_sq, count)
    tl.store(out_ptr, sum_ratio)
    tl.store(out_ptr + stride, sum_ratio_sq)
    tl.store(out_ptr + 2 * stride, count)
    tl.store(out_ptr + 3 * stride, invalid)
    tl.store(out_ptr + 4 * stride, ess_of_sums(sum_ratio, sum_ratio_sq, count, invalid))
    tl.store(out_ptr + 5 * stride, count)
    tl.store(out_ptr + 6 * stride, mean)
    tl.store(out_ptr + 7 * stride, deviation)


@triton.jit(do_not_specialize=["num_partials", "field_distance", "distance"])
def join_sums_kernel(partials_ptr, out_ptr, num_partials, field_distance, distance, MAX_PROGRAMS: tl.constexpr):
    """What _store_ess stores, ``distance`` numbers from program to program, of the partial sums of an anchor or of a
    sequence that several programs walked.
    """
    own = partials_ptr + tl.program_id(0).to(tl.int64) * num_partials * 4
    sum_ratio, sum_ratio_sq, count, invalid = column_sums(own, num_partials, MAX_PROGRAMS)
    _store_ess(out_ptr + tl.program_id(0) * distance, field_distance, sum_ratio, sum_ratio_sq, count, invalid)


@triton.jit
def _load_anchored(
    log_probs_ptr, behavior_ptr, proximal_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, start, num_tokens,
    num_sequences, HAS_MASK: tl.constexpr, PER_SEQUENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What load_tokens loads, and prox; the search comes first, where it finds most registers free."""
    remaining = tl.minimum(num_tokens - start, BLOCK).to(tl.int32)
    if PER_SEQUENCE:
        sequence = token_sequences(cu_seqlens_ptr, start, num_tokens, num_sequences, BLOCK)
        advantages = tl.load(advantages_ptr + sequence)
    else:
        advantages = load_block(advantages_ptr + start, remaining, BLOCK)
    log_probs = load_block(log_probs_ptr + start, remaining, BLOCK)
    behavior = load_block(behavior_ptr + start, remaining, BLOCK)
    proximal = load_block(proximal_ptr + start, remaining, BLOCK)
    valid = load_valid(mask_ptr + start, remaining, HAS_MASK, BLOCK)
    log_probs, behavior, proximal = quarters(log_probs, BLOCK), quarters(behavior, BLOCK), quarters(proximal, BLOCK)
    return remaining, log_probs, behavior, proximal, quarters(advantages, BLOCK), quarters(valid, BLOCK)


@triton.jit
def _pull_of_anchors(behavior_ess, proximal_ess, ess):
    """The shares of b and of the proximal policy in the mixture (2), and the weight of the pull."""
    weights = (1.0 - behavior_ess) + (1.0 - proximal_ess)
    # an anchor of weight 0 drops out exactly, and without any pull the shares do not matter
    share = tl.where(weights > 0.0, (1.0 - behavior_ess) / tl.where(weights > 0.0, weights, 1.0), 0.5)
    proximal_share = tl.where(weights > 0.0, (1.0 - proximal_ess) / tl.where(weights > 0.0, weights, 1.0), 0.5)
    return share, proximal_share, tl.where(1.0 - ess <= GATE, 0.0, 1.0 - ess).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "kl_mode", "write_loss"])
def two_anchor_loss_kernel(
    log_probs_ptr, behavior_ptr, proximal_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, ess_ptr, proximal_ess_ptr,
    cap_ptr, grad_ptr, loss_ptr, partials_ptr, num_tokens: tl.int64, num_sequences, kl_mode, log_clip_low,
    log_clip_high, write_loss,
    HAS_MASK: tl.constexpr, PER_SEQUENCE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """g and the partial sums of this program's blocks, with both e given; the first program stores their minimum.

    Two sweeps, as in the general form of token_loss_kernel: all sums and a second exponential would not fit in 64
    registers, and the loads of the second hit the cache.
    """
    out = partials_ptr + tl.program_id(0) * COLUMNS
    behavior_ess, proximal_ess = tl.load(ess_ptr), tl.load(proximal_ess_ptr)
    # NaN - NaN and NaN - e are NaN: a bad anchor shows in everything
    ess = tl.minimum(behavior_ess, proximal_ess) + 0.0 * (behavior_ess - proximal_ess)
    if tl.program_id(0) == 0:
        tl.store(cap_ptr, ess)
    wide, narrow = tl.zeros([BLOCK // 4], tl.float64), tl.zeros([BLOCK // 4], tl.float32)
    count = tl.zeros([BLOCK // 4], tl.int32)
    total = (wide, wide, count, narrow, count, narrow, narrow, narrow, narrow)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK).to(tl.int32), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        _, log_probs, behavior, proximal, advantages, valid = _load_anchored(
            log_probs_ptr, behavior_ptr, proximal_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, start, num_tokens,
            num_sequences, HAS_MASK, PER_SEQUENCE, BLOCK,
        )  # fmt: skip
        for k in tl.static_range(4):
            total, _, _, _ = token_terms(
                total, log_probs[k], behavior[k], advantages[k], valid[k], ess, ess.to(tl.float32), 0.0,
                kl_mode, log_clip_low, log_clip_high, True, (proximal[k], 0.0, 0.0), True,
            )  # fmt: skip
    store_token_sums(out, total)
    tl.store(out + 12, ess * tl.sum((total[2] & 65535).to(tl.float64), 0))
    share, proximal_share, away = _pull_of_anchors(behavior_ess, proximal_ess, ess)
    pulls = narrow
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK).to(tl.int32), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        remaining, log_probs, behavior, proximal, advantages, valid = _load_anchored(
            log_probs_ptr, behavior_ptr, proximal_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, start, num_tokens,
            num_sequences, HAS_MASK, PER_SEQUENCE, BLOCK,
        )  # fmt: skip
        grad = ()
        loss = ()
        for k in tl.static_range(4):
            _, token_grad, token_loss, pull = token_terms(
                total, log_probs[k], behavior[k], advantages[k], valid[k], ess, ess.to(tl.float32), away,
                kl_mode, 0.0, 0.0, True, (proximal[k], share, proximal_share), True,
            )  # fmt: skip
            pulls += pull
            grad = grad + (token_grad,)
            loss = loss + (token_loss,)
        store_block(grad_ptr + start, whole(grad[0], grad[1], grad[2], grad[3], BLOCK), remaining, BLOCK)
        if write_loss:
            store_block(loss_ptr + start, whole(loss[0], loss[1], loss[2], loss[3], BLOCK), remaining, BLOCK)
    store_sum(out + 11, pulls)


@triton.jit(do_not_specialize=["num_tokens", "chunks"])
def sequence_sums_kernel(
    log_probs_ptr, behavior_ptr, mask_ptr, cu_seqlens_ptr, partials_ptr, out_ptr, num_tokens: tl.int64, chunks,
    HAS_MASK: tl.constexpr, IN_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """S1, S2, N and number of invalid tokens of one sequence, or of every ``chunks``-th block of it (IN_CHUNKS)."""
    sequence, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    # offsets that break the rules, which validate=True reports, must not lead outside the tensors
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence), 0).to(tl.int64), num_tokens)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64), begin), num_tokens)
    first = begin // 4 * 4  # where a 128-bit load may begin: up to three tokens of the sequence before
    wide = tl.zeros([BLOCK // 4], tl.float64)
    count = tl.zeros([BLOCK // 4], tl.int32)
    total = (wide, wide, count, count)
    for block in range(chunk, tl.cdiv(end - first, BLOCK).to(tl.int32), chunks):
        start = first + tl.cast(block, tl.int64) * BLOCK
        remaining = tl.minimum(end - start, BLOCK).to(tl.int32)
        own = tl.arange(0, BLOCK) >= (begin - start).to(tl.int32)
        log_probs = quarters(load_block(log_probs_ptr + start, remaining, BLOCK), BLOCK)
        behavior = quarters(load_block(behavior_ptr + start, remaining, BLOCK), BLOCK)
        valid = quarters(load_valid(mask_ptr + start, remaining, HAS_MASK, BLOCK) & own, BLOCK)
        for k in tl.static_range(4):
            total = ratio_terms(total, log_probs[k], behavior[k], valid[k])
    if IN_CHUNKS:
        for k in tl.static_range(4):
            store_sum(partials_ptr + tl.program_id(0) * 4 + k, total[k])
    else:
        _store_ess(
            out_ptr + sequence,
            tl.num_programs(0),
            tl.sum(total[0], 0),
            tl.sum(total[1], 0),
            tl.sum(total[2].to(tl.float64), 0),
            tl.sum(total[3].to(tl.float64), 0),
        )


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "kl_mode", "write_loss"])
def sequence_loss_kernel(
    log_probs_ptr, behavior_ptr, advantages_ptr, mask_ptr, cu_seqlens_ptr, ess_ptr, grad_ptr, loss_ptr, partials_ptr,
    num_tokens: tl.int64, num_sequences, kl_mode, log_clip_low, log_clip_high, write_loss,
    HAS_MASK: tl.constexpr, PER_SEQUENCE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """g and the partial sums of this program's blocks, with e of each sequence given."""
    wide, narrow = tl.zeros([BLOCK // 4], tl.float64), tl.zeros([BLOCK // 4], tl.float32)
    count = tl.zeros([BLOCK // 4], tl.int32)
    total = (wide, wide, count, narrow, count, narrow, narrow, narrow, narrow)
    pulls = narrow
    caps = narrow if PER_SEQUENCE else wide  # advantages that are looked up leave no register for a wide one
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK).to(tl.int32), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        remaining = tl.minimum(num_tokens - start, BLOCK).to(tl.int32)
        log_probs = quarters(load_block(log_probs_ptr + start, remaining, BLOCK), BLOCK)
        behavior = quarters(load_block(behavior_ptr + start, remaining, BLOCK), BLOCK)
        if not PER_SEQUENCE:
            advantages = quarters(load_block(advantages_ptr + start, remaining, BLOCK), BLOCK)
        valid = quarters(load_valid(mask_ptr + start, remaining, HAS_MASK, BLOCK), BLOCK)
        sequence = quarters(token_sequences(cu_seqlens_ptr, start, num_tokens, num_sequences, BLOCK), BLOCK)
        grad = ()
        loss = ()
        for k in tl.static_range(4):
            ess = tl.load(ess_ptr + sequence[k])
            if PER_SEQUENCE:
                advantage = tl.load(advantages_ptr + sequence[k])
            else:
                advantage = advantages[k]
            total, token_grad, token_loss, pull = token_terms(
                total, log_probs[k], behavior[k], advantage, valid[k], ess, ess.to(tl.float32),
                (1.0 - ess).to(tl.float32), kl_mode, log_clip_low, log_clip_high, True, (), False,
            )  # fmt: skip
            pulls += pull
            caps += tl.where(valid[k], ess, 0.0).to(caps.dtype)
            grad = grad + (token_grad,)
            loss = loss + (token_loss,)
        store_block(grad_ptr + start, whole(grad[0], grad[1], grad[2], grad[3], BLOCK), remaining, BLOCK)
        if write_loss:
            store_block(loss_ptr + start, whole(loss[0], loss[1], loss[2], loss[3], BLOCK), remaining, BLOCK)
    out = partials_ptr + tl.program_id(0) * COLUMNS
    store_token_sums(out, total)
    store_sum(out + 11, pulls)
    store_sum(out + 12, caps)
