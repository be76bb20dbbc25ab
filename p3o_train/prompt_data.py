"""Prompts from a file of JSON lines, and the order in which they are asked.

{"prompt": "What is 2 + 3?", "label": "5"}
{"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "label": "5"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from p3o_train.random_state import named_generator


class PromptRecord(NamedTuple):
    """One line of the data."""

    input: str | tuple[Mapping[str, Any], ...]
    """Text, or the messages of a chat."""
    label: str
    """What a reward compares responses with."""
    where: str
    """File and line, for errors."""


class PromptSource(Protocol):
    """Prompts that depend on the number of the rollout alone, so that a resumed run asks the same ones."""

    def prompts(self, rollout_id: int, count: int) -> list[PromptRecord]: ...

    def evaluation_prompts(self, count: int) -> list[PromptRecord]: ...


def read_prompts(path: str | Path, *, input_key: str = "prompt", label_key: str = "label") -> list[PromptRecord]:
    """The lines of a file, in order.

    Args:
        path: UTF-8, one JSON object a line; keys other than these two are not looked at.
        input_key: of the prompt: a text that is not blank, or a list of messages with "role" and "content" as text.
        label_key: of the label, a text.

    Raises:
        ValueError: an empty file, a line that is not as above, or an object with one key twice, by file and line.
        OSError: a file that cannot be read.
    """
    lines = Path(path).read_bytes().split(b"\n")
    if lines[-1] == b"":  # after the end of the last line
        lines.pop()
    if not lines:
        raise ValueError(f"{path} is empty; expected one JSON object a line, with {input_key!r} and {label_key!r}")
    records = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        row = _parsed(line, where)
        for key in (input_key, label_key):
            if key not in row:
                raise ValueError(f"{where}: key {key!r} is missing, got {sorted(row)}; add it, or name another key")
        records.append(PromptRecord(_input(row[input_key], input_key, where), row[label_key], where))
        if not isinstance(records[-1].label, str):
            raise ValueError(
                f"{where}: {label_key!r} must be text, got {_short(row[label_key])}; write it in quotation marks"
            )
    return records


class PromptStream:
    """Endless prompts from records: every epoch asks each of them once, in an order of its own.

    Rollout n asks the ``count`` prompts from position n x ``count`` on, so with one ``count`` for the whole run none
    is left out, whether or not ``count`` divides the number of records.

    Args:
        records: what is asked in training.
        seed: of the order.
        evaluation: what ``evaluation_prompts`` gives, in this order.

    Raises:
        ValueError: no records; an input of ``evaluation`` that is asked in training as well.
    """

    def __init__(self, records: Sequence[PromptRecord], seed: int, evaluation: Sequence[PromptRecord] = ()) -> None:
        if not records:
            raise ValueError("records must hold at least one prompt, got none")
        asked = {_key(record): record.where for record in records}
        for record in evaluation:
            if _key(record) in asked:
                raise ValueError(
                    f"{record.where}: this evaluation prompt is asked in training as well, {asked[_key(record)]}; "
                    "remove one of the two"
                )
        self._records, self._seed, self._evaluation = tuple(records), seed, tuple(evaluation)

    def prompts(self, rollout_id: int, count: int) -> list[PromptRecord]:
        """The prompts of one rollout; depends on records, seed and arguments alone.

        Raises:
            ValueError: a negative ``rollout_id``, a ``count`` below 1.
        """
        if rollout_id < 0 or count < 1:
            raise ValueError(f"rollout_id must be >= 0 and count >= 1, got {rollout_id} and {count}")
        size, begin = len(self._records), rollout_id * count
        first, last = begin // size, (begin + count - 1) // size
        order = [place for epoch in range(first, last + 1) for place in self._order(epoch)]
        skipped = begin - first * size
        return [self._records[place] for place in order[skipped : skipped + count]]

    def evaluation_prompts(self, count: int) -> list[PromptRecord]:
        """The first ``count`` prompts of the evaluation, always the same.

        Raises:
            ValueError: more than there are.
        """
        if not 1 <= count <= len(self._evaluation):
            raise ValueError(
                f"count must be in [1, {len(self._evaluation)}], the number of evaluation prompts, got {count}; ask "
                "for fewer, or give the stream more"
            )
        return list(self._evaluation[:count])

    def _order(self, epoch: int) -> list[int]:
        generator = named_generator(self._seed, f"epoch {epoch}")
        order: list[int] = torch.randperm(len(self._records), generator=generator).tolist()
        return order


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
    except ValueError as error:
        raise ValueError(f"{where}: expected one JSON object, got {line[:80]!r} ({error}); repair the line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected one JSON object, got {_short(row)}; write keys and values in braces")
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return row


def _input(value: Any, key: str, where: str) -> str | tuple[Mapping[str, Any], ...]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return tuple(value)
    raise ValueError(
        f"{where}: {key!r} must be a text that is not blank, or a list of messages like "
        f'{{"role": "user", "content": "..."}}, got {_short(value)}; rewrite it'
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _key(record: PromptRecord) -> str:
    return json.dumps(record.input, sort_keys=True)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
