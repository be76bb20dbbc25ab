"""The page of a study, written from its three tables alone, so that anybody can write it again."""

from __future__ import annotations

import csv
import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from p3o_train import doctor
from p3o_train.study import claims
from p3o_train.study.claims import Score
from p3o_train.study.design import COMMON, METHODS, SIZES, Cell, settings
from p3o_train.study.figures import draw_setting
from p3o_train.study.results import CellRow, CurvePoint, cell_row, curve_points, read_table, write_table

CELLS, CURVES, ABOUT = "study.csv", "study_curves.csv", "study_run.csv"


class Tables(NamedTuple):
    """What the page is made of."""

    cells: list[CellRow]
    curves: list[CurvePoint]
    about: dict[str, str]
    """How the numbers were made: flags, machine, date, versions."""


def write_tables(output: Path, results: Sequence[Mapping[str, Any]], about: Mapping[str, str]) -> None:
    """The tables, in ``output/data``."""
    data = output / "data"
    data.mkdir(parents=True, exist_ok=True)
    write_table(data / CELLS, [cell_row(result) for result in results])
    write_table(data / CURVES, curve_points(results))
    with open(data / ABOUT, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("name", "value"), *about.items()])


def read_tables(output: Path) -> Tables:
    """The tables that ``write_tables`` wrote.

    Raises:
        OSError: a file that is missing.
        ValueError: a file of another kind.
    """
    data = output / "data"
    with open(data / ABOUT, newline="") as file:
        header, *rows = csv.reader(file)
    if header != ["name", "value"]:
        raise ValueError(f"{data / ABOUT} must have the columns name, value; got {header}")
    return Tables(read_table(data / CELLS, CellRow), read_table(data / CURVES, CurvePoint), dict(rows))


def write_page(output: Path) -> None:
    """``output/study.md`` and ``output/images/study_*.png``, from the tables in ``output/data``."""
    tables = read_tables(output)
    images = output / "images"
    images.mkdir(parents=True, exist_ok=True)
    (output / "study.md").write_text(page(tables))
    for setting in claims.scores_of(tables.cells):
        points = [point for point in tables.curves if point.setting == setting]
        draw_setting(images / f"study_{setting}.png", tables.about[f"label of {setting}"], points)


def about(size: str, asked: Sequence[Cell], workers: int) -> dict[str, str]:
    """How the numbers of these cells are made, on this machine, today."""
    versions = {name: version for name, version in doctor.versions().items() if version}
    named = settings(size)
    used = [name for name in named if any(cell.setting == name for cell in asked)]
    methods = [name for name in METHODS if any(cell.method == name for cell in asked)]
    return {
        "size": size,
        "date": datetime.date.today().isoformat(),
        "machine": f"{doctor.cpu_name()}, {os.cpu_count()} cores, {workers} cells at a time with one thread each",
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
        "command": f"p3o study --run-dir build/study --output docs{'' if size == 'short' else f' --size {size}'}",
        "flags of all": f"{COMMON} {SIZES[size]}",
        **{f"label of {name}": named[name].label for name in used},
        **{f"flags of {name}": named[name].flags for name in used},
        **{f"flags of method {name}": METHODS[name].flags for name in methods},
    }


def page(tables: Tables) -> str:
    """The text, Markdown."""
    scores = claims.scores_of(tables.cells)
    parts = [
        _head(tables),
        _summary(scores, tables.about),
        _findings(scores, tables),
        *(_setting(name, row, tables) for name, row in scores.items()),
        _design(scores, tables.about),
        _limits(tables),
    ]
    return "\n\n".join(parts) + "\n"


def _head(tables: Tables) -> str:
    told, rows = tables.about, tables.cells
    seeds = sorted({row.seed for row in rows})
    return f"""# Study: P3O beside the losses that it is compared with

Written by `{told["command"]}` from [the cells](data/{CELLS}), [their curves](data/{CURVES}) and
[how they were made](data/{ABOUT}); `p3o study --page-from docs` writes it again from these files alone.

{len(rows)} runs of the trainer of `p3o train`, Megatron-Core on the CPU: settings x methods x the seeds
{", ".join(map(str, seeds))}. A small transformer learns to say two digits backwards; a reward of 1 is the whole answer.

Every run of a seed starts from the same policy, which is right about half of the time: supervised training on all
questions with half of each target spread evenly over the vocabulary. The seed is also that of prompts and sampling, so
that the methods of a setting and seed get the same prompts.

- Date: {told["date"]}
- Machine: {told["machine"]}
- Versions: {told["versions"]}"""


def _summary(scores: claims.Scores, told: Mapping[str, str]) -> str:
    methods = [name for name in METHODS if any(name in row for row in scores.values())]
    header = ["setting", *(METHODS[name].label for name in methods)]
    rows = [[f"[{told[f'label of {setting}']}](#{_anchor(told[f'label of {setting}'])})"] for setting in scores]
    for row, score in zip(rows, scores.values(), strict=True):
        row += [_cell(score.get(name)) for name in methods]
    return (
        "## Final reward\n\n"
        "Of the policy that is trained, at the temperature that the trainer divides its logits by: mean of the last "
        "three evaluations of 128 questions, as mean ± standard deviation over the seeds. Rollouts have other rewards "
        f"where an older or a hotter policy samples them; [the table of cells](data/{CELLS}) has both.\n\n"
        + _table(header, rows)
    )


def _cell(score: Score | None) -> str:
    if score is None:
        return ""
    return f"{score}" + (f" ({score.diverged} of {score.seeds} diverged)" if score.diverged else "")


def _findings(scores: claims.Scores, tables: Tables) -> str:
    told = tables.about
    close, both = claims.count_close(scores)
    lines = [
        f"P3O, with no number tuned to the setting, ends within {claims.CLOSE} of the best of the GRPO clips 0.2, 0.4 "
        f"and 0.6 in {close} of {both} settings.",
        claims.fresh_ess(tables.cells),
        *(f"{METHODS[name].label} fails in {text}." for name, text in _failed(scores, told)),
    ]
    for setting, question in (
        ("t0p6_mismatch", "The pull of P3O at temperature 0.6, mismatch"),
        ("t1p5_mismatch", "The pull of P3O at temperature 1.5, mismatch"),
    ):
        if setting in scores:
            lines.append(f"{question}: {' '.join(claims.variants(scores[setting]))}")
    lines += [
        f"e of each micro-batch beside e of the step, {told[f'label of {setting}']}: {text}"
        for setting, text in claims.scopes(scores)
    ]
    return (
        "## What the numbers say\n\n"
        f"A method fails in a setting when it ends below {claims.FAILED:.0%} of the best one there, or diverges. Two "
        "methods are separated when their means differ by more than both standard deviations together; nothing is "
        "ranked within that.\n\n" + "\n".join(f"- {line}" for line in lines)
    )


def _failed(scores: claims.Scores, told: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    found = {setting: claims.failures(row) for setting, row in scores.items()}
    for method in METHODS:
        run = [setting for setting, row in scores.items() if method in row]
        places = [
            f"{told[f'label of {setting}']} ({found[setting][method]})" for setting in run if method in found[setting]
        ]
        if places:
            yield method, f"{len(places)} of {len(run)} settings: {'; '.join(places)}"
        elif run:
            yield method, f"none of {len(run)} settings"


def _setting(name: str, scores: Mapping[str, Score], tables: Tables) -> str:
    told = tables.about
    label = told[f"label of {name}"]
    failed = "; ".join(f"{METHODS[method].label} ({why})" for method, why in claims.failures(scores).items())
    return (
        f"## {label}\n\n`{told[f'flags of {name}'] or 'no further flags'}`\n\n"
        f"{claims.against_clips(scores)} Failed: {failed or 'none'}. "
        f"{claims.drift([row for row in tables.cells if row.setting == name])}\n\n"
        f"![Reward, ESS, limited tokens and KL of every method: {label}](images/study_{name}.png)"
    )


def _design(scores: claims.Scores, told: Mapping[str, str]) -> str:
    methods = [name for name in METHODS if any(name in row for row in scores.values())]
    table = _table(
        ["method", "flags"], [[METHODS[name].label, f"`{told[f'flags of method {name}']}`"] for name in methods]
    )
    return f"""## Exact flags

Each run is `p3o train` with these flags, then those of its setting, then those of its method, then `--seed` and
`--hf-checkpoint build/study/start/SEED`; a later flag wins over an earlier one.

```
{told["flags of all"]}
```

{table}

In all pictures lines are means over the seeds and bands one standard deviation to each side. "Share of tokens that cap
or clip changes" counts ratios above e for P3O and ratios outside of the clip range for GRPO and CISPO; near fresh data
half of the ratios exceed an e just below 1, which changes next to nothing. The KL is the mean of r - 1 - log r with
r = b / pi, over sampled tokens; its exponent is limited to 10. In the settings with old rollouts the first ones have
the ages 0, 1, 2, ..., and all of them are sampled by the initial weights. Step scope does not depend on how a step is
cut, so its runs have one micro-batch a step, and those of micro-batch scope have many."""


def _limits(tables: Tables) -> str:
    seeds = len({row.seed for row in tables.cells})
    return f"""## What this does not show

- One task that takes minutes on a CPU, one small model, {seeds} seeds: no statement about language models follows.
- One learning rate for all methods of a setting; none of them was tuned, and another rate may change the order.
- Responses of at most four tokens: long responses, where ratios of many tokens meet, are not here.
- Temperatures of one run are constant. Rollouts of other engines, other precisions and other kernels are not here.
- A standard deviation of {seeds} seeds is itself uncertain: differences near it mean nothing."""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _anchor(heading: str) -> str:
    """What GitHub links a heading by."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
