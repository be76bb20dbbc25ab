"""The token loss with its gradient written out, for PyTorch in eager mode: one chunk of tokens at a time.

Equations (1)-(5) as in ``_math_kernels`` and ``_token_kernels``, with the same precision: l is
float32, rho and the sums float64, the rest float32. No autograd graph is built.

Conditions are float32 0 or 1, written by the comparison itself, and int32 words 0 or -1: on a CPU a
bool costs three to ten times an arithmetic pass wherever it is made, selected with or summed.
``x & word`` keeps or clears a float whatever it holds, NaN included.
"""

import math

import torch
from torch import Tensor

from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._summary import EXP_LIMIT, EXPONENT_LIMIT, LOG_RATIO_MAX, LOG_RATIO_MIN


def _below(values: Tensor, bound: float | Tensor) -> Tensor:
    """1 where ``values`` < ``bound``, else 0, in the dtype of ``values``; NaN gives 0."""
    return torch.lt(values, bound, out=torch.empty_like(values))


def _above(values: Tensor, bound: float | Tensor) -> Tensor:
    return torch.gt(values, bound, out=torch.empty_like(values))


def _words(condition: Tensor) -> Tensor:
    return condition.to(torch.int32).neg_()


def _keep(values: Tensor, words: Tensor) -> Tensor:
    """``values`` where the word is -1, an exact 0 elsewhere."""
    return (values.view(torch.int32) & words).view(torch.float32)


def _valid(mask: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like) if mask is None else mask.view(torch.uint8).float()


def _log_ratio(log_probs: Tensor, behavior_log_probs: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """l, and 1 where the token is valid and rho^2 a positive finite float64; elsewhere l may be anything."""
    log_ratio = log_probs - behavior_log_probs
    usable = _below(log_ratio, LOG_RATIO_MAX).mul_(_above(log_ratio, LOG_RATIO_MIN)).mul_(valid)
    return log_ratio, usable


def _ratio(log_ratio: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """exp(l) in float64 for an l that is 0 where it is not usable, and the same with exact zeros there."""
    raw = log_ratio.double().exp_()
    return raw, raw * usable


def ratio_sums(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    """[S1, S2, N, invalid] float64."""
    valid = _valid(mask, log_probs)
    log_ratio, usable = _log_ratio(log_probs, behavior_log_probs, valid)
    _, ratio = _ratio(_keep(log_ratio, _words(usable)), usable)
    count = _count(valid)
    return torch.stack([ratio.sum(), (ratio * ratio).sum(), count, count - _count(usable)])


def _k3(log_ratio: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """K and its safe derivative; ``inverse`` is float64, so that 1 - inverse keeps the digits of small l."""
    slope = (1.0 - inverse).float().clamp(1.0 - EXP_LIMIT, 1.0 - 1.0 / EXP_LIMIT)
    return log_ratio - slope, slope


def _behavior_kl(log_ratio: Tensor, ratio: Tensor, kl_mode: str) -> tuple[Tensor, Tensor]:
    if kl_mode == "importance":
        clamped = ratio.float().clamp(1.0 / EXP_LIMIT, EXP_LIMIT)
        slope = clamped * log_ratio
        return slope - clamped + 1.0, slope
    kl, slope = _k3(log_ratio, ratio.reciprocal())
    if kl_mode == "proxy":  # the derivative of the clamped value: +1, away from the behavior policy, below l = -10
        slope = torch.where(log_ratio.abs() > EXPONENT_LIMIT, 1.0, slope)
    return kl, slope


def _finite_terms(inputs: TokenInputs, usable: Tensor) -> Tensor:
    usable = usable * _below(inputs.advantages.abs(), math.inf)
    if inputs.reference_log_probs is not None:
        usable *= _below((inputs.log_probs - inputs.reference_log_probs).abs_(), math.inf)
    return usable if inputs.entropy is None else usable.mul_(_below(inputs.entropy.abs(), math.inf))


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _count(condition: Tensor) -> Tensor:
    """float32 counts are exact below 2^24, which no chunk reaches, and need no conversion of [T]."""
    return condition.sum().double()


def token_terms(inputs: TokenInputs, options: LossOptions, ess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g [T]; L [T], or [0] unless the reduction is "none"; and [13] float64: sums 0 to 11 of ``_summary``, max |l|.

    Tokens that are not usable get l = lp = A = 0 and rho = 0: they add an exact 0 to every sum.
    """
    valid = _valid(inputs.mask, inputs.log_probs)
    log_ratio, usable = _log_ratio(inputs.log_probs, inputs.behavior_log_probs, valid)
    usable = _finite_terms(inputs, usable)
    words = _words(usable)
    log_ratio = _keep(log_ratio, words)
    raw_ratio, ratio = _ratio(log_ratio, usable)
    kl, kl_slope = _behavior_kl(log_ratio, raw_ratio, options.kl_mode)
    kl = kl * usable if options.kl_mode == "importance" else kl  # rounding: K(0) may be 1e-16, not 0
    capped = ratio.clamp_max(ess).float()
    away = (1.0 - ess).float()
    weight = _keep(inputs.advantages, words).mul_(capped)
    score = _keep(inputs.log_probs, words).mul_(weight).neg_()
    grad = (away * kl_slope).sub_(weight)
    loss = score + away * kl if options.reduction == "none" else score.new_empty(0)
    grad, loss, optional_sums = _optional_terms(inputs, options, words, grad, loss)
    rejected = valid - usable
    rejected_words = _words(rejected)
    grad = (grad.view(torch.int32) | rejected_words).view(torch.float32)  # all bits set: NaN
    if options.reduction == "none":
        loss = (loss.view(torch.int32) | rejected_words).view(torch.float32)
    distance = log_ratio.abs()
    low, high = options.log_clip_bounds()
    clipped = _below(log_ratio, low).add_(_above(log_ratio, high))
    largest = distance.amax() if distance.numel() else distance.new_zeros(())
    sums = [ratio.sum(), (ratio * ratio).sum(), _count(valid), _count(rejected), _sum(distance)]
    sums += [
        _count(_above(ratio, ess)),
        _count(clipped),
        *map(_sum, (capped, score, kl)),
        *optional_sums,
        largest.double(),
    ]
    return grad, loss, torch.stack(sums)


def _optional_terms(
    inputs: TokenInputs, options: LossOptions, words: Tensor, grad: Tensor, loss: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The reference and entropy terms; their KL always has the safe gradient."""
    sums = [grad.new_zeros((), dtype=torch.float64)] * 2
    if inputs.reference_log_probs is not None:
        log_ratio = _keep(inputs.log_probs - inputs.reference_log_probs, words)
        kl, slope = _k3(log_ratio, log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).double().neg_().exp_())
        grad = grad + options.reference_coef * slope
        sums[0] = _sum(kl)
        loss = loss + options.reference_coef * kl if options.reduction == "none" else loss
    if inputs.entropy is not None:
        entropy = _keep(inputs.entropy, words)
        sums[1] = _sum(entropy)
        loss = loss - options.entropy_coef * entropy if options.reduction == "none" else loss
    return grad, loss, sums
