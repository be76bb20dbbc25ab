"""Running the micro-batches of a step twice: what the pre-pass takes is given back, and both passes see the same.

Step scope needs e before the first gradient, so a pass without gradients goes over the micro-batches first. It may
leave no trace: ``replayed`` restores every iterator and every random stream, also when the pass raises.
``ReplayCheck`` compares the token ids of the two passes afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from p3o_train.random_state import random_states, set_random_states
from p3o_train.types import PackedBatch


@runtime_checkable
class Replayable(Protocol):
    """An iterator that can go back to where it was."""

    def snapshot_position(self) -> object: ...

    def restore_position(self, position: Any) -> None: ...


class MicroBatches:
    """The micro-batches of a step as an iterator that can be replayed."""

    def __init__(self, batches: Sequence[PackedBatch]) -> None:
        self.batches = batches
        """All of them, seen or not."""
        self._position = 0

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> PackedBatch:
        if self._position >= len(self.batches):
            raise StopIteration
        self._position += 1
        return self.batches[self._position - 1]

    def snapshot_position(self) -> int:
        """How many micro-batches were taken."""
        return self._position

    def restore_position(self, position: int) -> None:
        """Goes back (or forward) to ``position``.

        Raises:
            ValueError: a position that the step does not have.
        """
        if not 0 <= position <= len(self.batches):
            raise ValueError(f"position must be between 0 and {len(self.batches)}, got {position}")
        self._position = position


@contextlib.contextmanager
def replayed(iterators: object) -> Iterator[None]:
    """Restores iterators and random streams on the way out, whether the body raised or not.

    Args:
        iterators: what a Megatron schedule takes: one iterator, a list with one for each virtual stage (the same one
            may stand there several times), or None on stages that read no data.

    Restored: the position of each iterator (that it had on entry, not the start), ``random``, numpy's global stream,
    torch on the CPU and on every CUDA device, and Megatron's tracker of CUDA streams, as far as each is in use.

    Raises:
        RuntimeError: an iterator without ``snapshot_position`` and ``restore_position``; nothing has been read then.
    """
    positions = [(iterator, iterator.snapshot_position()) for iterator in _replayable(iterators)]
    states = random_states()
    try:
        yield
    finally:
        for iterator, position in positions:
            iterator.restore_position(position)
        set_random_states(states)


def _replayable(iterators: object) -> list[Replayable]:
    listed = iterators if isinstance(iterators, (list, tuple)) else [iterators]
    unique: dict[int, Replayable] = {}
    for iterator in listed:
        if iterator is None:
            continue
        if not isinstance(iterator, Replayable):
            raise RuntimeError(
                f"the data iterator {type(iterator).__name__} is not replayable: step scope reads every micro-batch "
                "twice, so it needs snapshot_position() and restore_position(); wrap the batches in MicroBatches, or "
                "use --p3o-ess-scope micro-batch for a streaming iterator"
            )
        unique[id(iterator)] = iterator
    return list(unique.values())


class ReplayCheck:
    """Proves that both passes saw the same tokens in the same order, at the price of a few numbers a micro-batch."""

    def __init__(self, first: Sequence[Tensor] = ()) -> None:
        """``first``: the notes of an earlier first pass."""
        self._first, self._second = list(first), list[Tensor]()

    @property
    def first(self) -> tuple[Tensor, ...]:
        """Notes of the first pass: [3] int64 for each micro-batch."""
        return tuple(self._first)

    def record_first(self, batch: PackedBatch) -> None:
        """Notes one micro-batch of the first pass; on the device, nothing is read back."""
        self._first.append(_fingerprint(batch))

    def record_second(self, batch: PackedBatch) -> None:
        """Notes one of the second pass."""
        self._second.append(_fingerprint(batch))

    def verify(self) -> None:
        """Compares the passes; one host read.

        Raises:
            RuntimeError: another number of micro-batches, or the first one whose tokens differ.
        """
        if len(self._first) != len(self._second):
            raise RuntimeError(
                f"the pre-pass saw {len(self._first)} micro-batches and the training pass {len(self._second)}: "
                "both must run the same schedule over the same data"
            )
        if not self._first:
            return
        differs = (torch.stack(self._first) != torch.stack(self._second)).any(1).nonzero()
        if differs.numel():
            raise RuntimeError(
                f"micro-batch {int(differs[0])} of the training pass holds other tokens than in the pre-pass, so its "
                "ESS belongs to other data: the data iterator must give the same micro-batches again"
            )


def _fingerprint(batch: PackedBatch) -> Tensor:
    """[3] int64: the token count, and two sums that depend on the order of the tokens; int64 wraps around."""
    tokens = batch.tokens.to(torch.int64)
    position = torch.arange(1, tokens.numel() + 1, device=tokens.device)
    mixed = (tokens + 1) * (2 * position + 1) * 6364136223846793005
    count = torch.full((), tokens.numel(), device=tokens.device)
    return torch.stack([count, mixed.sum(), (mixed ^ (mixed >> 29)).sum()])
