"""The token loss with a cap for each sequence or with two anchors: its gradient written out, as two operators.

    l_i = lp_i - blp_i      rho_i = exp(l_i)      a_i = lp_i - anchor_i
    L_i = - sg(min(rho_i, e_i)) lp_i A_i + w_i K(a_i)                                     (1)
    g_i = - min(rho_i, e_i) A_i + w_i K'(a_i)                                             (2)

    sequences:    e_i = e of the token's sequence, w_i = 1 - e_i, anchor_i = blp_i        (3)
    two anchors:  e = min(e_b, e_prox), w = 1 - e, or 0 where that is at most GATE,
                  anchor_i = log(((1 - e_b) exp(blp_i) + (1 - e_prox) exp(prox_i)) / (2 - e_b - e_prox))   (4)

l and a are float32, rho, the mixture and every sum float64, the rest float32. Plain PyTorch on every device, in chunks
of tokens; no autograd graph is built.
"""

from typing import Any

import torch
from torch import Tensor

from p3o_kernels import _eager, _scalars
from p3o_kernels._inputs import LossOptions
from p3o_kernels._summary import EXP_LIMIT, EXPONENT_LIMIT, LOG_RATIO_MAX, LOG_RATIO_MIN, NUM_METRICS

GATE = 1e-6  # two anchors: a pull of at most this weight is left out

_Anchors = tuple[Tensor | None, Tensor, Tensor, Tensor | None]


@torch.library.custom_op("p3o::sequence_sums", mutates_args=())
def sequence_sums(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[4, B] float64: S1, S2, N and the invalid count of each sequence, added in a fixed order."""
    log_ratio = log_probs - behavior_log_probs
    valid = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    usable = valid & _in_range(log_ratio)
    ratio = torch.where(usable, torch.where(usable, log_ratio, 0.0).double().exp(), 0.0)
    # offsets that break the rules, which validate=True reports, must not lead outside the tensors
    offsets = cu_seqlens.clamp(0, log_probs.numel()).cummax(0).values
    columns = [ratio, ratio.square(), valid.double(), (valid & ~usable).double()]
    # one column at a time: CUDA then reduces a sequence by a block of threads, not by one of them
    sums = [torch.segment_reduce(column, "sum", offsets=offsets, axis=0, unsafe=True) for column in columns]
    overflowed = ~(sums[0].isfinite() & sums[1].isfinite())
    return torch.stack([*sums[:3], sums[3] + overflowed])


@sequence_sums.register_fake
def _(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    return log_probs.new_empty((4, cu_seqlens.numel() - 1), dtype=torch.float64)


@torch.library.custom_op("p3o::anchored_loss", mutates_args=())
def anchored_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    proximal_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    ess: Tensor,
    divisor: Tensor | None,
    num_tokens: int,
    reduction: str,
    kl_mode: str,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, g, scale, the [16] vector of ``P3OMetrics`` and the count, as in ``TokenLoss``.

    ``ess`` is [B], one e for each sequence (3), or with ``proximal_log_probs`` [2], e_b and e_prox (4). ``advantages``
    are [T], or [B] with ``cu_seqlens``.
    """
    options = LossOptions(num_tokens, reduction, kl_mode, clip_low, clip_high, 0.0, 0.0)
    token_grad = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    token_values = torch.empty_like(token_grad) if reduction == "none" else token_grad.new_empty(0)
    tokens, parts = log_probs.numel(), []
    size = _eager.CUDA_CHUNK if log_probs.is_cuda else _eager.CPU_CHUNK
    for start in range(0, max(tokens, 1), size):
        part = slice(start, min(start + size, tokens))
        sequence = None if cu_seqlens is None else _sequence_of(cu_seqlens, part)
        behavior = behavior_log_probs[part]
        if proximal_log_probs is None:
            assert sequence is not None  # an e for each sequence comes with their offsets
            cap = ess[sequence]
            anchors: _Anchors = (None, cap, 1.0 - cap, None)
        else:
            anchors = _two_anchors(behavior, proximal_log_probs[part], ess)
        by_sequence = cu_seqlens is not None and advantages.numel() == cu_seqlens.numel() - 1
        given = advantages[sequence] if by_sequence else advantages[part]
        valid = torch.ones_like(behavior, dtype=torch.bool) if mask is None else mask[part]
        token_grad[part], values, sums = _terms(log_probs[part], behavior, given, valid, anchors, options)
        if reduction == "none":
            token_values[part] = values
        parts.append(sums)
    stacked = torch.stack(parts)
    loss, scale, metrics, count = _finish(divisor, options, stacked[:, :-1].sum(0), stacked[:, -1].amax()[None])
    return token_values if reduction == "none" else loss, token_grad, scale, metrics, count


@anchored_loss.register_fake
def _(log_probs: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    token_grad = log_probs.new_empty(log_probs.numel())
    loss = log_probs.new_empty(log_probs.numel() if arguments[8] == "none" else ())
    wide = log_probs.new_empty((), dtype=torch.float64)
    return loss, token_grad, wide, wide.new_empty(NUM_METRICS), wide.new_empty((), dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, token_grad, scale, metrics, count = output
    ctx.save_for_backward(token_grad, scale)
    ctx.mark_non_differentiable(token_grad, scale, metrics, count)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 13
    token_grad, scale = ctx.saved_tensors
    return token_grad * (scale.float() * grad_output), *(None,) * 12


anchored_loss.register_autograd(_backward, setup_context=_save)


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _count(condition: Tensor) -> Tensor:
    return condition.count_nonzero().double()


def _in_range(log_ratio: Tensor) -> Tensor:
    """Where rho^2 is a positive finite float64; False for NaN."""
    return (log_ratio < LOG_RATIO_MAX) & (log_ratio > LOG_RATIO_MIN)


def _sequence_of(cu_seqlens: Tensor, part: slice) -> Tensor:
    """The sequence of each token: the last one that starts at or before it, which skips empty ones."""
    token = torch.arange(part.start, part.stop, dtype=torch.int32, device=cu_seqlens.device)
    # the clamp keeps reads inside when cu_seqlens does not end at T, which validate=True reports
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True).clamp_max(cu_seqlens.numel() - 2)


def _two_anchors(behavior: Tensor, proximal: Tensor, ess: Tensor) -> _Anchors:
    """prox, e, w and the log-probability of the mixture (4), which lies between those of the two policies."""
    weights = 1.0 - ess
    total, away = weights.sum(), weights.amax()  # the larger weight is 1 - min(e_b, e_prox); NaN stays NaN
    shares = torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.5)
    shares = torch.where(weights.isnan().any(), torch.nan, shares).log()
    # log 0 is -inf: an anchor without weight drops out exactly
    mixture = torch.logaddexp(shares[0] + behavior.double(), shares[1] + proximal.double()).float()
    return proximal, ess.amin(), torch.where(away <= GATE, 0.0, away), mixture


def _k3(log_ratio: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """K and its safe derivative; ``ratio`` is the float64 exponential, so that 1 - 1 / ratio keeps the digits."""
    slope = (1.0 - ratio.reciprocal()).float().clamp(1.0 - EXP_LIMIT, 1.0 - 1.0 / EXP_LIMIT)
    return log_ratio - slope, slope


def _pull(anchor: Tensor, anchor_ratio: Tensor, ratio: Tensor, kl_mode: str) -> tuple[Tensor, Tensor]:
    """K(a) and K'(a). importance weighs by rho, because the behavior policy sampled the token, whatever the anchor."""
    if kl_mode == "importance":
        clamped = ratio.float().clamp(1.0 / EXP_LIMIT, EXP_LIMIT)
        slope = clamped * anchor
        return slope - clamped + 1.0, slope
    kl, slope = _k3(anchor, anchor_ratio)
    return kl, torch.where(anchor.abs() > EXPONENT_LIMIT, 1.0, slope) if kl_mode == "proxy" else slope


def _terms(
    log_probs: Tensor, behavior: Tensor, advantages: Tensor, valid: Tensor, anchors: _Anchors, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """g [n]; L [n], or [0] unless the reduction is "none"; and [16] float64: the sums of ``SUM_FIELDS`` and max |l|.

    Unusable tokens get l = A = 0 and rho = 0: they add an exact 0 to every sum.
    """
    proximal, cap, away, mixture = anchors
    log_ratio = log_probs - behavior
    usable = valid & _in_range(log_ratio) & advantages.isfinite()
    if proximal is not None:
        usable &= _in_range(log_probs - proximal)
    log_ratio = torch.where(usable, log_ratio, 0.0)
    raw = log_ratio.double().exp()
    ratio = torch.where(usable, raw, 0.0)
    kl, slope = _pull(log_ratio, raw, raw, options.kl_mode)
    behavior_kl = kl  # an exact 0 where l is 0 and rho 1
    if mixture is not None:
        anchor = torch.where(usable, log_probs - mixture, 0.0)
        kl, slope = _pull(anchor, anchor.double().exp(), raw, options.kl_mode)
    capped = torch.minimum(ratio, cap).float()
    weight = torch.where(usable, advantages, 0.0) * capped
    score = -(torch.where(usable, log_probs, 0.0) * weight)
    pull = away * kl.double()
    rejected = valid & ~usable
    unusable = torch.where(rejected, torch.nan, 0.0).float()
    grad = torch.where(usable, away.float() * slope - weight, unusable)
    values = grad.new_empty(0)
    if options.reduction == "none":
        values = torch.where(usable, score + pull.float(), unusable)
    low, high = options.log_clip_bounds()
    distance = log_ratio.abs()
    sums = [ratio.sum(), ratio.square().sum(), _count(valid), _count(rejected), _sum(distance), _count(ratio > cap)]
    sums += [_count((log_ratio < low) | (log_ratio > high)), *map(_sum, (capped, score, behavior_kl))]
    adaptive, zero = pull.sum(), pull.new_zeros(())
    weighted = torch.where(valid, cap, 0.0).sum()
    largest = distance.amax().double() if distance.numel() else zero
    return grad, values, torch.stack([*sums, zero, zero, adaptive, sums[8] + adaptive, weighted, largest])


def _finish(
    divisor: Tensor | None, options: LossOptions, sums: Tensor, largest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, scale, metrics and count: ``_scalars.finish`` of the total, which is formed already."""
    zero = torch.zeros_like(sums[:4])
    whole = torch.cat([sums[:4], zero, sums[13:14], zero])
    loss, scale, _, count = _scalars.finish(divisor, options, whole, torch.ones_like(sums[0]))
    ratio_part = _scalars.mark_overflow(sums[:4])
    total = torch.where(ratio_part[3] == 0, sums[13], torch.nan)
    return loss, scale, torch.cat([ratio_part, sums[4:13], total[None], sums[14:], largest]), count


def flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).float()


def flat_mask(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.reshape(-1)
