"""How many tokens of a step have which log-ratio l = log-prob - behavior log-prob, in fixed bins.

The bins double, or a little more, from 0.001 to 10 nats on both sides of 0, so the same ones show bfloat16 roundings
and policies that are far apart. The edges never depend on data: counts of ranks, steps and runs add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from p3o_train.types import PackedBatch

_SIDE = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
EDGES = (*(-edge for edge in reversed(_SIDE)), *_SIDE)
"""Bin k holds EDGES[k - 1] <= l < EDGES[k]; the first and the last one are open."""
NUM_BINS = len(EDGES) + 1
PREFIX = "train/ratio_histogram/"
"""Of the names of counts among the numbers of a step."""
_NAMES = tuple(f"{lower:g}" for lower in (-math.inf, *EDGES))


class RatioHistogram:
    """Counts over the micro-batches of this rank, on the device; nothing is read back."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._edges: Tensor | None = None

    @property
    def counts(self) -> Tensor | None:
        """[NUM_BINS] int64; None before anything was added."""
        return self._counts

    def add(self, log_probs: Tensor, batch: PackedBatch) -> None:
        """The valid tokens of one micro-batch, with [T] log-probs of the current policy."""
        # float32 would round the difference, and move tokens over an edge
        log_ratio = log_probs.detach().double() - batch.behavior_log_probs.double()
        if self._counts is None or self._edges is None:
            self._counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=log_ratio.device)
            self._edges = torch.tensor(EDGES, dtype=torch.float64, device=log_ratio.device)
        bins = torch.bucketize(torch.where(batch.mask, log_ratio, 0.0), self._edges, right=True)
        # whole numbers, so that the order of the additions does not matter; bincount would read back
        self._counts.index_add_(0, bins, batch.mask.long())


def named_counts(counts: Sequence[float]) -> dict[str, float]:
    """The counts that are not 0 under ``PREFIX`` and the lower edge of their bin: "-inf", "-10", ... "10"."""
    return {PREFIX + name: count for name, count in zip(_NAMES, counts, strict=True) if count}


def counts_of(named: Mapping[str, float]) -> list[float]:
    """[NUM_BINS] counts from those by lower edge, 0 where there is none.

    Raises:
        ValueError: a name that is no lower edge.
    """
    if unknown := sorted(named.keys() - set(_NAMES)):
        raise ValueError(f"bins must begin at one of {', '.join(_NAMES)}; got {', '.join(unknown)}")
    return [named.get(name, 0.0) for name in _NAMES]
