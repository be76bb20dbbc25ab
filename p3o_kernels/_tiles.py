"""How [T, V] logits are cut into pieces that fit a workspace, and which rows of them are worth computing."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

COLUMN_MULTIPLE = 64  # keeps every piece but the last on a boundary that GEMMs like
ROW_MULTIPLE = 16
MIN_COLUMNS = 1024  # narrower pieces starve a GEMM: then tokens are cut as well, to ROW_MULTIPLE at the least


class Tiles(NamedTuple):
    """At most ``rows`` x ``columns`` logits at a time."""

    rows: int
    columns: int


def _pieces(total: int, limit: int, multiple: int) -> int:
    """The size of equal pieces of at most ``limit``, a multiple of ``multiple`` where ``limit`` allows."""
    if total <= limit:
        return total
    limit = max(limit // multiple * multiple, 1) if limit >= multiple else limit
    pieces = -(-total // limit)
    return min(-(-total // pieces // multiple) * multiple, limit)


def vocabulary_tiles(tokens: int, vocab: int, itemsize: int, budget: int) -> Tiles:
    """All tokens and a part of the vocabulary; tokens are cut only where the parts would become too narrow."""
    tokens = max(tokens, 1)
    columns = budget // (tokens * itemsize)
    if columns >= min(vocab, MIN_COLUMNS):
        return Tiles(tokens, _pieces(vocab, columns, COLUMN_MULTIPLE))
    columns = min(vocab, MIN_COLUMNS)
    return Tiles(_pieces(tokens, max(budget // (columns * itemsize), ROW_MULTIPLE), ROW_MULTIPLE), columns)


def token_tiles(tokens: int, vocab: int, itemsize: int, budget: int) -> Tiles:
    """The whole vocabulary and some of the tokens."""
    return Tiles(_pieces(max(tokens, 1), max(budget // (vocab * itemsize), 1), ROW_MULTIPLE), vocab)


def ranges(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


class RowIndex(NamedTuple):
    """The rows that are worth computing."""

    rows: Tensor
    """int64, ascending; T where it is padded."""
    padded: bool

    def mask(self, rows: Tensor, num_rows: int) -> Tensor | None:
        """[rows] bool: False in the padding; None without padding."""
        return rows < num_rows if self.padded else None


def valid_rows(mask: Tensor | None, valid_tokens: int | None) -> RowIndex | None:
    """The rows with mask True, or None: compute all of them.

    The count decides the size of the GEMMs. Reading it from a GPU would wait for the GPU, so there it has to be
    given as ``valid_tokens``; the index is padded where fewer rows are valid.
    """
    if mask is None:
        return None
    if valid_tokens is not None:
        return RowIndex(torch.nonzero_static(mask, size=valid_tokens, fill_value=mask.numel())[:, 0], padded=True)
    if mask.is_cuda or bool(mask.all()):
        return None
    return RowIndex(mask.nonzero()[:, 0], padded=False)
