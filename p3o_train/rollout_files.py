"""The samples of a rollout as a file of JSON lines, from which they come back bit for bit.

    DIR/rollout_0000012.jsonl           a whole rollout
    DIR/rollout_0000012.partial.jsonl   what there was of one that could not be finished; never taken for a whole one

The first line is a header, ``{"format": "p3o-rollout", "format_version": 1, "rollout_id": 12, "num_samples": 64,
"partial": false, ...}`` with the fields of the caller; then follows one sample a line. ``response_rollout_log_probs``
are behavior log-probs: JSON numbers that are the float32 exactly, null for NaN. ``response_rollout_log_probs_mask`` is
the pairing mask, left out where a sample has none. Masks are lists of 0 and 1. JSON has no infinity: it is the text
"inf" or "-inf" here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p3o_train.recording import Recording, Sampling, VersionSpan
from p3o_train.types import Sample

FORMAT, FORMAT_VERSION = "p3o-rollout", 1
_NAME = re.compile(r"rollout_(\d{7,})(\.partial)?\.jsonl")
_OWN_FIELDS = ("format", "format_version", "rollout_id", "num_samples", "partial")
_SAMPLE_FIELDS = {
    "sample_id",
    "group_id",
    "reward",
    "is_dummy",
    "prompt_token_ids",
    "response_token_ids",
    "response_rollout_log_probs",
    "loss_mask",
    "recording",
}
_PAIRING = "response_rollout_log_probs_mask"


class RolloutFileError(ValueError):
    """A file that is no rollout of this run any more; the text names file, line and remedy."""


def rollout_path(directory: str | os.PathLike[str], rollout_id: int, *, partial: bool = False) -> Path:
    """Where the file of a rollout is."""
    return Path(directory) / f"rollout_{rollout_id:07d}{'.partial' if partial else ''}.jsonl"


def has_rollout(directory: str | os.PathLike[str], rollout_id: int) -> bool:
    """Whether there is a file of the whole rollout."""
    return rollout_path(directory, rollout_id).is_file()


def rollout_ids(directory: str | os.PathLike[str]) -> list[int]:
    """The whole rollouts in a directory, ascending; none where there is no directory."""
    return sorted(_found(directory, partial=False))


def partial_rollouts(directory: str | os.PathLike[str]) -> list[int]:
    """The rollouts in a directory of which there is a partial file and no whole one, ascending."""
    return sorted(_found(directory, partial=True) - _found(directory, partial=False))


def _found(directory: str | os.PathLike[str], *, partial: bool) -> set[int]:
    folder = Path(directory)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = filter(None, map(_NAME.fullmatch, names))
    return {int(match[1]) for match in matches if bool(match[2]) == partial}


def write_rollout(
    directory: str | os.PathLike[str],
    rollout_id: int,
    samples: Sequence[Sample],
    header: Mapping[str, Any],
    *,
    partial: bool = False,
) -> Path:
    """Writes all samples or, when it is interrupted, nothing: beside the file, put on disk, then renamed.

    A file of the same rollout is replaced. The directory is made if needed.

    Args:
        header: fields for the first line, such as the identity of the run; what JSON holds, tuples become lists.
        partial: not all samples of the rollout are there.

    Raises:
        ValueError: a negative ``rollout_id``, a field of the header whose name is taken, a value that JSON does not
            hold, by its name. Nothing is written then.
    """
    if rollout_id < 0:
        raise ValueError(f"rollout_id must be >= 0, got {rollout_id}")
    if taken := sorted(set(_OWN_FIELDS) & set(header)):
        raise ValueError(f"header must not have {taken}, which are written anyway; choose other names")
    values = (FORMAT, FORMAT_VERSION, rollout_id, len(samples), partial)
    lines = [_line(dict(zip(_OWN_FIELDS, values, strict=True)) | dict(header), "header")]
    lines += [_line(_sample_to_json(sample), f"sample {sample.sample_id!r}") for sample in samples]
    path = rollout_path(directory, rollout_id, partial=partial)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_rollout(
    directory: str | os.PathLike[str], rollout_id: int, *, partial: bool = False
) -> tuple[dict[str, Any], list[Sample]]:
    """The header, whole, and the samples: what ``write_rollout`` was given, bit for bit (a NaN as a NaN).

    Raises:
        FileNotFoundError: there is no such file.
        RolloutFileError: a file that is truncated, edited, of another version, or of another rollout, by file and line.
    """
    path = rollout_path(directory, rollout_id, partial=partial)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is not there; whole rollouts here: {rollout_ids(directory)}") from error
    lines = content.split(b"\n")
    if lines[-1] == b"":  # after the end of the last line
        lines.pop()
    header = _read_header(lines[0] if lines else b"", path, rollout_id, partial)
    samples = []
    for number, line in enumerate(lines[1:], 2):
        try:
            samples.append(_sample_from_json(_parsed(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise RolloutFileError(
                f"{path}, line {number}: not a sample as it was written ({error}); write the rollout again"
            ) from error
    if len(samples) != header.get("num_samples"):
        raise RolloutFileError(
            f"{path}, line {len(lines)}: the file ends after {len(samples)} samples, but its header says "
            f"{header.get('num_samples')}: it is truncated or edited; write the rollout again"
        )
    return header, samples


def _read_header(line: bytes, path: Path, rollout_id: int, partial: bool) -> dict[str, Any]:
    where = f"{path}, line 1"
    try:
        header = _parsed(line)
    except ValueError as error:
        raise RolloutFileError(f"{where}: not the header of a rollout ({error}); write the rollout again") from error
    if header.get("format") != FORMAT or header.get("format_version") != FORMAT_VERSION:
        raise RolloutFileError(
            f"{where}: expected format {FORMAT!r}, version {FORMAT_VERSION}, got {header.get('format')!r}, version "
            f"{header.get('format_version')!r}; read it with the release that wrote it, or write it again"
        )
    if (header.get("rollout_id"), header.get("partial")) != (rollout_id, partial):
        raise RolloutFileError(
            f"{where}: expected rollout_id {rollout_id}, partial {partial}, got {header.get('rollout_id')!r}, "
            f"{header.get('partial')!r}: the file was renamed or edited; give it its own name"
        )
    return header


def _parsed(line: bytes) -> dict[str, Any]:
    row = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {line[:80]!r}")
    return row


def _line(row: Mapping[str, Any], what: str) -> bytes:
    try:
        return json.dumps(row, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: JSON cannot hold it ({error}); pass numbers, texts, lists and mappings") from error


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    prompt = sample.token_ids.numel() - sample.response_length
    row = {
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "reward": _number_to_json(sample.reward),
        "is_dummy": sample.is_dummy,
        "prompt_token_ids": sample.token_ids[:prompt].tolist(),
        "response_token_ids": sample.response_ids.tolist(),
        "response_rollout_log_probs": [_number_to_json(value) for value in sample.behavior_log_probs.tolist()],
        "loss_mask": sample.loss_mask.int().tolist(),
        "recording": None if sample.recording is None else _recording_to_json(sample.recording, sample.sample_id),
    }
    return row if sample.pairing_mask is None else row | {_PAIRING: sample.pairing_mask.int().tolist()}


def _sample_from_json(row: dict[str, Any]) -> Sample:
    _check_keys(row, _SAMPLE_FIELDS | ({_PAIRING} & set(row)))
    prompt, response = _integers(row["prompt_token_ids"]), _integers(row["response_token_ids"])
    log_probs = [_number_from_json(value) for value in row["response_rollout_log_probs"]]
    recording = row["recording"]
    return Sample(
        sample_id=row["sample_id"],
        token_ids=torch.tensor([*prompt, *response], dtype=torch.int64),
        response_length=len(response),
        behavior_log_probs=torch.tensor(log_probs, dtype=torch.float32),
        loss_mask=_mask(row["loss_mask"]),
        pairing_mask=_mask(row[_PAIRING]) if _PAIRING in row else None,
        reward=_number_from_json(row["reward"]),
        group_id=_integers([row["group_id"]])[0],
        recording=None if recording is None else _recording_from_json(recording),
        is_dummy=row["is_dummy"],
    )


def _recording_to_json(recording: Recording, sample_id: str) -> dict[str, Any]:
    fields = _fields(recording)
    sampling = _fields(recording.sampling)
    bias = {name: _number_to_json(value) for name, value in recording.sampling.logit_bias.items()}
    sampling |= {"logit_bias": bias, "other": dict(recording.sampling.other)}
    line = _line(sampling, f"sampling of sample {sample_id!r}")
    if _sampling_from_json(_parsed(line)) != recording.sampling:
        raise ValueError(
            f"sampling of sample {sample_id!r} does not come back from JSON as it was: {recording.sampling}; in other "
            "and logit_bias use texts as keys and lists for tuples"
        )
    return fields | {"sampling": sampling}


def _recording_from_json(row: dict[str, Any]) -> Recording:
    _check_keys(row, {field.name for field in dataclasses.fields(Recording)})
    kept, pause = row["kept_token_ids"], row["pause_mode"]
    texts = ("engine", "engine_version", "log_prob_kind", "finish_reason", "source")
    wrong = [name for name in texts if not isinstance(row[name], str)]
    if wrong or not (pause is None or isinstance(pause, str)):
        raise ValueError(f"expected texts in the recording, got {row}")
    return Recording(
        **row
        | {
            "sampling": _sampling_from_json(row["sampling"]),
            "version_spans": tuple(VersionSpan(*_integers(span)) for span in row["version_spans"]),
            "kept_token_ids": None if kept is None else tuple(tuple(_integers(ids)) for ids in kept),
        }
    )


def _sampling_from_json(row: dict[str, Any]) -> Sampling:
    _check_keys(row, {field.name for field in dataclasses.fields(Sampling)})
    bias = {name: _number_from_json(value) for name, value in row["logit_bias"].items()}
    values = {name: value for name, value in row.items() if name not in ("stop_token_ids", "logit_bias", "other")}
    if any(type(value) not in (int, float) for value in values.values()) or not isinstance(row["other"], dict):
        raise ValueError(f"expected numbers in the sampling, got {row}")
    return Sampling(**row | {"stop_token_ids": tuple(_integers(row["stop_token_ids"])), "logit_bias": bias})


def _fields(value: Recording | Sampling) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _check_keys(row: dict[str, Any], expected: set[str]) -> None:
    if set(row) != expected:
        missing, unknown = sorted(expected - set(row)), sorted(set(row) - expected)
        raise ValueError(f"missing keys {missing}, unknown keys {unknown}")


def _number_to_json(value: float) -> float | str | None:
    if not math.isfinite(value):
        return None if math.isnan(value) else str(float(value))
    return value if type(value) in (int, float) else float(value)


def _number_from_json(value: float | str | None) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str) and value in ("inf", "-inf"):
        return float(value)
    if type(value) not in (int, float):
        raise ValueError(f'expected a number, null, "inf" or "-inf", got {value!r}')
    return value  # type: ignore[return-value]


def _integers(values: list[Any]) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ValueError(f"expected a list of integers, got {str(values)[:80]}")
    return values


def _mask(values: list[Any]) -> Tensor:
    if any(value not in (0, 1) for value in _integers(values)):
        raise ValueError(f"expected a list of 0 and 1, got {str(values)[:80]}")
    return torch.tensor(values, dtype=torch.bool)
