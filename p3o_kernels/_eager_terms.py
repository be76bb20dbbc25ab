"""The token loss with its gradient written out, for PyTorch in eager mode: one chunk of tokens at a time.

Equations (1)-(5) as in ``_math_kernels`` and ``_token_kernels``, with the same precision: l is
float32, rho and the sums float64, the rest float32. No autograd graph is built.

Conditions are int32 words, -1 for true and 0 for false, not bools: on a CPU a comparison, a
``where`` and a sum of bools cost three to ten times an arithmetic pass each. ``x & word`` keeps or
clears a float whatever it holds, NaN included.
"""

import torch
from torch import Tensor

from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._summary import EXP_LIMIT, EXPONENT_LIMIT, LOG_RATIO_MAX, LOG_RATIO_MIN

_LARGEST = torch.finfo(torch.float32).max
_INF = float("inf")


def _keep(values: Tensor, words: Tensor) -> Tensor:
    """``values`` where the word is -1, an exact 0 elsewhere."""
    return (values.view(torch.int32) & words).view(torch.float32)


def _negative(values: Tensor) -> Tensor:
    """Words: -1 where float32 ``values`` are negative, taken from the sign bit. NaN must be gone."""
    return values.view(torch.int32) >> 31


def _finite(values: Tensor) -> Tensor:
    """Words: -1 where float32 ``values`` are finite."""
    return _negative(values.nan_to_num(_INF, _INF, -_INF).abs() - _LARGEST)


def _valid_words(mask: Tensor | None, like: Tensor) -> Tensor:
    if mask is None:
        return torch.full_like(like, -1, dtype=torch.int32)
    return mask.view(torch.uint8).to(torch.int32).neg()


def _count(words: Tensor) -> Tensor:
    return words.sum(dtype=torch.int64).neg()


def _log_ratio(log_probs: Tensor, behavior_log_probs: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """l, 0 where it must not be used, and words: rho^2 is a positive finite float64 on a valid token."""
    log_ratio = _keep(log_probs - behavior_log_probs, valid).nan_to_num(_INF, _INF, -_INF)
    usable = _negative(log_ratio - LOG_RATIO_MAX) & _negative(LOG_RATIO_MIN - log_ratio) & valid
    return _keep(log_ratio, usable), usable


def _keep_wide(values: Tensor, words: Tensor) -> Tensor:
    return (values.view(torch.int64) & words.to(torch.int64)).view(torch.float64)


def ratio_sums(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    """[S1, S2, N, invalid] float64."""
    valid = _valid_words(mask, log_probs)
    log_ratio, usable = _log_ratio(log_probs, behavior_log_probs, valid)
    ratio = _keep_wide(log_ratio.double().exp_(), usable)
    count = _count(valid)
    return torch.stack([ratio.sum(), ratio.square().sum(), count.double(), (count - _count(usable)).double()])


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
    usable = usable & _finite(inputs.advantages)
    if inputs.reference_log_probs is not None:
        usable = usable & _finite(inputs.log_probs - inputs.reference_log_probs)
    return usable if inputs.entropy is None else usable & _finite(inputs.entropy)


def _wide_sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def token_terms(inputs: TokenInputs, options: LossOptions, ess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g [T]; L [T], or [0] unless the reduction is "none"; and [13] float64: sums 0 to 11 of ``_summary``, max |l|.

    Tokens that are not usable get l = lp = A = 0 and rho = 0: they add an exact 0 to every sum.
    """
    valid = _valid_words(inputs.mask, inputs.log_probs)
    log_ratio, usable = _log_ratio(inputs.log_probs, inputs.behavior_log_probs, valid)
    usable = _finite_terms(inputs, usable)
    log_ratio = _keep(log_ratio, usable)
    ratio = log_ratio.double().exp_()
    kl, kl_slope = _behavior_kl(log_ratio, ratio, options.kl_mode)
    kl = _keep(kl, usable) if options.kl_mode == "importance" else kl  # rounding: K(0) may be 1e-16, not 0
    ratio = _keep_wide(ratio, usable)
    capped = ratio.clamp_max(ess).float()
    away = (1.0 - ess).float()
    weight = _keep(inputs.advantages, usable) * capped
    score = -weight * _keep(inputs.log_probs, usable)
    grad = away * kl_slope - weight
    loss = score + away * kl if options.reduction == "none" else score.new_empty(0)
    grad, loss, optional_sums = _optional_terms(inputs, options, usable, grad, loss)
    rejected = valid & ~usable
    grad = (grad.view(torch.int32) | rejected).view(torch.float32)  # all bits set: NaN
    loss = (loss.view(torch.int32) | rejected).view(torch.float32) if options.reduction == "none" else loss
    distance = log_ratio.abs()
    low, high = options.log_clip_bounds()
    clipped = _negative(log_ratio - low) | _negative(high - log_ratio)
    over = (ess - ratio).view(torch.int64) >> 63
    largest = distance.amax() if distance.numel() else distance.new_zeros(())
    sums = [ratio.sum(), ratio.square().sum(), _count(valid), _count(rejected), _wide_sum(distance), _count(over)]
    sums += [_count(clipped), _wide_sum(capped), _wide_sum(score), _wide_sum(kl), *optional_sums, largest]
    return grad, loss, torch.stack([value.double() for value in sums])


def _optional_terms(
    inputs: TokenInputs, options: LossOptions, usable: Tensor, grad: Tensor, loss: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The reference and entropy terms; their KL always has the safe gradient."""
    sums = [grad.new_zeros(()), grad.new_zeros(())]
    if inputs.reference_log_probs is not None:
        log_ratio = _keep(inputs.log_probs - inputs.reference_log_probs, usable)
        kl, slope = _k3(log_ratio, log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).double().neg_().exp_())
        grad = grad + options.reference_coef * slope
        sums[0] = _wide_sum(kl)
        loss = loss + options.reference_coef * kl if options.reduction == "none" else loss
    if inputs.entropy is not None:
        entropy = _keep(inputs.entropy, usable)
        sums[1] = _wide_sum(entropy)
        loss = loss - options.entropy_coef * entropy if options.reduction == "none" else loss
    return grad, loss, sums
