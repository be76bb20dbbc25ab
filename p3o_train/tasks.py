"""Where prompts come from and what a response is worth, and the toy task of the preset ``tiny``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from p3o_train.random_state import named_generator


class Prompt(NamedTuple):
    """One question."""

    token_ids: tuple[int, ...]
    answer: tuple[int, ...]
    """The response that would earn everything, with its end token."""


class Task(Protocol):
    """Prompts that depend on the number of the rollout alone, so that a resumed run asks the same ones."""

    vocab_size: int
    end_token_id: int
    pad_token_id: int

    def prompts(self, rollout_id: int, count: int) -> list[Prompt]: ...

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float: ...


@dataclass(frozen=True)
class ReverseDigits:
    """Say some digits backwards: "3 1 =" asks for "1 3 <end>".

    Tokens 0 to 9 are the digits, 10 is "=", 11 the end of a response, 12 padding; 16 entries, so that up to 16
    tensor-parallel ranks can share them.
    """

    digits: int = 2
    seed: int = 0

    vocab_size = 16
    end_token_id = 11
    pad_token_id = 12

    def prompts(self, rollout_id: int, count: int) -> list[Prompt]:
        """``count`` random numbers, drawn from the seed and the rollout."""
        generator = named_generator(self.seed, f"prompts of rollout {rollout_id}")
        drawn = torch.randint(10, (count, self.digits), generator=generator).tolist()
        return [Prompt((*row, 10), (*reversed(row), self.end_token_id)) for row in drawn]

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """The share of positions that are right, in [0, 1]; a response that is too long loses what it exceeds."""
        right = sum(given == wanted for given, wanted in zip(response, prompt.answer, strict=False))
        return right / max(len(response), len(prompt.answer))
