"""What a run has written, read back to be looked at: its numbers, histograms and settings. The run may still go on."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p3o_train.histogram import counts_of
from p3o_train.sinks import FILE_NAME, HISTOGRAM_FILE, read_jsonl

SETTINGS_FILE = "config.json"
LAST_STEPS = 20
"""Steps at the end that averages and histograms are over: enough tokens for a smooth one, and one policy, nearly."""


@dataclass(frozen=True)
class Run:
    """One run directory."""

    label: str
    """Unique among the runs that are read together."""
    directory: Path
    rows: list[dict[str, float]]
    """Numbers of each step, as ``read_jsonl`` gives them; at least one."""
    histograms: list[list[float]]
    """[NUM_BINS] counts of log-ratios of each step that recorded them."""
    settings: dict[str, Any]
    """Of config.json; {} without that file."""

    @property
    def method(self) -> str:
        """The name in train/<name>/ of its numbers; "" if it has none of an estimator."""
        names = (name.split("/") for row in self.rows for name in row if name.endswith("/normalized_ess"))
        return next((parts[1] for parts in names if len(parts) == 3 and parts[0] == "train"), "")

    @property
    def steps(self) -> list[int]:
        """Of its rows."""
        return [int(row["step"]) for row in self.rows]

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps that have this number, and its values, NaN included; "{}" in the name stands for the method.

        ([], []) where no value is a number.
        """
        full = name.format(self.method)
        points = [(int(row["step"]), row[full]) for row in self.rows if full in row]
        if all(math.isnan(value) for _, value in points):
            return [], []
        return [step for step, _ in points], [value for _, value in points]

    def last_mean(self, name: str) -> float:
        """Mean of a number over the last ``LAST_STEPS`` steps, as far as they have it; NaN where none has."""
        full = name.format(self.method)
        found = [row[full] for row in self.rows[-LAST_STEPS:] if not math.isnan(row.get(full, math.nan))]
        return sum(found) / len(found) if found else math.nan


def read_runs(directories: Sequence[str | Path], labels: Sequence[str] | None = None) -> list[Run]:
    """The runs of these directories, in order.

    Args:
        directories: of runs; config.json and ratio_histogram.jsonl may be missing.
        labels: one for each. None: names of the directories, with as many of their parents as make them unique.

    Raises:
        ValueError: a directory that is missing, given twice or without numbers; a broken line or file; labels that are
            empty, not unique or not as many.
    """
    paths = [Path(directory) for directory in directories]
    resolved = [path.resolve() for path in paths]
    if twice := [str(path) for path, count in Counter(resolved).items() if count > 1]:
        raise ValueError(f"{', '.join(twice)} is given more than once; name each run directory once")
    chosen = unique_labels(resolved) if labels is None else list(labels)
    if len(chosen) != len(paths) or len(set(chosen)) != len(chosen) or not all(chosen):
        raise ValueError(
            f"--labels must be {len(paths)} different names, one for each run, separated by commas; got {chosen}"
        )
    return [_read(path, label) for path, label in zip(paths, chosen, strict=True)]


def unique_labels(paths: Sequence[Path]) -> list[str]:
    """The last parts of different absolute paths: as many of each as no other one ends with."""

    def tail(path: Path, parts: int) -> str:
        return str(Path(*path.parts[-parts:]))

    made = []
    for path in paths:
        others = [other for other in paths if other != path]
        lengths = range(1, len(path.parts) + 1)
        made.append(next(tail(path, n) for n in lengths if all(tail(other, n) != tail(path, n) for other in others)))
    return made


def _read(directory: Path, label: str) -> Run:
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ValueError(f"{directory} {what}; expected the --run-dir of a run, a directory with {FILE_NAME} in it")
    path = directory / FILE_NAME
    if not path.exists():
        raise ValueError(f"{directory} has no {FILE_NAME}; expected the --run-dir of a run that has begun its steps")
    rows = read_jsonl(path)
    if not rows:
        raise ValueError(f"{path} has no complete line yet; wait for the first step of the run, or leave it out")
    return Run(label, directory, rows, _histograms(directory / HISTOGRAM_FILE), _settings(directory / SETTINGS_FILE))


def _histograms(path: Path) -> list[list[float]]:
    if not path.exists():
        return []
    made = []
    for row in read_jsonl(path):
        counts = {name: value for name, value in row.items() if name != "step"}
        try:
            made.append(counts_of(counts))
        except ValueError as error:
            raise ValueError(f"{path}, step {row['step']}: {error}; remove the file to do without it") from error
    return made


def _settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; repair or remove it to do without the settings") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold a JSON object of settings, got {type(settings).__name__}; remove it")
    return settings
