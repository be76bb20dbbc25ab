"""What a vocabulary operation needs besides the logits, and what it leaves for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from p3o_kernels._inputs import LossOptions, TokenInputs

PARTIAL_SIZE = 4  # numbers of a row that one part of the vocabulary hands on: m, d, label, w


@dataclass(frozen=True, slots=True)
class Rows:
    """T rows of logits over the vocabulary entries [vocab_start, vocab_start + V)."""

    labels: Tensor
    """[T] int64, counted over the whole vocabulary."""
    mask: Tensor | None
    """[T] bool; rows with False are skipped. None: every row counts."""
    row_temperature: Tensor | None
    """[T] float32; None: ``temperature`` for every row."""
    temperature: float
    softcap: float
    """0: none."""
    vocab_start: int
    entropy: bool
    """Whether H is wanted."""

    def part(self, rows: slice | Tensor, mask: Tensor | None = None) -> Rows:
        """Some of the rows, by a slice or, with the mask that belongs to it, by an index of valid rows."""
        if isinstance(rows, slice) and self.mask is not None:
            mask = self.mask[rows]
        row_temperature = None if self.row_temperature is None else self.row_temperature[rows]
        return replace(self, labels=self.labels[rows], mask=mask, row_temperature=row_temperature)

    def shard(self, columns: int) -> Rows:
        """The same rows over a part of the vocabulary that starts ``columns`` further on."""
        return replace(self, vocab_start=self.vocab_start + columns)


@dataclass(frozen=True, slots=True)
class RowValues:
    """What a row of logits comes down to; all [T], 0 where the mask is False."""

    log_probs: Tensor
    """float32: lp of the label, -inf for a label that the vocabulary does not have."""
    entropy: Tensor
    """float32: H, or [0] when it was not asked for."""
    normalizer: Tensor
    """float32: log-sum-exp of the row, in the unit of the backend that made it."""
    normalizer_low: Tensor
    """float16: what float32 cannot hold of it; without it a large common offset would cost digits."""

    def part(self, rows: slice | Tensor) -> RowValues:
        entropy = self.entropy[rows] if self.entropy.numel() else self.entropy
        return RowValues(self.log_probs[rows], entropy, self.normalizer[rows], self.normalizer_low[rows])


@dataclass(frozen=True, slots=True)
class RowGrads:
    """Gradients that arrive at the values: float32 [T], any stride, 0 included."""

    log_probs: Tensor
    entropy: Tensor | None

    def part(self, rows: slice | Tensor) -> RowGrads:
        return RowGrads(self.log_probs[rows], None if self.entropy is None else self.entropy[rows])


class RowBackend(Protocol):
    """What ``_row_launch`` and ``_row_eager`` both offer. ``out`` may be the memory of ``logits``."""

    def row_values(self, logits: Tensor, rows: Rows) -> RowValues: ...

    def row_partials(self, logits: Tensor, rows: Rows) -> Tensor: ...

    def merge_partials(self, partials: Tensor, rows: Rows) -> Tensor: ...

    def finish_partials(self, partials: Tensor, rows: Rows) -> RowValues: ...

    def row_grad(self, logits: Tensor, out: Tensor, rows: Rows, values: RowValues, grads: RowGrads) -> None: ...

    def row_loss(
        self, logits: Tensor, out: Tensor, rows: Rows, tokens: TokenInputs, options: LossOptions, scale: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def scale_rows(self, grad: Tensor, factor: Tensor) -> None: ...

    def empty_like_rows(self, logits: Tensor) -> Tensor: ...
