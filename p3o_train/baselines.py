"""The losses that P3O is compared with, on its data path: the same tokens, counts and names of metrics.

With l_i = lp_i - blp_i, rho_i = exp(l_i), c_i = clip(rho_i, 1 - clip_low, 1 + clip_high), the advantage A_i of the
token's response and the frozen e of the step, the score of a token is

    grpo    -min(rho_i A_i, c_i A_i)
    cispo   -sg(c_i) A_i lp_i               no lower bound with clip_low = 1
    pg      -A_i lp_i                       plain policy gradient, which does not know who sampled the token
    p3o     -sg(min(rho_i, e)) A_i lp_i     P3O without its pull towards the behavior policy

and the loss is score_i - entropy_coef H_i + ref_kl_coef K(lp_i - ref_i). K is ``p3o_kernels.reference.k3``. Plain
PyTorch over [T] in float64: the vocabulary is behind it already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p3o_kernels import P3OMetrics, RatioStats, ratio_stats
from p3o_kernels.reference import k3
from p3o_train.types import PackedBatch

BASELINES = ("grpo", "cispo", "pg")


def baseline_loss(
    method: str,
    log_probs: Tensor,
    batch: PackedBatch,
    *,
    clip_low: float,
    clip_high: float,
    ess: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    ref_log_probs: Tensor | None = None,
    ref_kl_coef: float = 0.0,
) -> tuple[Tensor, P3OMetrics]:
    """Token sum of the loss, differentiable in ``log_probs`` and ``entropy``, and its metrics; nothing is read back.

    The metrics have P3O's names, and adaptive_kl_loss is 0. Without ``ess`` normalized_ess is that of this micro-batch
    on this rank, and no token counts as capped. clip_fraction counts ratios outside of the clip range in all methods.
    Invalid data, by the rule of ``ratio_stats``, makes the loss NaN and is counted.

    Args:
        method: "grpo", "cispo", "pg" or "p3o".
        log_probs: [T] float32; any value where ``batch.mask`` is False.
        ess: [] e of the step, needed for "p3o".
        entropy: [T] float32 of each row, needed for ``entropy_coef``.
        ref_log_probs: [T] float32 of a reference policy, needed for ``ref_kl_coef``.

    Raises:
        ValueError: an unknown method; "p3o" without e; a coefficient without its tensor.
    """
    for name, coefficient, tensor in (("entropy", entropy_coef, entropy), ("ref", ref_kl_coef, ref_log_probs)):
        if coefficient and tensor is None:
            raise ValueError(f"the {name} term has the coefficient {coefficient}, but its tensor is None")
    stats = ratio_stats(log_probs, batch.behavior_log_probs, batch.mask)
    policy = _valid(log_probs, batch)
    log_ratio = policy - _valid(batch.behavior_log_probs, batch)
    ratio = log_ratio.exp()
    # of each response, for each token
    advantages = batch.advantages.double().repeat_interleave(
        batch.local_cu_seqlens.diff().long(), output_size=log_probs.numel()
    )
    advantages = torch.where(batch.mask, advantages, 0.0)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    weight = _weight(method, ratio.detach(), clipped.detach(), ess)
    clips = method == "grpo"  # the one whose gradient goes through the ratio
    score = -torch.minimum(ratio * advantages, clipped * advantages) if clips else -weight * advantages * policy
    zero = torch.zeros_like(score)
    reference_kl = zero if ref_log_probs is None else k3(policy - _valid(ref_log_probs, batch))
    entropies = zero if entropy is None else _valid(entropy, batch)
    loss = (score + ref_kl_coef * reference_kl - entropy_coef * entropies).sum()
    loss = torch.where(stats.invalid > 0, torch.nan, loss)
    metrics = _metrics(
        stats,
        ess,
        log_ratio.detach(),
        log_ratio_abs=log_ratio.abs(),
        cap_hits=torch.zeros_like(batch.mask) if ess is None else (ratio > ess) & batch.mask,
        clip_hits=(ratio != clipped) & batch.mask,
        capped_ratio=weight * batch.mask,
        score_loss=score,
        behavior_kl=k3(log_ratio),
        reference_kl=reference_kl,
        entropy=entropies,
        total_loss=loss,
    )
    return loss.float(), metrics


def _weight(method: str, ratio: Tensor, clipped: Tensor, ess: Tensor | None) -> Tensor:
    """[T] float64, a constant: what multiplies A lp; for grpo the clipped ratio, which is for the metrics alone."""
    if method in ("grpo", "cispo"):
        return clipped
    if method == "pg":
        return torch.ones_like(ratio)
    if method != "p3o":
        raise ValueError(f"method must be one of {', '.join(BASELINES)} or p3o; got {method!r}")
    if ess is None:
        raise ValueError('method "p3o" caps ratios at the e of the step, but ess is None; freeze e before the loss')
    return ratio.clamp(max=ess.double())


def _valid(values: Tensor, batch: PackedBatch) -> Tensor:
    return torch.where(batch.mask, values, 0.0).double()


def _metrics(stats: RatioStats, ess: Tensor | None, log_ratio: Tensor, **terms: Tensor) -> P3OMetrics:
    e = stats.to_context(validate=False).ess if ess is None else ess
    sums = {name: term.sum() for name, term in terms.items()}
    sums |= {"sum_ratio": stats.sum_ratio, "sum_ratio_sq": stats.sum_ratio_sq, "num_tokens": stats.num_tokens}
    sums |= {"invalid": stats.invalid, "weighted_ess": e * stats.num_tokens}
    return P3OMetrics.from_sums(sums, log_ratio.abs().amax())
