"""GRPO on the data path of P3O: the loss that P3O is compared with, over the same tokens and counts.

With l_i = lp_i - blp_i, rho_i = exp(l_i) and the advantage A_i of the token's response:

    L_i = -min(rho_i A_i, clip(rho_i, 1 - clip_low, 1 + clip_high) A_i) - entropy_coef H_i + ref_kl_coef K(lp_i - ref_i)

K is ``p3o_kernels.reference.k3``. Plain PyTorch over [T] in float64: the vocabulary is behind it already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p3o_kernels import P3OMetrics, RatioStats, ratio_stats
from p3o_kernels.reference import k3
from p3o_train.types import PackedBatch


def grpo_loss(
    log_probs: Tensor,
    batch: PackedBatch,
    *,
    clip_low: float,
    clip_high: float,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    ref_log_probs: Tensor | None = None,
    ref_kl_coef: float = 0.0,
) -> tuple[Tensor, P3OMetrics]:
    """Token sum of the loss, differentiable in ``log_probs`` and ``entropy``, and its metrics; nothing is read back.

    The metrics have P3O's names; normalized_ess is that of this micro-batch on this rank, cap_fraction and
    adaptive_kl_loss are 0. Invalid data, by the rule of ``ratio_stats``, makes the loss NaN and is counted.

    Args:
        log_probs: [T] float32; any value where ``batch.mask`` is False.
        entropy: [T] float32 of each row, needed for ``entropy_coef``.
        ref_log_probs: [T] float32 of a reference policy, needed for ``ref_kl_coef``.

    Raises:
        ValueError: a coefficient without its tensor.
    """
    for name, coefficient, tensor in (("entropy", entropy_coef, entropy), ("ref", ref_kl_coef, ref_log_probs)):
        if coefficient and tensor is None:
            raise ValueError(f"the {name} term has the coefficient {coefficient}, but its tensor is None")
    stats = ratio_stats(log_probs, batch.behavior_log_probs, batch.mask)
    log_ratio = _valid(log_probs, batch) - _valid(batch.behavior_log_probs, batch)
    ratio = log_ratio.exp()
    # of each response, for each token
    advantages = batch.advantages.double().repeat_interleave(
        batch.local_cu_seqlens.diff().long(), output_size=log_probs.numel()
    )
    advantages = torch.where(batch.mask, advantages, 0.0)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    score = -torch.minimum(ratio * advantages, clipped * advantages)
    zero = torch.zeros_like(score)
    reference_kl = zero if ref_log_probs is None else k3(_valid(log_probs, batch) - _valid(ref_log_probs, batch))
    entropies = zero if entropy is None else _valid(entropy, batch)
    loss = (score + ref_kl_coef * reference_kl - entropy_coef * entropies).sum()
    loss = torch.where(stats.invalid > 0, torch.nan, loss)
    metrics = _metrics(
        stats,
        log_ratio.detach(),
        log_ratio_abs=log_ratio.abs(),
        clip_hits=(ratio != clipped) & batch.mask,
        capped_ratio=clipped * batch.mask,
        score_loss=score,
        behavior_kl=k3(log_ratio),
        reference_kl=reference_kl,
        entropy=entropies,
        total_loss=loss,
    )
    return loss.float(), metrics


def _valid(values: Tensor, batch: PackedBatch) -> Tensor:
    return torch.where(batch.mask, values, 0.0).double()


def _metrics(stats: RatioStats, log_ratio: Tensor, **terms: Tensor) -> P3OMetrics:
    context = stats.to_context(validate=False)
    sums = {name: term.sum() for name, term in terms.items()}
    sums |= {"sum_ratio": stats.sum_ratio, "sum_ratio_sq": stats.sum_ratio_sq, "num_tokens": stats.num_tokens}
    sums |= {"invalid": stats.invalid, "weighted_ess": context.ess * stats.num_tokens}
    return P3OMetrics.from_sums(sums, log_ratio.abs().amax())
