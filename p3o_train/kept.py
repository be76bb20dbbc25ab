"""Log-probs of truncated sampling: over the tokens that could have been sampled at each position, not over all.

    lp_t = z[y_t] / tau - log sum_{k in kept_t} exp(z[k] / tau)

With top-p, top-k or min-p an engine samples from the kept tokens alone, renormalised. A trainer that normalised over
the whole vocabulary would see the kept mass as a ratio below 1 on unchanged weights. The kept set is data: it stays
that of the behavior policy when the weights move.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def kept_log_probs(
    logits: Tensor,
    labels: Tensor,
    kept_token_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float,
    process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels and entropies, both over the kept tokens, differentiable in ``logits``.

    Args:
        logits: [T, V / tp] before the temperature; rank r of ``process_group`` holds entries from r V / tp on.
        labels: [T] int64, each among the kept tokens of its row where ``mask`` is True.
        kept_token_ids: [T, K] int64, filled up with -1.
        mask: [T] bool. Rows where it is False give 0, whatever they hold.

    Returns:
        [T] float32 log-probs and [T] float32 entropies.
    """
    shard = logits.shape[-1]
    first = 0 if process_group is None else process_group.rank() * shard
    kept, kept_here = _local(kept_token_ids, first, shard)
    label, label_here = _local(labels[:, None], first, shard)
    scaled = torch.where(kept_here, logits.gather(1, kept).float() / temperature, -torch.inf)
    shift = scaled.detach().amax(1) if kept.shape[1] else logits.new_zeros(len(labels), dtype=torch.float32)
    if process_group is not None:
        dist.all_reduce(shift, dist.ReduceOp.MAX, group=process_group)
    shift = torch.where(mask, shift, 0.0)[:, None]
    # -inf before any product: a row without a kept token here, or without a mask, gives exact zeros
    centered = torch.where(kept_here & mask[:, None], scaled - shift, -torch.inf)
    weights = centered.exp()
    chosen = torch.where(label_here & mask[:, None], logits.gather(1, label).float() / temperature - shift, 0.0)
    weighted = torch.where(weights > 0, weights * torch.where(weights > 0, centered, 0.0), 0.0)
    sums: Any = torch.stack([weights.sum(1), weighted.sum(1), chosen.squeeze(1)])
    if process_group is not None:
        sums = _Sum.apply(sums, process_group)  # type: ignore[no-untyped-call]
    total, expected, picked = sums.unbind(0)
    total = torch.where(mask, total, 1.0)
    log_total = total.log()
    return torch.where(mask, picked - log_total, 0.0), torch.where(mask, log_total - expected / total, 0.0)


def _local(ids: Tensor, first: int, shard: int) -> tuple[Tensor, Tensor]:
    """Columns of this rank for token ids, and which of them it has."""
    here = (ids >= first) & (ids < first + shard)
    return torch.where(here, ids - first, 0), here


class _Sum(torch.autograd.Function):
    """Over the ranks of a group. Each of them computes the same loss of it, so the gradient is every rank's own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, process_group: ProcessGroup) -> Tensor:
        gathered = [torch.empty_like(values) for _ in range(process_group.size())]
        dist.all_gather(gathered, values.contiguous(), group=process_group)
        return torch.stack(gathered).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
