"""What the adapters share: an e that reaches a loss function by no argument, rows of many samples, names of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from p3o_kernels import ESSContext, P3OMetrics, RatioStats
from p3o_train.step import NO_TOKENS

SLIME_NAMES = {"score_loss": "pg_loss", "clip_fraction": "pg_clipfrac", "entropy": "entropy_loss"}
VERL_NAMES = {"clip_fraction": "actor/pg_clipfrac", "behavior_kl_proxy": "actor/ppo_kl"}
"""Metric of ours -> what dashboards of that framework call it."""

_OVER_TOKENS = (
    "normalized_ess",
    "ratio_mean",
    "log_ratio_abs_mean",
    "cap_fraction",
    "clip_fraction",
    "score_loss",
    "behavior_kl_proxy",
    "adaptive_kl_loss",
    "reference_kl",
    "entropy",
    "total_loss",
)
"""Metrics that are a sum over tokens divided by their number: a standard deviation or a total is not."""


@dataclass(frozen=True)
class LossSettings:
    """Of ``p3o_kernels.p3o_loss``, the arguments of these names."""

    kl_mode: str = "proxy_safe"
    clip_low: float = 0.2
    clip_high: float = 0.2

    def keywords(self) -> dict[str, Any]:
        return vars(self).copy()


class Slot:
    """Holds what a hook has found out about a step until the loss function, which shares no argument with it, asks.

    One for each framework and process. Whoever publishes withdraws: what an earlier step left is of other weights.
    """

    def __init__(self, repair: str) -> None:
        """``repair``: what to do where nothing was published, for the error."""
        self._repair = repair
        self._content: Any = None

    def publish(self, content: Any) -> None:
        self._content = content

    def withdraw(self) -> None:
        self._content = None

    def get(self) -> Any:
        """What was published, or None."""
        return self._content

    def require(self) -> Any:
        """What was published.

        Raises:
            RuntimeError: nothing was.
        """
        if self._content is None:
            raise RuntimeError(
                f"the loss needs the frozen e of this optimizer step, but none was published; {self._repair}"
            )
        return self._content


def freeze(stats: RatioStats) -> ESSContext:
    """e of a whole step from its total sums. One host read.

    Raises:
        ValueError: invalid data.
        RuntimeError: no valid token.
    """
    context = stats.to_context(validate=True)
    if context.num_tokens == 0:
        raise RuntimeError(NO_TOKENS)
    return context


def joined(named: Mapping[str, Sequence[Tensor] | None], tokens: int) -> dict[str, Tensor]:
    """[tokens] of each list of one-dimensional tensors, sample after sample.

    Raises:
        ValueError: a list that is missing or has another number of tokens, by name.
    """
    rows = {}
    for name, pieces in named.items():
        if pieces is None:
            raise ValueError(f"{name} is missing from the batch: P3O needs it for every sample")
        rows[name] = torch.cat(list(pieces)) if len(pieces) else torch.zeros(0)
        if rows[name].shape != (tokens,):
            raise ValueError(
                f"{name} has {tuple(rows[name].shape)} tokens on this rank, but the loss masks have {tokens}: one "
                "entry for every response token that this rank holds is needed, and nothing is cut to the shortest"
            )
    return rows


def check_same_shape(**tensors: Tensor) -> None:
    """That nothing would be broadcast.

    Raises:
        ValueError: naming every shape.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes must be equal, got {shapes}")


def metric_sums(metrics: P3OMetrics, mirror: Mapping[str, str], scale: float | Tensor = 1.0) -> dict[str, Tensor]:
    """0-d float32 token sums under p3o/ and, those in ``mirror``, under the framework's name too; no host read.

    For frameworks that add the values of micro-batches and ranks and divide by their token count of the step.

    Args:
        scale: multiplies every sum, where that count is another than ours.
    """
    means = metrics.means()
    sums = {name: (means[name] * means["valid_tokens"] * scale).float() for name in _OVER_TOKENS}
    return {f"p3o/{name}": value for name, value in sums.items()} | {mirror[name]: sums[name] for name in mirror}
