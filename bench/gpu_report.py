"""What ``bench.gpu_check`` writes, as JSON and as Markdown: measurements as shares of what the GPU could do."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.roofline import DEVICES

# Device-memory traffic of a bfloat16 logit: read once; read once and its gradient written; read twice and written.
BYTES_PER_LOGIT = {"log_probs": 2, "given_context": 4, "micro_batch": 6}
# The whole name: PCIe boards, smaller memories and MIG slices have another bandwidth.
DRIVER_NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One candidate at one size; ``problem`` says why there is no time."""

    source: str
    scope: str
    provider: str
    vocab: int
    tokens: int
    hidden: int
    seconds: float | None = None
    peak_bytes: int | None = None
    problem: str | None = None


def data_sheet_bandwidth(gpu: str) -> float | None:
    """Bytes per second by the name that the driver gives; None for a GPU that ``roofline`` does not know."""
    device = DEVICES.get(DRIVER_NAMES.get(gpu, ""))
    return device.bandwidth if device else None


def rates(measurement: Measurement, bandwidth: float, gemm_seconds: float | None) -> dict[str, float]:
    """From logits: GB/s and the share of ``bandwidth``. From hidden: TFLOP/s and the bare products' share of the time.

    Flops are those of the three products that cannot be done without. A path that recomputes logits does a fourth,
    which does not count, so that rates of different paths compare as their times do.
    """
    seconds = measurement.seconds
    if seconds is None:
        return {}
    logits = measurement.tokens * measurement.vocab
    if measurement.source == "hidden":
        made = {"tflop_per_second": 6 * logits * measurement.hidden / seconds / 1e12}
        return made | ({"share_of_gemms": gemm_seconds / seconds} if gemm_seconds else {})
    if measurement.scope not in BYTES_PER_LOGIT:
        return {}
    per_second = BYTES_PER_LOGIT[measurement.scope] * logits / seconds
    return {"gb_per_second": per_second / 1e9, "share_of_bandwidth": per_second / bandwidth}


def rows(measurements: Sequence[Measurement], bandwidth: float) -> list[dict[str, Any]]:
    """Measurements with their rates."""
    gemms = {each.vocab: each.seconds for each in measurements if each.provider == "three_gemms"}
    return [asdict(each) | rates(each, bandwidth, gemms.get(each.vocab)) for each in measurements]


def _cells(row: Mapping[str, Any]) -> list[str]:
    def number(name: str, text: str, scale: float = 1.0) -> str:
        value = row.get(name)
        return "" if value is None else format(value * scale, text)

    return [
        row["source"],
        f"{row['vocab']:,}",
        row["scope"],
        row["provider"],
        row["problem"] or number("seconds", ".3f", 1e3),
        number("gb_per_second", ".0f"),
        number("share_of_bandwidth", ".1%"),
        number("tflop_per_second", ".0f"),
        number("share_of_gemms", ".1%"),
        number("peak_bytes", ".0f", 1 / 2**20),
    ]


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown, readable on a terminal too."""
    head = ["from", "V", "scope", "provider", "ms", "GB/s", "of bound", "TFLOP/s", "of GEMMs", "peak MiB"]
    cells = [head, *map(_cells, found)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def markdown(environment: Mapping[str, Any], tests: str, found: Sequence[Mapping[str, Any]]) -> str:
    facts = [f"- {name.replace('_', ' ')}: {value}" for name, value in environment.items()]
    notes = [
        "Medians of a forward and backward pass, bfloat16. GB/s counts 2 bytes a logit for log-probs, 4 with the ESS "
        "given, 6 in micro-batch scope, whatever the provider moves; the bound is the bandwidth above.",
        "TFLOP/s counts the three matrix products that cannot be done without; of GEMMs is their bare time over this "
        "one. Peak memory includes gradients.",
    ]
    parts = [f"# {environment['gpu']}", "\n".join(facts), f"GPU tests: {tests}", "\n".join(table(found)), *notes]
    return "\n\n".join(parts) + "\n"


def write(folder: Path, environment: Mapping[str, Any], tests: str, found: Sequence[Mapping[str, Any]]) -> list[Path]:
    """``<gpu>.json`` and ``<gpu>.md``."""
    stem = re.sub(r"[^a-z0-9]+", "-", environment["gpu"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    content = {"environment": dict(environment), "tests": tests, "measurements": list(found)}
    paths[0].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(environment, tests, found), encoding="utf-8")
    return paths
