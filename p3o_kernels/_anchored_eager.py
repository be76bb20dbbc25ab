"""The losses with an e for each sequence or with two anchors, in plain PyTorch: one chunk of tokens at a time.

    l_i = lp_i - blp_i      rho_i = exp(l_i)      a_i = lp_i - anchor_i
    L_i = - sg(min(rho_i, e_i)) lp_i A_i + w_i K(a_i)                                     (1)
    g_i = - min(rho_i, e_i) A_i + w_i K'(a_i)                                             (2)

    sequences:    e_i = e of the token's sequence, w_i = 1 - e_i, anchor_i = blp_i        (3)
    two anchors:  e = min(e_b, e_prox), w = 1 - e, or 0 where that is at most GATE,
                  anchor_i = log(((1 - e_b) exp(blp_i) + (1 - e_prox) exp(prox_i)) / (2 - e_b - e_prox))   (4)

l and a are float32, rho, the mixture and every sum float64, the rest float32. No autograd graph is built.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from p3o_kernels import _eager, _scalars
from p3o_kernels._inputs import LossOptions, TokenInputs, TokenLoss
from p3o_kernels._summary import EXP_LIMIT, EXPONENT_LIMIT, LOG_RATIO_MAX, LOG_RATIO_MIN

GATE = 1e-6  # two anchors: a pull of at most this weight is left out

_Anchors = tuple[Tensor | None, Tensor, Tensor, Tensor | None]


def sequence_sums(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[ANCHOR_SIZE, B] float64: S1, S2, N, invalid of each sequence, added in a fixed order, and its context."""
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
    return _scalars.with_context(torch.stack([*sums[:3], sums[3] + overflowed]))


def anchors(inputs: TokenInputs, proximal: Tensor) -> Tensor:
    """[2, ANCHOR_SIZE] float64 of b and of the proximal policy."""
    rows = [_eager.ratio_sums(inputs.log_probs, other, inputs.mask) for other in (inputs.behavior_log_probs, proximal)]
    return torch.stack([_scalars.with_context(row) for row in rows])


def sequence_loss(inputs: TokenInputs, options: LossOptions) -> TokenLoss:
    """``inputs.ess`` is [B]."""
    ess, cu_seqlens = inputs.ess, inputs.cu_seqlens
    assert ess is not None and cu_seqlens is not None  # an e for each sequence comes with their offsets

    def of_sequences(part: slice) -> _Anchors:
        cap = ess[_sequence_of(cu_seqlens, part)]
        return None, cap, 1.0 - cap, None

    return _loss(inputs, options, of_sequences)


def two_anchor_loss(
    inputs: TokenInputs, proximal: Tensor, proximal_ess: Tensor, options: LossOptions
) -> tuple[TokenLoss, Tensor]:
    """The loss and e []; ``inputs.ess`` is e_b."""
    assert inputs.ess is not None
    ess = torch.stack([inputs.ess, proximal_ess])
    result = _loss(inputs, options, lambda part: _two_anchors(inputs.behavior_log_probs[part], proximal[part], ess))
    return result, ess.amin()


def _loss(inputs: TokenInputs, options: LossOptions, anchors_of: Callable[[slice], _Anchors]) -> TokenLoss:
    log_probs, cu_seqlens = inputs.log_probs, inputs.cu_seqlens
    by_sequence = cu_seqlens if cu_seqlens is not None and inputs.advantages.numel() == cu_seqlens.numel() - 1 else None
    token_grad = torch.empty_like(log_probs)
    token_values = torch.empty_like(log_probs) if options.reduction == "none" else log_probs.new_empty(0)
    parts = []
    for part in _eager.chunks(log_probs):
        behavior = inputs.behavior_log_probs[part]
        advantages = inputs.advantages[part if by_sequence is None else _sequence_of(by_sequence, part)]
        valid = torch.ones_like(behavior, dtype=torch.bool) if inputs.mask is None else inputs.mask[part]
        terms = _terms(log_probs[part], behavior, advantages, valid, anchors_of(part), options)
        token_grad[part], values, sums = terms
        if options.reduction == "none":
            token_values[part] = values
        parts.append(sums)
    stacked = torch.stack(parts)
    loss, scale, metrics, count = _finish(inputs.divisor, options, stacked[:, :-1].sum(0), stacked[:, -1].amax()[None])
    return TokenLoss(token_values if options.reduction == "none" else loss, token_grad, scale, metrics, count)


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
