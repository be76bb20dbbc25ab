"""The "compiled" backend: the token loss with its gradient written out, fused by torch.compile.

Equations (1)-(5) as in ``_math_kernels`` and ``_token_kernels``, with the same precision. Written for the
C++ loops that torch.compile makes of it: the mask is an int32 word that is and-ed with the float (a ``where`` on
a loaded bool costs more than all arithmetic), the float64 exp is a polynomial that also gives exp(-l).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from p3o_kernels import _eager, _scalars
from p3o_kernels._inputs import LossOptions, TokenInputs, TokenLoss

_T = TypeVar("_T")
# Recompute shared subexpressions in each loop: stored intermediates cost more than the arithmetic.
_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "realize_opcount_threshold": 500,
    "realize_reads_threshold": 100,
    "realize_acc_reads_threshold": 100,
}


def _valid(mask: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """1.0 or 0.0, and the word -1 or 0, of each token; ``mask`` as uint8."""
    if mask is None:
        return torch.ones_like(like), torch.full_like(like, -1, dtype=torch.int32)
    return mask.float(), mask.to(torch.int32).neg()


def _keep(values: Tensor, word: Tensor) -> Tensor:
    return (values.view(torch.int32) & word).view(torch.float32)


def _exp_pair(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """exp(l) and exp(-l) in float64, relative error below 1e-14 for |l| < 400; see ``_math_kernels.exp_pair``."""
    x = log_ratio.double()
    shifted = x * 1.4426950408889634 + 6755399441055744.0  # 1.5 * 2^52: rounds to an integer in the low bits
    power = shifted.view(torch.int64) << 52
    r = (shifted - 6755399441055744.0) * -0.6931471805599453 + x
    s = r.square()  # square, not r * r: with intermediates recomputed, every mention of r doubles the loop body
    even = (((s * 3.784421890500992e-10 + 3.390842013888889e-07) * s + 1.6276041666666666e-04) * s + 0.03125) * s + 1.0
    odd = (((s * 1.2110150049603175e-08 + 8.138020833333333e-06) * s + 2.6041666666666665e-03) * s + 0.25) * r
    up, down = (even + odd).square().square(), (even - odd).square().square()
    return (up.view(torch.int64) + power).view(torch.float64), (down.view(torch.int64) - power).view(torch.float64)


def _log_ratio(log_probs: Tensor, behavior_log_probs: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
    """l, 0 where it must not be used, and the condition that rho^2 is a positive finite float64."""
    log_ratio = _keep(log_probs - behavior_log_probs, word)
    in_range = (log_ratio < 354.891) & (log_ratio > -372.566)  # False for NaN
    return torch.where(in_range, log_ratio, 0.0), in_range


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _ratio_sums(log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    valid, word = _valid(mask, log_probs)
    log_ratio, in_range = _log_ratio(log_probs, behavior_log_probs, word)
    kept = torch.where(in_range, valid, 0.0)
    ratio = _exp_pair(log_ratio)[0] * kept.double()
    return torch.stack([ratio.sum(), ratio.square().sum(), _sum(valid), _sum(valid - kept)])


def _k3(log_ratio: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    slope = (1.0 - inverse).float().clamp(-22025.465794806718, 0.9999546000702375)
    return log_ratio - slope, slope


def _behavior_kl(log_ratio: Tensor, ratio: Tensor, inverse: Tensor, kl_mode: str) -> tuple[Tensor, Tensor]:
    if kl_mode == "importance":
        clamped = ratio.float().clamp(4.5399929762484854e-05, 22026.465794806718)
        return clamped * log_ratio - clamped + 1.0, clamped * log_ratio
    kl, slope = _k3(log_ratio, inverse)
    if kl_mode == "proxy":  # the derivative of the clamped value: +1, away from the behavior policy, below l = -10
        slope = torch.where(log_ratio.abs() > 10.0, 1.0, slope)
    return kl, slope


def _finite_or_zero(values: Tensor, word: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """``values`` with masked and non-finite ones set to 0, and ``kept`` cleared where they were not finite."""
    values = _keep(values, word)
    finite = values.abs() < math.inf
    return torch.where(finite, values, 0.0), torch.where(finite, kept, 0.0)


def _token_terms(
    inputs: TokenInputs, options: LossOptions, advantages: Tensor, ess: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """g [T]; L [T]; and [13] float64: sums 0 to 11 of ``_summary``, max |l|. See ``_eager_terms.token_terms``."""
    valid, word = _valid(inputs.mask, inputs.log_probs)
    log_ratio, in_range = _log_ratio(inputs.log_probs, inputs.behavior_log_probs, word)
    log_probs = _keep(inputs.log_probs, word)
    kept = torch.where(in_range, valid, 0.0)
    advantages, kept = _finite_or_zero(advantages, word, kept)
    zero = torch.zeros((), dtype=torch.float32, device=kept.device)
    reference_kl, reference_slope, entropy = zero, zero, zero
    if inputs.reference_log_probs is not None:
        reference_ratio, kept = _finite_or_zero(inputs.log_probs - inputs.reference_log_probs, word, kept)
        clamped = reference_ratio.clamp(-10.0, 10.0)
        reference_kl, reference_slope = _k3(reference_ratio, _exp_pair(clamped)[1])
    if inputs.entropy is not None:
        entropy, kept = _finite_or_zero(inputs.entropy, word, kept)
    ratio, inverse = _exp_pair(log_ratio)
    ratio = ratio * kept.double()
    kl, slope = _behavior_kl(log_ratio, ratio, inverse, options.kl_mode)
    kl, reference_kl, entropy = kl * kept, reference_kl * kept, entropy * kept
    capped = torch.minimum(ratio, ess).float()
    away = (1.0 - ess).float()
    weight = advantages * capped
    score = -weight * torch.where(kept > 0, log_probs, 0.0)
    grad = away * slope - weight + options.reference_coef * reference_slope
    loss = score + away * kl + options.reference_coef * reference_kl - options.entropy_coef * entropy
    rejected = valid - kept
    grad = torch.where(rejected > 0, math.nan, grad)
    loss = torch.where(rejected > 0, math.nan, loss) if options.reduction == "none" else loss.new_empty(0)
    low, high = options.log_clip_bounds()
    clipped = torch.where((log_ratio < low) | (log_ratio > high), kept, 0.0)
    over = torch.where((ratio - ess).float() > 0, 1.0, 0.0)
    distance = log_ratio.abs() * kept
    sums = [ratio.sum(), ratio.square().sum(), *map(_sum, (valid, rejected, distance, over, clipped))]
    sums += [*map(_sum, (capped, score, kl, reference_kl, entropy)), distance.amax().double()]
    return grad, loss, torch.stack(sums)


# Each combination of mask, terms, kl_mode and reduction is a graph; dynamo's default would stop after 8.
_GRAPHS = 64


@functools.cache
def _compile(function: Callable[..., _T]) -> Callable[..., _T]:
    # dynamic: one compilation for every T above 1
    return torch.compile(function, dynamic=True, fullgraph=True, options=_OPTIONS)


@functools.cache
def _compile_scalars(function: Callable[..., _T]) -> Callable[..., _T]:
    """A graph of its own: recomputing intermediates would blow up these long chains of single numbers."""
    return torch.compile(function, dynamic=True, fullgraph=True)


def _ess(sums: Tensor) -> Tensor:
    return _scalars.context(_scalars.mark_overflow(sums))[0]


def token_loss(inputs: TokenInputs, options: LossOptions) -> TokenLoss:
    if inputs.log_probs.numel() < 2:  # 0 and 1 would each be a compilation of their own
        return _eager.token_loss(inputs, options)
    # a bool tensor inside the loops would keep the C++ compiler from vectorising them
    mask = None if inputs.mask is None else inputs.mask.view(torch.uint8)
    inputs, ess = replace(inputs, mask=mask), inputs.ess
    advantages = _eager.token_advantages(inputs, slice(0, inputs.log_probs.numel()))
    with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
        if ess is None:
            sums = _compile(_ratio_sums)(inputs.log_probs, inputs.behavior_log_probs, mask)
            ess = _compile_scalars(_ess)(sums)
        token_grad, token_values, sums = _compile(_token_terms)(inputs, options, advantages, ess)
        loss, scale, summary, count = _compile_scalars(_scalars.finish)(inputs.divisor, options, sums, ess)
    return TokenLoss(token_values if options.reduction == "none" else loss, token_grad, scale, summary, count)
