"""The P3O token loss: one call from log-probabilities to loss, gradient and metrics.

    l_i = lp_i - blp_i        rho_i = exp(l_i)        e = ESS of the ratios, see ``ess``
    K_i = l_i + exp(clamp(-l_i, -10, 10)) - 1
    L_i = - sg(min(rho_i, e)) lp_i A_i + (1 - e) K_i  [- c_H H_i]  [+ c_ref K(lp_i - ref_i)]

Source: Fakoor, Aubry, Stranges, Smola, arXiv 2605.12380, Eq. 7, 11, 12 and Algorithm 2. The gradient
path is lp alone (and H, if an entropy with a gradient is given); min() and e are constants to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import _backend, _checks, _ops, _verdict
from p3o_kernels._collectives import gather_ranks
from p3o_kernels._dense import flat, flat_mask
from p3o_kernels._summary import NUM_METRICS
from p3o_kernels.ess import ESSContext
from p3o_kernels.metrics import P3OMetrics

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
_Optional = tuple[Tensor | None, Tensor | None, Tensor | None]
_Options = tuple[int, str, str, float, float, float, float, str]


class P3OOutput(NamedTuple):
    """What ``p3o_loss`` returns."""

    loss: Tensor
    """0-d float32 for "mean" and "sum", float32 in the shape of log_probs for "none"."""
    num_tokens: Tensor
    """0-d int64: the exact number of valid tokens of this call, on this rank."""
    context: ESSContext
    """The e that was used: the given context, or this call's (reduced over process_group)."""
    metrics: P3OMetrics
    """Sums over this call's tokens, on this rank."""


def p3o_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    context: ESSContext | None = None,
    process_group: ProcessGroup | None = None,
    reduction: str = "mean",
    num_tokens: int | Tensor | None = None,
    kl_mode: str = "proxy_safe",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ref_log_probs: Tensor | None = None,
    ref_kl_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    validate: bool = True,
    backend: str = "auto",
) -> P3OOutput:
    """P3O loss of a batch of tokens, differentiable in ``log_probs`` (and ``entropy``).

    Args:
        log_probs: lp, [T] packed tokens or any shape; float32, float16 or bfloat16, in nats. Subtraction and
            everything after it is float32 or wider; keep log-probs in float32 where you can.
        behavior_log_probs: blp, same shape: log-probs under the policy that sampled the tokens, recorded by the
            rollout engine under the same temperature convention as ``log_probs``. Treated as a constant.
        advantages: A, same shape; or [B], one per sequence, together with ``cu_seqlens`` (also when B = T).
        mask: bool, same shape: True for tokens that count. False positions may hold anything in any input, NaN
            included, without changing a bit of any result. None: every token is valid.
        cu_seqlens: [B + 1] int32 offsets of packed sequences, from 0 to T. [B] advantages are looked up inside
            the kernel and never expanded to [T].
        context: a frozen e from ``RatioStats.to_context`` (step scope). None: micro-batch scope, e from this call.
        process_group: micro-batch scope: reduce S1, S2, N over these ranks first. Every rank must call.
        reduction: "mean" (divided by ``num_tokens``), "sum" or "none" (one loss per token).
        num_tokens: divisor of "mean", e.g. the token count of the whole optimizer step: int >= 1 or a tensor of one
            number. Default: the valid tokens of this call. Without valid tokens the loss is an exact 0.
        kl_mode: "proxy_safe" (K with the gradient 1 - exp(clamp(-l, -10, 10)) everywhere), "proxy" (K with its own
            derivative, which is +1, away from the behavior policy, below l = -10) or "importance"
            (rho l - rho + 1 with gradient rho l, exponent clamped to +-10: unbiased for KL(pi || b)).
        clip_low, clip_high: margins of the monitored clip fraction; they change neither loss nor gradient.
        ref_log_probs: log-probs under a reference policy, same shape, a constant; needed for ``ref_kl_coef``.
        ref_kl_coef: weight of K(lp - ref), with the safe gradient in every kl_mode.
        entropy: H, same shape, as from ``token_log_probs(return_entropy=True)``; needed for ``entropy_coef``.
        entropy_coef: weight of the entropy bonus.
        validate: read the verdict back to the host (one read) and raise on invalid data. False: no host read;
            loss and gradient are NaN on invalid data and ``metrics`` has ``invalid_tokens`` > 0. Use False under
            torch.compile, in CUDA graphs and wherever a host read would stall.
        backend: "auto" (triton on CUDA tensors or under its interpreter, else eager), "triton", "eager" (analytic
            gradient in PyTorch) or "compiled" (the same through torch.compile; needs a C++ compiler on a CPU).

    Returns:
        ``P3OOutput(loss, num_tokens, context, metrics)``.

    Raises:
        ValueError: shapes or devices that differ, an unknown option, a bad cu_seqlens; with ``validate`` also invalid
            data: a valid token whose l, rho or rho^2 is not finite (or rho^2 is 0) or whose A, ref or H is not finite.
            With ``process_group`` every rank raises.
        TypeError: a wrong dtype or type.
    """
    named: dict[str, Tensor | None] = {"log_probs": log_probs, "behavior_log_probs": behavior_log_probs}
    named |= {"ref_log_probs": ref_log_probs, "entropy": entropy}
    _checks.check_tokens(named, advantages, mask, cu_seqlens)
    numbers = {
        "clip_low": clip_low,
        "clip_high": clip_high,
        "ref_kl_coef": ref_kl_coef,
        "entropy_coef": entropy_coef,
    }
    _checks.check_options(reduction, kl_mode, numbers, num_tokens)
    _checks.check_terms(ref_log_probs, ref_kl_coef, entropy, entropy_coef)
    _checks.check_scope(log_probs, context, process_group)
    margins = (float(clip_low), float(clip_high), float(ref_kl_coef), float(entropy_coef))
    whole_tokens = num_tokens if isinstance(num_tokens, int) else 0
    options = (whole_tokens, reduction, kl_mode, *margins, _backend.resolve(backend, log_probs))
    tensors = _tokens(log_probs, behavior_log_probs, advantages, mask, cu_seqlens)
    optional = _optional_tokens(log_probs, ref_log_probs, entropy, num_tokens)
    reduced: list[Tensor] = []
    if process_group is not None:
        context, sums = _reduced_context(process_group, tensors, optional, options, validate)
        reduced.append(sums)
    ess = None if context is None else context.ess
    loss, _, _, summary, count = _ops.token_loss(*tensors, ess, *optional, *options)
    if validate:
        _verdict.raise_on_invalid(summary, reduced, tensors, optional, cu_seqlens)
    if context is None:
        context = ESSContext._from_vector(summary[NUM_METRICS:])
    loss = loss.reshape(log_probs.shape) if reduction == "none" else loss
    return P3OOutput(loss, count, context, P3OMetrics(summary[:NUM_METRICS]))


def _tokens(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> _Tensors:
    """Flat float32 tensors; cu_seqlens only where advantages are per sequence."""
    per_sequence = cu_seqlens is not None and advantages.shape == (cu_seqlens.numel() - 1,)
    return (
        flat(log_probs),
        flat(behavior_log_probs.detach()),
        flat(advantages.detach()),
        flat_mask(mask),
        cu_seqlens if per_sequence else None,
    )


def _optional_tokens(
    log_probs: Tensor, ref_log_probs: Tensor | None, entropy: Tensor | None, num_tokens: int | Tensor | None
) -> _Optional:
    return (
        None if ref_log_probs is None else flat(ref_log_probs.detach()),
        None if entropy is None else flat(entropy),
        num_tokens.detach().reshape(()).to(log_probs.device, torch.float64) if isinstance(num_tokens, Tensor) else None,
    )


def _reduced_context(
    process_group: ProcessGroup, tensors: _Tensors, optional: _Optional, options: _Options, validate: bool
) -> tuple[ESSContext, Tensor]:
    """e over ``process_group``, and the reduced [S1, S2, N, invalid] as the verdict that every rank shares."""
    log_probs, behavior_log_probs, _, mask, _ = tensors
    with torch.no_grad():
        sums = _ops.ratio_sums(log_probs.detach(), behavior_log_probs, mask, options[-1])
        if validate:
            # A, ref and H count as well, or the rank that sees them would raise alone and leave the others waiting
            whole = _ops.token_loss(*tensors, torch.ones_like(sums[0]), *optional, *options)[3]
            sums = torch.cat([sums[:3], torch.maximum(sums[3], whole[3])[None]])
        sums = gather_ranks(sums, process_group).sum(0)
        return ESSContext._from_vector(_ops.context(sums, options[-1])), sums
