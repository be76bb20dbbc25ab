"""What is asked and what responses are worth: a toy without words, prompts of a user, and sums for a language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from p3o_train.prompt_data import PromptRecord, PromptSource
from p3o_train.random_state import named_generator
from p3o_train.reward_workers import RewardWorkers

EVALUATION = "evaluation prompts"


class Prompt(NamedTuple):
    """One question."""

    token_ids: tuple[int, ...]
    label: str
    """What responses are compared with, for people and rewards."""


class Task(Protocol):
    """Prompts that depend on the number of the rollout alone, so that a resumed run asks the same ones."""

    @property
    def vocab_size(self) -> int:
        """Tokens that prompts are made of are below it; a model may have more."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """A response ends with the first of these."""

    @property
    def pad_token_id(self) -> int:
        """Fills up sequences; where it stands nothing counts."""

    @property
    def reward_failures(self) -> int:
        """Rewards so far that failed and were taken for 0, which a task does only where it was asked to."""

    def prompts(self, rollout_id: int, count: int) -> list[Prompt]:
        """What one rollout asks."""

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The same prompts whenever they are asked for, from a stream that no rollout draws from."""

    def rewards(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]], names: Sequence[str]
    ) -> list[float]:
        """One for each response.

        Args:
            prompts: one for each response, so that some stand here more than once.
            responses: token ids, the stop token included where there is one.
            names: of the samples, for errors.
        """

    def close(self) -> None:
        """Gives back what the task holds, such as processes."""


@dataclass(frozen=True)
class ReverseDigits:
    """Say some digits backwards: "3 1 =" asks for "1 3 <end>".

    Tokens 0 to 9 are the digits, 10 is "=", 11 the end of a response, 12 padding; 16 entries, so that up to 16
    tensor-parallel ranks can share them. There are few numbers, so evaluation meets those of training again.
    """

    digits: int = 2
    seed: int = 0

    vocab_size = 16
    end_token_id = 11
    stop_token_ids = (end_token_id,)
    reward_failures = 0
    pad_token_id = 12

    def prompts(self, rollout_id: int, count: int) -> list[Prompt]:
        """``count`` random numbers, drawn from the seed and the rollout."""
        return self._drawn(f"prompts of rollout {rollout_id}", count)

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """``count`` random numbers, drawn from the seed."""
        return self._drawn(EVALUATION, count)

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """The share of positions that are right, in [0, 1]; a response that is too long loses what it exceeds."""
        answer = (*reversed(prompt.token_ids[:-1]), self.end_token_id)
        right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
        return right / max(len(response), len(answer))

    def rewards(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]], names: Sequence[str]
    ) -> list[float]:
        """``reward`` of each."""
        return [self.reward(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    def close(self) -> None:
        """Nothing is held."""

    def _drawn(self, stream: str, count: int) -> list[Prompt]:
        drawn = torch.randint(10, (count, self.digits), generator=named_generator(self.seed, stream)).tolist()
        return [Prompt((*row, 10), "".join(map(str, reversed(row)))) for row in drawn]


class TextTask:
    """Prompts of text or chat for a model with a tokenizer.

    Args:
        source: the prompts and labels, such as a ``PromptStream``.
        tokenizer: one of transformers.
        workers: compute the rewards from the text of responses, without special tokens; ``close`` closes them.
        apply_chat_template: prompts become chats that the model answers; a text is what the user says. False: texts
            are continued as they are, with the special tokens that the tokenizer adds itself.
        stop_token_ids: end a response. None: the end token of the tokenizer.

    Raises:
        ValueError: a tokenizer without an end token, or without a chat template where one is to be applied.
    """

    def __init__(
        self,
        source: PromptSource,
        tokenizer: Any,
        workers: RewardWorkers,
        *,
        apply_chat_template: bool,
        stop_token_ids: Sequence[int] | None = None,
    ) -> None:
        end = tokenizer.eos_token_id
        if end is None and not stop_token_ids:
            raise ValueError("the tokenizer has no end token (eos_token_id is None); pass stop_token_ids")
        if apply_chat_template and not tokenizer.chat_template:
            raise ValueError(
                "apply_chat_template=True, but the tokenizer has no chat template; set tokenizer.chat_template, or "
                "pass False to continue texts as they are"
            )
        self.stop_token_ids = (end,) if stop_token_ids is None else tuple(stop_token_ids)
        self.vocab_size = len(tokenizer)
        # never read, so that any token will do
        self.pad_token_id = self.stop_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._source, self._tokenizer, self._workers = source, tokenizer, workers
        self._chat = apply_chat_template

    @property
    def reward_failures(self) -> int:
        """As ``RewardWorkers.failures``."""
        return self._workers.failures

    def prompts(self, rollout_id: int, count: int) -> list[Prompt]:
        """What the source asks in this rollout, as tokens.

        Raises:
            ValueError: messages of a chat without ``apply_chat_template``, by file and line.
        """
        return [self._encoded(record) for record in self._source.prompts(rollout_id, count)]

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The first evaluation prompts of the source, as tokens."""
        return [self._encoded(record) for record in self._source.evaluation_prompts(count)]

    def rewards(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]], names: Sequence[str]
    ) -> list[float]:
        """One for each response, all at once.

        Raises:
            RewardFailed: see ``RewardWorkers.score``.
        """
        texts = [self._tokenizer.decode(list(response), skip_special_tokens=True) for response in responses]
        labels = [prompt.label for prompt in prompts]
        return self._workers.score(list(zip(texts, labels, strict=True)), names)

    def close(self) -> None:
        """Ends the workers."""
        self._workers.close()

    def _encoded(self, record: PromptRecord) -> Prompt:
        if self._chat:
            messages = [{"role": "user", "content": record.input}] if isinstance(record.input, str) else record.input
            ids = self._tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
            )
        elif isinstance(record.input, str):
            ids = self._tokenizer(record.input)["input_ids"]
        else:
            raise ValueError(f"{record.where}: the prompt is a chat; set apply_chat_template=True, or write it as text")
        return Prompt(tuple(ids), record.label)


class DigitSums(TextTask):
    """Sums of two digits after two examples, "2+3=5\\n4+1=5\\n3+4=", for a small language model as it is.

    The response ends with its line. There are a hundred sums, so evaluation meets those of training again, after other
    examples.

    Args:
        tokenizer: one of transformers, in which the end of a line is a token.
        seed: of the sums.

    Raises:
        ValueError: a tokenizer in which it is not.
    """

    def __init__(self, tokenizer: Any, seed: int = 0) -> None:
        line_end = tokenizer.encode("\n", add_special_tokens=False)
        if len(line_end) != 1:
            raise ValueError(f"the end of a line must be one token, got {line_end}; use another tokenizer or task")
        end = tokenizer.eos_token_id
        super().__init__(
            _Sums(seed),
            tokenizer,
            RewardWorkers("digits"),
            apply_chat_template=False,
            stop_token_ids=(line_end[0], *([] if end is None else [end])),
        )


@dataclass(frozen=True)
class _Sums:
    seed: int

    examples = 2

    def prompts(self, rollout_id: int, count: int) -> list[PromptRecord]:
        return self._drawn(f"prompts of rollout {rollout_id}", count)

    def evaluation_prompts(self, count: int) -> list[PromptRecord]:
        return self._drawn(EVALUATION, count)

    def _drawn(self, stream: str, count: int) -> list[PromptRecord]:
        shape = (count, self.examples + 1, 2)
        drawn = torch.randint(10, shape, generator=named_generator(self.seed, stream)).tolist()
        return [
            PromptRecord(
                "".join(f"{a}+{b}={a + b}\n" for a, b in sums[:-1]) + "{}+{}=".format(*sums[-1]),
                str(sum(sums[-1])),
                f"{stream}, number {index}",
            )
            for index, sums in enumerate(drawn)
        ]
