"""P3O with two anchors: the behavior policy b, and a proximal policy that is a snapshot from the start of the epoch.

    rho_i = exp(lp_i - blp_i)      e_b, e_prox: ESS of the ratios to b and to the proximal policy
    e = min(e_b, e_prox)           w_b = 1 - e_b, w_prox = 1 - e_prox
    m_i = log((w_b exp(blp_i) + w_prox exp(prox_i)) / (w_b + w_prox))                the mixture
    L_i = - sg(min(rho_i, e)) lp_i A_i + (1 - e) K(lp_i - m_i)

The pull is left out where 1 - e <= 1e-6. Source: arXiv 2605.12380, Eq. 13, which was not readable here; the form is
that of the class P4O in FeynRL-project/FeynRL, algs/P4O/p4o.py at commit 2dbc6beb. Differences: e is clamped to [0, 1];
an anchor with weight 0 drops out exactly instead of keeping a share of 1e-30; invalid data raise instead of giving
e = 1; S1 and S2 are sums of float64 ratios; K has the gradient modes of ``p3o_loss`` (theirs is "proxy").
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import _anchored_ops, _anchored_verdict, _backend, _checks, _ops
from p3o_kernels._collectives import gather_ranks
from p3o_kernels._dense import flat, flat_mask
from p3o_kernels.ess import ESSContext
from p3o_kernels.metrics import P3OMetrics

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
_Options = tuple[Tensor | None, int, str, str, float, float, str]


class P4OOutput(NamedTuple):
    """What ``p4o_loss`` returns."""

    loss: Tensor
    """0-d float32 for "mean" and "sum", float32 in the shape of log_probs for "none"."""
    num_tokens: Tensor
    """0-d int64: the exact number of valid tokens of this call, on this rank."""
    ess: Tensor
    """0-d float64: min(e_b, e_prox), the cap."""
    context: ESSContext
    """e_b and its companions: the given context, or this call's (reduced over process_group)."""
    proximal_context: ESSContext
    """e_prox and its companions, likewise."""
    metrics: P3OMetrics
    """Sums over this call's tokens, on this rank. ``normalized_ess`` is min(e_b, e_prox), ``adaptive_kl_loss`` the pull
    to the mixture; ``behavior_kl_proxy`` and everything about ratios is relative to b."""


def p4o_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    proximal_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    context: ESSContext | None = None,
    proximal_context: ESSContext | None = None,
    process_group: ProcessGroup | None = None,
    reduction: str = "mean",
    num_tokens: int | Tensor | None = None,
    kl_mode: str = "proxy_safe",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    validate: bool = True,
    backend: str = "auto",
) -> P4OOutput:
    """Two-anchor loss of a batch of tokens, differentiable in ``log_probs``.

    Arguments and errors are those of ``p3o_loss``, except:

    Args:
        proximal_log_probs: prox, in the shape of ``log_probs``: log-probs under the proximal policy, by the trainer,
            under the same temperature convention. A constant; valid tokens obey the same rule as behavior_log_probs.
        context, proximal_context: frozen e_b and e_prox from ``ratio_stats(log_probs, behavior_log_probs, mask)`` and
            ``ratio_stats(log_probs, proximal_log_probs, mask)`` (step scope). Both or neither.
        process_group: micro-batch scope: reduce both triples of sums over these ranks, in one collective.
        kl_mode: gradient of K as in ``p3o_loss``; "importance" is rho l_mix - rho + 1 with gradient rho l_mix,
            unbiased for KL(pi || mixture) on tokens that b sampled.
        backend: as in ``p3o_loss``, but "compiled" is the same as "eager" here.

    With prox = blp the loss is that of ``p3o_loss``, but for the gate. With all three equal the gradient is -A.

    There is no reference and no entropy term. With "triton" both triples of sums come from one pass over the tokens:
    4 launches forward, 2 with both contexts given, and 1 backward.

    Returns:
        ``P4OOutput(loss, num_tokens, ess, context, proximal_context, metrics)``.
    """
    named = {"log_probs": log_probs, "behavior_log_probs": behavior_log_probs, "proximal_log_probs": proximal_log_probs}
    _checks.check_tokens(named, advantages, mask, cu_seqlens)
    _checks.check_options(reduction, kl_mode, {"clip_low": clip_low, "clip_high": clip_high}, num_tokens)
    _check_contexts(log_probs, context, proximal_context, process_group)
    lp, blp, prox = (flat(tensor if name == "log_probs" else tensor.detach()) for name, tensor in named.items())
    by_sequence = cu_seqlens is not None and advantages.shape == (cu_seqlens.numel() - 1,)
    given = flat(advantages.detach())
    tensors = (lp, blp, prox, given, flat_mask(mask), cu_seqlens if by_sequence else None)
    divisor = num_tokens.detach().reshape(()).to(lp.device, torch.float64) if isinstance(num_tokens, Tensor) else None
    whole_tokens = num_tokens if isinstance(num_tokens, int) else 0
    margins = (float(clip_low), float(clip_high))
    options = (divisor, whole_tokens, reduction, kl_mode, *margins, _backend.resolve(backend, lp))
    sums: Tensor | None = None
    if context is None or proximal_context is None:
        rows = _anchors(process_group, tensors, options, validate)
        sums = rows[:, :4]
        context, proximal_context = (ESSContext._from_vector(row[4:]) for row in rows)
    own = (context.ess, proximal_context.ess)
    loss, _, _, vector, count, ess = _anchored_ops.two_anchor_loss(*tensors, *own, *options)
    if validate:
        verdict = _verdict_sums(vector, sums, process_group)
        read = dict(zip((*named, "advantages"), (lp, blp, prox, given), strict=True))
        _anchored_verdict.raise_on_invalid(verdict, ess[None], read, tensors[4], cu_seqlens, divisor)
    loss = loss.reshape(log_probs.shape) if reduction == "none" else loss
    return P4OOutput(loss, count, ess, context, proximal_context, P3OMetrics(vector))


def _check_contexts(
    log_probs: Tensor,
    context: ESSContext | None,
    proximal_context: ESSContext | None,
    process_group: ProcessGroup | None,
) -> None:
    named = {"context": context, "proximal_context": proximal_context}
    missing = [name for name, value in named.items() if value is None]
    if len(missing) == 1:
        raise ValueError(
            f"context and proximal_context belong together, {missing[0]} is missing: give both (step scope) or "
            "neither (micro-batch scope)"
        )
    for name, value in named.items():
        if value is not None and not isinstance(value, ESSContext):
            raise TypeError(f"{name} must be an ESSContext from RatioStats.to_context, got {type(value).__name__}")
        _checks.check_scope(log_probs, value, process_group)


def _anchors(process_group: ProcessGroup | None, tensors: _Tensors, options: _Options, validate: bool) -> Tensor:
    """[2, 8] float64 of b and of the proximal policy: S1, S2, N, invalid of the ratios, and the context they make.

    With ``process_group`` over all ranks, and what makes any rank invalid is counted in the first row.
    """
    log_probs, behavior, proximal, _, mask, _ = tensors
    with torch.no_grad():
        rows: Tensor = _anchored_ops.anchors(log_probs.detach(), behavior, proximal, mask, options[-1])
        if process_group is None:
            return rows
        sums = rows[:, :4].clone()
        if validate:
            # A counts as well, or the rank that sees it would raise alone and leave the others waiting
            one = torch.ones_like(sums[0, 0])
            whole = _anchored_ops.two_anchor_loss(*tensors, one, one, *options)[3]
            sums[0, 3] = torch.maximum(sums[0, 3], whole[3])
        sums = gather_ranks(sums.flatten(), process_group).sum(0).reshape(2, 4)
        return torch.stack([torch.cat([row, _ops.context(row, options[-1])]) for row in sums])


def _verdict_sums(vector: Tensor, sums: Tensor | None, process_group: ProcessGroup | None) -> Tensor:
    """[S1, S2, N, invalid] that decides whether this call raises; with a group the same on every rank."""
    if sums is None:
        return vector[:4]
    invalid = sums[:, 3].amax()
    if process_group is None:
        invalid = torch.maximum(invalid, vector[3])
    return torch.cat([sums[0, :3], invalid[None]])
