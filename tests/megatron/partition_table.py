"""The table of ``partitions`` as text. ``python -m tests.megatron.partition_table`` writes docs/partitions.md anew."""

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import pytest

from p3o_train import doctor
from tests.megatron.partitions import ROWS, Errors, measure
from tests.megatron.steps import LENGTHS, Cut

PAGE = Path(__file__).resolve().parents[2] / "docs" / "partitions.md"
COMMAND = "python -m tests.megatron.partition_table"
MEASURED = pytest.StashKey[str]()
"""Where the tests leave the table for the end of the report."""
COLUMNS = ("what", "ranks", "samples", "loss", "e", "gradient", "in", "weights", "moved")
Numbers = dict[str, float | None]

TEXT = """# A step does not depend on how it is cut

One optimizer step of P3O on the real Megatron-Core, cut over ranks and micro-batches, against the same step in one
process with all samples in one micro-batch: real DDP, `finalize_model_grads` and optimizer, over Gloo.

Measured {date} on {machine} without a GPU;
Python {python}, torch {torch}, megatron-core {megatron}. `{command}`
writes this page, in under two minutes; `make test-megatron` measures again, prints the table and holds every figure to
its bound.

The model: 2 layers of width 32, 4 heads (2 for keys and values), 64 words, float32, random weights. The step: {count}
samples of up to 11 response tokens, one of them without a response and one masked altogether; entropy coefficient 0.02.
Adam with lr 1e-3, gradients clipped to norm 1.

{table}

| column | meaning |
|---|---|
| what | scope and source of e; *from hidden*: the output layer is bypassed; *tied*: it shares the embedding |
| ranks | sizes of the data (DP), tensor (TP), pipeline (PP) and context parallel (CP) groups |
| samples | of a micro-batch on a data-parallel rank; *all* is one micro-batch |
| loss, e | relative error of the loss per token and of e; GRPO has no e |
| gradient | largest relative L2 error of a parameter's gradient, before clipping, and *in* which parameter |
| weights | largest relative L2 error of a parameter after the optimizer step |
| moved | how far, relative in L2, the step moved the parameter that it moved least |

All *step* rows are held to the pre-pass from logits. Copies of a gradient or a weight on several ranks are not in the
table: they have the same bits. Micro-batch scope has rows for ranks only: with other micro-batches its e is another one
by definition.

**Bounds.** 1e-6, except for gradients with TP: 3e-6, because every layer adds two halves of its inner products, also
forward, so that activations differ in their last bit before there is any gradient.

Errors of weights depend on luck more than on the cut: the first step of Adam is g / (|g| + 1e-8), so an entry whose
gradient happens to be 1e-5 of the others moves by 1% less or more for the last bits of the others. Of five draws of
samples one had such an entry (weights 2.5e-6 with CP2, 3e-9 without that entry); this table is from another one.
"""


def key(name: str, cut: Cut) -> tuple[str, str, str]:
    """The first three columns, which no other row has."""
    sizes = [f"{size.upper()}{getattr(cut, size)}" for size in ("dp", "tp", "pp", "cp") if getattr(cut, size) > 1]
    size = cut.micro_batch_size
    return name, " x ".join(sizes) or "1", "all" if size >= len(LENGTHS) else str(size)


def table(found: Mapping[tuple[str, Cut], Errors]) -> str:
    """Markdown, without what is no row."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for row in ROWS:
        made = found[row]
        numbers = ("" if value is None else f"{value:.1e}" for value in (made.loss, made.ess, made.gradient))
        parameter = made.parameter.removeprefix("decoder.").removesuffix(".weight")
        lines.append((*key(*row), *numbers, parameter, f"{made.weights:.1e}", f"{made.moved:.1e}"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(page: str) -> dict[tuple[str, ...], Numbers]:
    """What ``table`` has written: the figures of every row by its key."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    lines = [cells for cells in lines if len(cells) == len(COLUMNS)]
    assert tuple(lines[0]) == COLUMNS
    names = ("loss", "ess", "gradient", "parameter", "weights", "moved")
    found: dict[tuple[str, ...], Numbers] = {}
    for cells in lines[2:]:
        assert tuple(cells[:3]) not in found, f"two rows {cells[:3]}"
        figures = dict(zip(names, cells[3:], strict=True))
        del figures["parameter"]
        found[tuple(cells[:3])] = {name: float(cell) if cell else None for name, cell in figures.items()}
    return found


def main() -> None:
    text = TEXT.format(
        date=datetime.date.today().isoformat(),
        machine=f"{os.cpu_count()} cores ({doctor.cpu_name()})",
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        megatron=importlib.metadata.version("megatron-core"),
        command=COMMAND,
        count=len(LENGTHS),
        table=table(measure()),
    )
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
