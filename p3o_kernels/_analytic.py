"""The token loss with its gradient written out, in PyTorch: what "eager" and "compiled" run.

Equations (1)-(5) as in ``_math_kernels`` and ``_token_kernels``, with the same precision: l is
float32, rho and the sums float64, the rest float32. No autograd graph is built.
"""

import torch
from torch import Tensor

from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._summary import EPSILON, EXP_LIMIT, EXPONENT_LIMIT

# rho^2 is a positive finite float64 between these (exclusive)
LOG_RATIO_MIN, LOG_RATIO_MAX = -372.566, 354.891


def _usable_log_ratio(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    log_ratio = log_probs - behavior_log_probs
    usable = (log_ratio < LOG_RATIO_MAX) & (log_ratio > LOG_RATIO_MIN)  # False for NaN
    return log_ratio, usable if mask is None else usable & mask


def _count(mask: Tensor | None, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Valid tokens, and those among them that are not usable."""
    valid = usable.new_full((), usable.numel(), dtype=torch.int64) if mask is None else mask.sum()
    return valid, valid - usable.sum()


def ratio_sums(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    """[S1, S2, N, invalid] float64."""
    log_ratio, usable = _usable_log_ratio(log_probs, behavior_log_probs, mask)
    ratio = torch.where(usable, torch.where(usable, log_ratio, 0.0).double().exp(), 0.0)
    count, invalid = _count(mask, usable)
    return torch.stack([ratio.sum(), ratio.square().sum(), count.double(), invalid.double()])


def mark_overflow(sums: Tensor) -> Tensor:
    """Counts one more invalid when S1 or S2 left the float64 range although every term was finite."""
    overflowed = ~sums[:2].isfinite().all()
    return torch.cat([sums[:3], (sums[3] + overflowed)[None]])


def context(sums: Tensor) -> Tensor:
    """[e, N, mean of rho, standard deviation of rho] from [S1, S2, N, invalid]; e is NaN on invalid data."""
    sum_ratio, sum_ratio_sq, count, invalid = sums.unbind()
    empty = count == 0
    safe = torch.where(empty, 1.0, count)
    ess = (sum_ratio / safe) * (sum_ratio / (sum_ratio_sq + EPSILON))  # this grouping cannot overflow
    ess = torch.where(empty, 1.0, ess.clamp(0.0, 1.0))
    usable = (invalid == 0) & sum_ratio.isfinite() & sum_ratio_sq.isfinite()
    mean = torch.where(empty, 1.0, sum_ratio / safe)
    variance = torch.where(empty, 0.0, sum_ratio_sq / safe - mean.square())
    return torch.stack([torch.where(usable, ess, torch.nan), count, mean, variance.clamp_min(0.0).sqrt()])


def _k3(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """K and its safe derivative; expm1 keeps the digits of small l."""
    slope = -torch.expm1(-log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))
    return log_ratio - slope, slope


def _behavior_kl(log_ratio: Tensor, ratio: Tensor, usable: Tensor, kl_mode: str) -> tuple[Tensor, Tensor]:
    if kl_mode == "importance":
        clamped = ratio.clamp(1.0 / EXP_LIMIT, EXP_LIMIT).float()
        slope = clamped * log_ratio
        return torch.where(usable, slope - clamped + 1.0, 0.0), slope
    kl, slope = _k3(log_ratio)
    if kl_mode == "proxy":  # the derivative of the clamped value: +1, away from the behavior policy, below l = -10
        slope = torch.where(log_ratio.abs() > EXPONENT_LIMIT, 1.0, slope)
    return kl, slope


def _usable_tokens(inputs: TokenInputs) -> tuple[Tensor, Tensor]:
    log_ratio, usable = _usable_log_ratio(inputs.log_probs, inputs.behavior_log_probs, inputs.mask)
    usable = usable & inputs.advantages.isfinite()
    if inputs.reference_log_probs is not None:
        usable = usable & (inputs.log_probs - inputs.reference_log_probs).isfinite()
    if inputs.entropy is not None:
        usable = usable & inputs.entropy.isfinite()
    return torch.where(usable, log_ratio, 0.0), usable


def _wide_sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def token_terms(inputs: TokenInputs, options: LossOptions, ess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g [T]; L [T], or [0] unless the reduction is "none"; and [13] float64: sums 0 to 11 of ``_summary``, max |l|.

    Unusable tokens get l = lp = A = 0 and rho = 0: every sum then grows by an exact 0.
    """
    log_ratio, usable = _usable_tokens(inputs)
    ratio = torch.where(usable, log_ratio.double().exp(), 0.0)
    capped = ratio.clamp_max(ess).float()
    kl, kl_slope = _behavior_kl(log_ratio, ratio, usable, options.kl_mode)
    away = (1.0 - ess).float()
    weight = torch.where(usable, inputs.advantages, 0.0) * capped
    score = -weight * torch.where(usable, inputs.log_probs, 0.0)
    grad = away * kl_slope - weight
    loss = score + away * kl if options.reduction == "none" else score.new_empty(0)
    distance = log_ratio.abs()
    low, high = options.log_clip_bounds()
    clipped = (log_ratio < low) | (log_ratio > high)
    sums = [ratio.sum(), ratio.square().sum(), *_count(inputs.mask, usable), _wide_sum(distance)]
    sums += [(ratio > ess).sum(), clipped.sum(), _wide_sum(capped), _wide_sum(score), _wide_sum(kl)]
    grad, loss, optional_sums = _optional_terms(inputs, options, usable, grad, loss)
    largest = distance.amax() if distance.numel() else distance.new_zeros(())
    rejected = ~usable if inputs.mask is None else inputs.mask & ~usable
    grad = torch.where(rejected, torch.nan, grad)
    loss = torch.where(rejected, torch.nan, loss) if options.reduction == "none" else loss
    return grad, loss, torch.stack([value.double() for value in (*sums, *optional_sums, largest)])


def _optional_terms(
    inputs: TokenInputs, options: LossOptions, usable: Tensor, grad: Tensor, loss: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The reference and entropy terms; their KL always has the safe gradient."""
    sums = [grad.new_zeros(()), grad.new_zeros(())]
    if inputs.reference_log_probs is not None:
        kl, slope = _k3(torch.where(usable, inputs.log_probs - inputs.reference_log_probs, 0.0))
        grad = grad + options.reference_coef * slope
        sums[0] = _wide_sum(kl)
        loss = loss + options.reference_coef * kl if options.reduction == "none" else loss
    if inputs.entropy is not None:
        entropy = torch.where(usable, inputs.entropy, 0.0)
        sums[1] = _wide_sum(entropy)
        loss = loss - options.entropy_coef * entropy if options.reduction == "none" else loss
    return grad, loss, sums


def finish(
    inputs: TokenInputs, options: LossOptions, sums: Tensor, ess: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, scale, summary and count from the [13] sums of ``token_terms``, added over chunks."""
    ratio_part = mark_overflow(sums[:4])
    invalid, count = ratio_part[3], ratio_part[2]
    adaptive = (1.0 - ess) * sums[9]
    total = sums[8] + adaptive + options.reference_coef * sums[10] - options.entropy_coef * sums[11]
    total = torch.where(invalid == 0, total, torch.nan)
    empty = count == 0
    own = [adaptive, total, torch.where(empty, 0.0, ess * count), sums[12], ess]
    moments = context(torch.cat([sums[:3], torch.zeros_like(count)[None]]))[1:]
    summary = torch.cat([ratio_part, sums[4:12], torch.stack(own), moments])
    divisor = _divisor(inputs, options, count)
    scale = torch.where(empty, 0.0, 1.0 / torch.where(empty, 1.0, divisor))
    loss = torch.where(empty, 0.0, total * scale).float()
    if options.reduction != "none":
        scale = torch.where(invalid == 0, scale, torch.nan)
    return loss, scale, summary, count.long()


def _divisor(inputs: TokenInputs, options: LossOptions, count: Tensor) -> Tensor:
    if options.reduction != "mean":
        return torch.ones_like(count)
    if inputs.divisor is not None:
        return inputs.divisor
    return torch.full_like(count, options.num_tokens) if options.num_tokens else count
