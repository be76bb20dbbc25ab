"""Actions of the host, such as writing a file, whose outcome every rank must know before any goes on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def everywhere(action: Callable[[], T]) -> list[T]:
    """Runs ``action`` on every rank of the default group, or alone without one; the results in the order of ranks.

    Every rank calls; results must be picklable.

    Raises:
        Exception: what the first rank that failed raised, on every rank alike, when all are through.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # raised below, on every rank
        failure = error
    outcomes: list[Any] = [(result, failure)]
    if dist.is_initialized():
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (result, failure and _portable(failure)))
    for _, first in outcomes:
        if first is not None:
            raise first from failure
    return [made for made, _ in outcomes]


def on_first_rank(action: Callable[[], object]) -> None:
    """Runs ``action`` on the first rank, while the others wait; what it raises, every rank raises."""

    def run() -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            action()

    everywhere(run)


def _portable(error: Exception) -> Exception:
    """The error, or one with its text where it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does when it is made anew
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
