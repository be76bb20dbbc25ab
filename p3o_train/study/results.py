"""What the cells of a study came to, as two small tables: one row a cell, and curves over the seeds."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from p3o_train.study.cells import COLUMNS, result_path
from p3o_train.study.design import Cell

POINTS = 32
"""Of a curve: each is the mean of the steps between it and the one before."""
LAST = 10
"""Steps that the final reward is the mean of."""


@dataclasses.dataclass(frozen=True)
class CellRow:
    """One cell."""

    setting: str
    method: str
    seed: int
    evaluation: float
    """Reward of the policy that is trained, at the trainer's temperature: mean of the last three evaluations."""
    final_reward: float
    """Of rollouts, whose policy may be older or at another temperature: mean of the last ten steps."""
    best_reward: float
    """Largest mean of ten steps in a row."""
    least_ess: float
    late_ess: float
    """Mean of the last third of the steps."""
    mean_kl: float
    mean_limited: float
    """Share of tokens whose weight the cap or the clip range changes."""
    diverged: int
    """1 where the policy's numbers left their range."""
    seconds: float
    """Of CPU time."""
    steps: int


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """Mean and standard deviation over the seeds that came as far."""

    setting: str
    method: str
    step: int
    seeds: int
    reward: float
    reward_spread: float
    ess: float
    ess_spread: float
    limited: float
    limited_spread: float
    kl: float
    kl_spread: float


Row = TypeVar("Row", CellRow, CurvePoint)


def spread(values: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def read_results(directory: Path, asked: Sequence[Cell]) -> list[dict[str, Any]]:
    """What finished cells left.

    Raises:
        ValueError: some have not run.
    """
    missing = [cell.name for cell in asked if not result_path(directory, cell).exists()]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(asked)} cells have no result in {directory}, such as {missing[0]}; run the study "
            "to its end first"
        )
    return [json.loads(result_path(directory, cell).read_text()) for cell in asked]


def cell_row(result: Mapping[str, Any]) -> CellRow:
    """The row of a cell, from what a diverged run had until then; before its first step that is a reward of 0."""
    setting, method, seed = result["cell"]
    rows = result["rows"] or [[0.0] * len(COLUMNS)]
    reward, ess, limited, kl = ([row[place] for row in rows] for place in range(len(COLUMNS)))
    windows = [statistics.fmean(reward[begin : begin + LAST]) for begin in range(max(1, len(reward) - LAST + 1))]
    return CellRow(
        setting=setting,
        method=method,
        seed=seed,
        evaluation=statistics.fmean(result["evaluations"][-3:] or [0.0]),
        final_reward=windows[-1],
        best_reward=max(windows),
        least_ess=min(ess),
        late_ess=statistics.fmean(ess[-max(1, len(ess) // 3) :]),
        mean_kl=statistics.fmean(kl),
        mean_limited=statistics.fmean(limited),
        diverged=int(bool(result["diverged"])),
        seconds=result["seconds"],
        steps=len(result["rows"]),
    )


def curve_points(results: Iterable[Mapping[str, Any]]) -> list[CurvePoint]:
    """Of each setting and method, in the order in which they come."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        setting, method, _ = result["cell"]
        groups.setdefault((setting, method), []).append(result)
    return [point for (setting, method), group in groups.items() for point in _curve(setting, method, group)]


def _curve(setting: str, method: str, group: Sequence[Mapping[str, Any]]) -> Iterable[CurvePoint]:
    planned = group[0]["planned"]
    edges = sorted({round(planned * place / POINTS) for place in range(POINTS + 1)})
    for begin, end in itertools.pairwise(edges):
        there = [result["rows"][begin:end] for result in group if len(result["rows"]) > begin]
        if not there:
            return
        numbers: dict[str, float] = {}
        for place, name in enumerate(COLUMNS):
            means = [statistics.fmean(row[place] for row in rows) for rows in there]
            numbers |= {name: statistics.fmean(means), f"{name}_spread": spread(means)}
        yield CurvePoint(setting, method, end, len(there), **numbers)


def write_table(path: Path, rows: Sequence[Any]) -> None:
    """A CSV file with the fields of the rows; numbers have six digits in the table of cells and four in curves."""
    digits = ".4g" if isinstance(rows[0], CurvePoint) else ".6g"
    names = [field.name for field in dataclasses.fields(rows[0])]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            values = [getattr(row, name) for name in names]
            writer.writerow([format(value, digits) if isinstance(value, float) else value for value in values])


def read_table(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of such a file.

    Raises:
        ValueError: other columns.
    """
    types = {
        field.name: {"str": str, "int": int, "float": float}[str(field.type)] for field in dataclasses.fields(kind)
    }
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or list(reader.fieldnames) != list(types):
            raise ValueError(f"{path} must have the columns {', '.join(types)}; got {reader.fieldnames}")
        return [kind(**{name: types[name](row[name]) for name in types}) for row in reader]
