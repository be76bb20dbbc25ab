"""The same operations in plain differentiable PyTorch: the oracle of the tests, in any float dtype.

Written for reading, with autograd for every gradient. Give it float64 tensors and it is the truth
that the fused implementations are measured against; give it float32 and it is eager PyTorch.
"""

import torch
from torch import Tensor

from p3o_kernels._summary import EPSILON, EXPONENT_LIMIT, KL_MODES


def ratio_stats(
    log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """S1, S2 and N of the valid tokens, float64."""
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    log_ratio = torch.where(mask, _promote(log_probs) - _promote(behavior_log_probs), 0.0).detach()
    ratio = torch.where(mask, log_ratio.double().exp(), 0.0)
    return ratio.sum(), ratio.square().sum(), mask.sum().double()


def effective_sample_size(sum_ratio: Tensor, sum_ratio_sq: Tensor, num_tokens: Tensor) -> Tensor:
    """e = clamp(S1^2 / (N (S2 + 1e-8)), 0, 1); 1 without tokens."""
    if num_tokens == 0:
        return torch.ones_like(sum_ratio)
    return (sum_ratio.square() / (num_tokens * (sum_ratio_sq + EPSILON))).clamp(0.0, 1.0)


def k3(log_ratio: Tensor, kl_mode: str = "proxy_safe") -> Tensor:
    """K of each token with the gradient that ``kl_mode`` names.

    proxy:       l + exp(clamp(-l, -10, 10)) - 1, with autograd's derivative of the clamp
    proxy_safe:  the same value, derivative 1 - exp(clamp(-l, -10, 10))
    importance:  rho l - rho + 1 with rho = exp(clamp(l, -10, 10)), derivative rho l
    """
    if kl_mode not in KL_MODES:
        raise ValueError(f"kl_mode must be one of {', '.join(KL_MODES)}; got {kl_mode!r}")
    if kl_mode == "importance":
        ratio = log_ratio.detach().clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
        return _with_slope(ratio * log_ratio.detach() - ratio + 1.0, ratio * log_ratio.detach(), log_ratio)
    inverse = (-log_ratio).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    value = log_ratio + inverse - 1.0
    return value if kl_mode == "proxy" else _with_slope(value.detach(), (1.0 - inverse).detach(), log_ratio)


def p3o_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ess: Tensor | None = None,
    reduction: str = "mean",
    num_tokens: int | Tensor | None = None,
    kl_mode: str = "proxy_safe",
    ref_log_probs: Tensor | None = None,
    ref_kl_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> Tensor:
    """The loss of ``p3o_kernels.p3o_loss``; arguments as there, and ``ess`` [] in place of a context.

    Nothing is validated: invalid data gives NaN or inf.
    """
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    if cu_seqlens is not None and advantages.shape == (cu_seqlens.numel() - 1,):
        advantages = torch.repeat_interleave(advantages, cu_seqlens.diff().long())

    def valid(tensor: Tensor) -> Tensor:
        return torch.where(mask, _promote(tensor), 0.0)

    lp = valid(log_probs)
    log_ratio = lp - valid(behavior_log_probs).detach()
    if ess is None:
        ess = effective_sample_size(*ratio_stats(log_probs, behavior_log_probs, mask))
    # min in float64: rho overflows float32 at l = 89, where the weight is still the cap
    weight = torch.minimum(log_ratio.detach().double().exp(), ess.double()).to(lp.dtype)
    loss = -weight * lp * valid(advantages).detach() + (1.0 - ess).to(lp.dtype) * k3(log_ratio, kl_mode)
    if ref_log_probs is not None:
        loss = loss + ref_kl_coef * k3(lp - valid(ref_log_probs).detach())
    if entropy is not None:
        loss = loss - entropy_coef * valid(entropy)
    loss = torch.where(mask, loss, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum" or not mask.any():
        return loss.sum()
    return loss.sum() / (mask.sum() if num_tokens is None else num_tokens)


def _promote(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _with_slope(value: Tensor, slope: Tensor, log_ratio: Tensor) -> Tensor:
    """``value`` with the gradient ``slope`` with respect to ``log_ratio``."""
    return value + slope * (log_ratio - log_ratio.detach())
