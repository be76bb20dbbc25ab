"""What the trainer asks of whatever samples responses: a model in this process, or a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from p3o_train.recording import Request, Response, Sampling


class RolloutEngine(Protocol):
    """Samples responses and takes new weights; used by one thread at a time."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """One response for each request, in their order.

        Raises:
            RolloutFailed: a request that could not be answered; what was finished is in the error.
        """

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Samples with these from now on.

        Args:
            weights: full parameters of the whole model by their Hugging Face names.
            version: goes into the version spans of later responses.
        """

    def close(self) -> None:
        """Gives back what the engine holds; it is not used afterwards."""


class EngineError(RuntimeError):
    """An engine that does not do what it is asked; the text names it."""


class RolloutFailed(EngineError):
    """Some requests were not answered."""

    def __init__(self, message: str, finished: Mapping[int, Response]) -> None:
        super().__init__(message)
        self.finished = dict(finished)
        """Index of the request -> its response, for those that were answered."""

    def __reduce__(self) -> tuple[type[RolloutFailed], tuple[str, dict[int, Response]]]:
        return type(self), (str(self), self.finished)
