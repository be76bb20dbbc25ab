"""Which tokens a context-parallel rank owns, for whole micro-batches and for responses.

A packed micro-batch is numbered 0 .. sum of padded lengths - 1. A rank owns an ascending list of these positions,
whatever the order of its layout, so everything below is one index into the whole and two binary searches.

Response token j of a sample with L tokens, R of them response, is predicted by the row at L - R - 1 + j: an owner of
that row owns the response token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from p3o_train.types import ContextLayout, check_equal_lengths

_INT32_MAX = 2**31 - 1


def owned_positions(padded_lengths: Sequence[int], layout: ContextLayout) -> Tensor:
    """[T] int64, ascending: positions of the packed micro-batch that ``layout.cp_rank`` holds.

    Raises:
        ValueError: a length that the layout cannot cut evenly.
    """
    for length in padded_lengths:
        if length % layout.alignment:
            raise ValueError(
                f"a padded length of {length} is no multiple of {layout.alignment} (cp_size {layout.cp_size}, "
                f"tp_size {layout.tp_size}, {layout.order}); pad it to {layout.padded_length(length)}"
            )
    if layout.order == "contiguous":
        piece = sum(padded_lengths) // layout.cp_size
        return torch.arange(layout.cp_rank * piece, (layout.cp_rank + 1) * piece)
    pieces, begin = [torch.arange(0)], 0
    for length in padded_lengths:
        for first, last in _zigzag_ranges(length, layout):
            pieces.append(torch.arange(begin + first, begin + last))
        begin += length
    return torch.cat(pieces)


def _zigzag_ranges(length: int, layout: ContextLayout) -> list[tuple[int, int]]:
    if layout.cp_size == 1:
        return [(0, length)]
    chunk = length // (2 * layout.cp_size)
    return [(chunk * index, chunk * (index + 1)) for index in (layout.cp_rank, 2 * layout.cp_size - 1 - layout.cp_rank)]


def owned_responses(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    layout: ContextLayout,
    padded_lengths: Sequence[int] | None = None,
) -> list[Tensor]:
    """For every sample the response tokens that this rank owns, as ascending indices into [0, R).

    Args:
        total_lengths, response_lengths: L and R of every sample, in packed order.
        layout: the rank.
        padded_lengths: what the sequences were padded to. None: as little as ``layout`` allows.

    Raises:
        ValueError: lists of unequal length; a response that leaves no prompt token; a padded length that is too short
            or cannot be cut evenly.
    """
    if padded_lengths is None:
        padded_lengths = [layout.padded_length(length) for length in total_lengths]
    named = {"total_lengths": total_lengths, "response_lengths": response_lengths, "padded_lengths": padded_lengths}
    check_equal_lengths(named)
    owned, begin, result = owned_positions(padded_lengths, layout), 0, []
    for total, response, padded in zip(total_lengths, response_lengths, padded_lengths, strict=True):
        if not 0 <= response < total <= padded:
            raise ValueError(
                f"0 <= response_length < total_length <= padded_length must hold, got {response}, {total} and {padded}"
            )
        first_row = begin + total - response - 1
        low, high = torch.searchsorted(owned, torch.tensor([first_row, first_row + response])).tolist()
        result.append(owned[low:high] - first_row)
        begin += padded
    return result


def local_valid_mask(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    valid_masks: Sequence[Tensor],
    layout: ContextLayout,
    padded_lengths: Sequence[int] | None = None,
) -> Tensor:
    """One-dimensional bool over this rank's response tokens, sample after sample; its sum is their exact count.

    Args:
        valid_masks: [R] bool of every sample. The other arguments are those of ``owned_responses``.

    Raises:
        ValueError: as ``owned_responses``; a mask whose length is not its response length.
    """
    named = {"total_lengths": total_lengths, "response_lengths": response_lengths, "valid_masks": valid_masks}
    check_equal_lengths(named)
    for index, (mask, response) in enumerate(zip(valid_masks, response_lengths, strict=True)):
        if mask.shape != (response,):
            raise ValueError(f"valid_masks[{index}] has shape {tuple(mask.shape)}, but response_length is {response}")
    owned = owned_responses(total_lengths, response_lengths, layout, padded_lengths)
    pieces = [mask.bool()[index.to(mask.device)] for mask, index in zip(valid_masks, owned, strict=True)]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.bool)


def offsets(lengths: Sequence[int]) -> Tensor:
    """[B + 1] int32: where packed sequences of these lengths begin and end.

    Raises:
        ValueError: more tokens than int32 can number.
    """
    total = sum(lengths)
    if total > _INT32_MAX:
        raise ValueError(
            f"{total} packed tokens exceed {_INT32_MAX}, the range of cu_seqlens; use smaller micro-batches"
        )
    return torch.tensor([0, *lengths]).cumsum(0).int()


def local_offsets(padded_lengths: Sequence[int], layout: ContextLayout) -> Tensor:
    """[B + 1] int32: where each sequence begins and ends among the tokens that this rank holds."""
    return torch.searchsorted(owned_positions(padded_lengths, layout), offsets(padded_lengths).long()).int()
