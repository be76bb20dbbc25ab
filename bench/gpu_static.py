"""What the compiler makes of the kernels that a training step launches, and the bound that follows for each GPU.

A selection of ``bench.kernel_report``, which has every variant; no GPU is needed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bench import kernel_report
from bench.budgets import BUDGETS
from p3o_kernels._variants import VARIANTS

ARCHITECTURES = (80, 90, 100)
# what one launch of each is for
KERNELS = {
    "row_stats bf16": "log-probs from logits",
    "row_stats bf16, has_entropy": "the same with entropy",
    "row_grad bf16": "gradient of the logits",
    "row_loss bf16": "loss and gradient of the logits, e given",
    "ratio_sums has_mask": "S1, S2, N",
    "token_loss has_mask, has_context": "token loss and its gradient, e given",
    "token_loss has_mask": "the same, e from S1, S2, N",
    "scale_grad": "backward of the token loss",
}
KEPT = ("arch", "registers", "spill_bytes", "sass_per_element", "mufu_per_element", "bytes_per_element", "roofline")
# kernels that each path launches over [T, V] logits, which no cache holds
PATHS = {
    "log-probs alone (pre-pass)": ("row_stats bf16",),
    "loss and gradient, e given": ("row_loss bf16",),
    "loss and gradient, e of the micro-batch": ("row_stats bf16", "row_grad bf16"),
}


def launches(names: Sequence[str] = tuple(KERNELS), archs: Sequence[int] = ARCHITECTURES) -> list[dict[str, Any]]:
    """One for each kernel and architecture."""
    by_name = {variant.name: variant for variant in VARIANTS}
    return [by_name[name].launch(arch) for name in names for arch in archs]


def row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of an entry of the kernel report."""
    named = {"kernel": entry["variant"], "role": entry["role"], "memory": entry["block_memory"]}
    return named | {name: entry[name] for name in KEPT}


def measure() -> list[dict[str, Any]]:
    """One row for each launch."""
    return [row(entry) for entry in kernel_report.entries(launches())]


def measure_one(name: str, arch: int) -> dict[str, Any]:
    """In this process."""
    (launch,) = launches((name,), (arch,))
    return row(kernel_report.entry(launch))


def register_budget(row: Mapping[str, Any]) -> int:
    return BUDGETS.get(row["kernel"], BUDGETS[row["role"]]).registers


def bound_seconds(rows: Sequence[Mapping[str, Any]], kernels: Sequence[str], gpu: str, elements: int) -> float | None:
    """Of these launches over so many logits; None where one of them was not compiled for the GPU."""
    found = {row["kernel"]: row["roofline"][gpu] for row in rows if gpu in row["roofline"]}
    if not all(name in found for name in kernels):
        return None
    return sum(found[name]["us_per_million_elements"] for name in kernels) * 1e-12 * elements
