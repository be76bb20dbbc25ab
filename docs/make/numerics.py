"""Measures errors against float64 and writes docs/data/numerics.csv and docs/numerics.md.

python -m docs.make.numerics            measures, in two processes (the second interprets the kernels): a minute
python -m docs.make.numerics --page     writes the page again from the figures that are there
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from docs.make.numerics_cases import HIDDEN, ROWS, TOKENS, VOCAB, measure
from p3o_train import doctor

DOCS = Path(__file__).resolve().parents[1]
PAGE, DATA, TEMPLATE = (
    DOCS / "numerics.md",
    DOCS / "data" / "numerics.csv",
    Path(__file__).with_name("numerics.template"),
)
COMMAND = "python -m docs.make.numerics"
_ONE_PROCESS = "--measure-only"


class Line(NamedTuple):
    """One row of the table; errors are the largest of a tensor, divided by its largest value."""

    operator: str
    case: str
    quantity: str
    pytorch: float
    eager: float
    interpreted: float
    allowed: float

    @property
    def is_artefact(self) -> bool:
        """Whether the interpreter rounds here where hardware does not: see the page."""
        return ("bfloat16" in self.case and self.quantity.startswith("d_")) or "1e4" in self.case


def measured() -> tuple[dict[str, str], list[Line]]:
    """Facts about this machine, and every row; each backend in a process of its own."""
    parts = []
    for interpret in ("0", "1"):
        command = [sys.executable, "-W", "ignore", "-m", "docs.make.numerics", _ONE_PROCESS]
        done = subprocess.run(
            command, env=os.environ | {"TRITON_INTERPRET": interpret}, stdout=subprocess.PIPE, check=True
        )
        parts.append(json.loads(done.stdout))
    lines = []
    for (*key, pytorch, eager, allowed), (*other, _, interpreted, _) in zip(*parts, strict=True):
        assert key == other
        lines.append(Line(*key, pytorch, eager, interpreted, allowed))
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores ({doctor.cpu_name()})",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "triton": importlib.metadata.version("triton"),
    }
    return facts, lines


def write_data(facts: dict[str, str], lines: list[Line]) -> None:
    """A CSV file with the facts before it, a "#" line each."""
    DATA.parent.mkdir(exist_ok=True)
    with open(DATA, "w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in facts.items())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Line._fields)
        writer.writerows((*line[:3], *(f"{number:.3g}" for number in line[3:])) for line in lines)


def read_data() -> tuple[dict[str, str], list[Line]]:
    """What ``write_data`` has written."""
    text = DATA.read_text(encoding="utf-8").splitlines()
    facts = dict(line[2:].split(": ", 1) for line in text if line.startswith("# "))
    rows = list(csv.reader(line for line in text if not line.startswith("# ")))
    assert tuple(rows[0]) == Line._fields
    return facts, [Line(*row[:3], *map(float, row[3:])) for row in rows[1:]]


def page(facts: dict[str, str], lines: list[Line]) -> str:
    """The whole page; every sentence about the figures is made of them."""
    above = [line for line in lines if line.interpreted > line.allowed]
    stored = {
        "command": COMMAND,
        "tokens": str(TOKENS),
        "rows": str(ROWS),
        "vocab": str(VOCAB),
        "hidden": str(HIDDEN),
        "count": str(len(lines)),
        "eager_within": str(sum(line.eager <= line.allowed for line in lines)),
        "interpreted_within": str(len(lines) - len(above)),
        "artefacts_above": str(sum(line.is_artefact for line in above)),
        "others_above": str(sum(not line.is_artefact for line in above)),
        "table": _table(lines),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in (facts | stored).items():
        text = text.replace("{{" + name + "}}", value)
    assert "{{" not in text, "a placeholder that nothing fills"
    return text


def _table(lines: list[Line]) -> str:
    head = ("operator", "input", "quantity", "eager PyTorch", "`eager`", "kernels, interpreted", "allowed")
    cells = [head, ("---",) * len(head)]
    for line in lines:
        mark = " *" if line.is_artefact else ""
        figures = [f"{number:.1e}" for number in line[3:]]
        cells.append((f"`{line.operator}`", line.case, line.quantity, *figures[:2], figures[2] + mark, figures[3]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def main() -> None:
    if _ONE_PROCESS in sys.argv:
        torch.set_num_threads(1)
        print(json.dumps(measure()))
        return
    if "--page" not in sys.argv:
        write_data(*measured())
    PAGE.write_text(page(*read_data()), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
