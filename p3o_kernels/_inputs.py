"""What one token-loss call consists of, once checked: the form in which ``p3o_loss`` hands it to a backend."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Tensors of one call: [T] float32 unless stated, contiguous, one device."""

    log_probs: Tensor
    behavior_log_probs: Tensor
    advantages: Tensor
    """[T], or [B] together with ``cu_seqlens``."""
    mask: Tensor | None
    """[T] bool; None: every token is valid."""
    cu_seqlens: Tensor | None
    """[B + 1] int32."""
    ess: Tensor | None
    """[] float64, the frozen e of a context; None: e from this call's tokens."""
    reference_log_probs: Tensor | None
    entropy: Tensor | None
    divisor: Tensor | None
    """[] float64, num_tokens given as a tensor."""


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Numbers of one call."""

    num_tokens: int
    """num_tokens given as an int, else 0."""
    reduction: str
    kl_mode: str
    clip_low: float
    clip_high: float
    reference_coef: float
    entropy_coef: float

    def log_clip_bounds(self) -> tuple[float, float]:
        """The clip margins as bounds of l, so that the clip fraction needs no exponential."""
        low = math.log1p(-self.clip_low) if self.clip_low < 1.0 else -math.inf
        return low, math.log1p(self.clip_high)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What a backend returns."""

    loss: Tensor
    """[] float32, or [T] float32 for reduction "none"."""
    token_grad: Tensor
    """[T] float32: g, not yet scaled."""
    scale: Tensor
    """[] float64: d loss / d (sum of L)."""
    summary: Tensor
    """[SUMMARY_SIZE] float64, fields of ``_summary``."""
    count: Tensor
    """[] int64: valid tokens of this call."""
