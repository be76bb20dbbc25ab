"""Metrics of the token loss as sums that stay on the device and add over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels._collectives import gather_ranks
from p3o_kernels._summary import LOG_RATIO_ABS_MAX, NUM_METRICS, SUM_FIELDS


@dataclass(frozen=True)
class P3OMetrics:
    """One float64 vector: sums over valid tokens and, last, a maximum.

    Means are formed once, at the end, from total sums: a mean of micro-batch means would weigh tokens
    of short micro-batches more.

    Example::

        total = sum(metrics_of_micro_batches[1:], start=metrics_of_micro_batches[0])
        log(total.all_reduce(dp_cp_group).to_dict())
    """

    vector: Tensor
    """[16] float64."""

    @staticmethod
    def zeros(device: torch.device | str | None = None) -> P3OMetrics:
        """Metrics of no token."""
        return P3OMetrics(torch.zeros(NUM_METRICS, dtype=torch.float64, device=device))

    @staticmethod
    def from_sums(sums: Mapping[str, Tensor], log_ratio_abs_max: Tensor) -> P3OMetrics:
        """Metrics of another token loss that is to be compared with P3O: [] sums by name, and the largest abs(l).

        Names: sum_ratio, sum_ratio_sq, num_tokens, invalid, log_ratio_abs, cap_hits, clip_hits, capped_ratio,
        score_loss, behavior_kl, reference_kl, entropy, adaptive_kl_loss, total_loss, weighted_ess (e * N). A name that
        is left out is 0.

        Raises:
            ValueError: an unknown name.
        """
        unknown = sorted(set(sums) - set(SUM_FIELDS))
        if unknown:
            raise ValueError(f"unknown sums {', '.join(unknown)}; the names are {', '.join(SUM_FIELDS)}")
        zero = torch.zeros((), dtype=torch.float64, device=log_ratio_abs_max.device)
        values = [sums.get(name, zero).detach().double() for name in SUM_FIELDS]
        return P3OMetrics(torch.stack([*values, log_ratio_abs_max.detach().double()]))

    def __add__(self, other: P3OMetrics) -> P3OMetrics:
        if not isinstance(other, P3OMetrics):
            return NotImplemented
        return P3OMetrics(_merge(torch.stack([self.vector, other.vector])))

    def all_reduce(self, process_group: ProcessGroup) -> P3OMetrics:
        """Totals over ``process_group``: one collective, the same bits on every rank."""
        return P3OMetrics(_merge(gather_ranks(self.vector, process_group)))

    def means(self) -> dict[str, Tensor]:
        """Every metric as a 0-d float64 tensor on the device; nothing is read back.

        Averages are per valid token; ``valid_tokens`` and ``invalid_tokens`` are totals. Without tokens the
        averages are 0, and ess, cap and ratio_mean are 1.
        """
        sums = dict(zip(SUM_FIELDS, self.vector[:LOG_RATIO_ABS_MAX].unbind(), strict=True))
        count, sum_ratio = sums["num_tokens"], sums["sum_ratio"]
        empty = count == 0
        safe = torch.where(empty, 1.0, count)
        mean = {name: value / safe for name, value in sums.items()}
        ess = torch.where(empty, 1.0, mean["weighted_ess"])
        ratio_mean = torch.where(empty, 1.0, mean["sum_ratio"])
        variance = torch.where(empty, 0.0, mean["sum_ratio_sq"] - ratio_mean.square())
        kept = torch.where(sum_ratio > 0, sums["capped_ratio"] / torch.where(sum_ratio > 0, sum_ratio, 1.0), 1.0)
        return {
            "normalized_ess": ess,
            "adaptive_cap": ess,
            "ratio_mean": ratio_mean,
            "ratio_std": variance.clamp_min(0.0).sqrt(),
            "log_ratio_abs_mean": mean["log_ratio_abs"],
            "log_ratio_abs_max": self.vector[LOG_RATIO_ABS_MAX],
            "cap_fraction": mean["cap_hits"],
            "cap_removed_mass": 1.0 - kept,
            "clip_fraction": mean["clip_hits"],
            "score_loss": mean["score_loss"],
            "behavior_kl_proxy": mean["behavior_kl"],
            "adaptive_kl_loss": mean["adaptive_kl_loss"],
            "reference_kl": mean["reference_kl"],
            "entropy": mean["entropy"],
            "valid_tokens": count,
            "invalid_tokens": sums["invalid"],
            "total_loss": mean["total_loss"],
        }

    def to_dict(self, prefix: str = "p3o/") -> dict[str, float]:
        """``means()`` as Python numbers under ``prefix``: one host read for all of them."""
        means = self.means()
        values = torch.stack(list(means.values())).tolist()
        return {prefix + name: value for name, value in zip(means, values, strict=True)}


def _merge(rows: Tensor) -> Tensor:
    """[n, NUM_METRICS] -> [NUM_METRICS]: sums, and the maximum of the last column."""
    return torch.cat([rows[:, :LOG_RATIO_ABS_MAX].sum(0), rows[:, LOG_RATIO_ABS_MAX:].amax(0)])
