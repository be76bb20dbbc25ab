"""Measures the losses on this machine: ``python -m bench.run`` prints two tables and draws one figure.

The token loss over T, and the loss from logits and from hidden states beside other implementations. Writes
``token_loss.json``, ``vocabulary.json`` (as pytest-benchmark has them) and ``token_loss.png`` into ``build/bench``.
Options are handed on to pytest, such as ``--max-tokens 4194304`` or ``-k "micro_batch and compiled"``.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import vocabulary_cases
from bench.plot import draw
from bench.workload import BASELINE, SCOPES

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "build" / "bench"
NOTHING_SELECTED = 5  # how pytest says that -k left nothing


class Point(NamedTuple):
    """One measurement."""

    scope: str
    tokens: int
    provider: str
    seconds: float
    info: dict[str, Any]


def read_points(report: dict[str, Any]) -> list[Point]:
    """Measurements by scope and T, the providers in the order in which they ran."""
    points = []
    for benchmark in report["benchmarks"]:
        info = benchmark["extra_info"]
        seconds = benchmark["stats"]["median"]
        points.append(Point(info["scope"], info["tokens"], info["provider"], seconds, info))
    return sorted(points, key=lambda point: (SCOPES.index(point.scope), point.tokens))


def title(report: dict[str, Any], device: str) -> str:
    cpu = report["machine_info"]["cpu"].get("brand_raw", report["machine_info"]["machine"])
    hardware = f"{cpu}, {device}" if "CPU" in device else device
    return f"{hardware}; {report['datetime'][:10]}"


def table(points: Sequence[Point]) -> list[str]:
    baseline = {(point.scope, point.tokens): point.seconds for point in points if point.provider == BASELINE}
    lines = [
        f"{'scope':14}{'T':>9}  {'provider':13}{'median ms':>10}{'Mtokens/s':>11}{'GB/s':>8}{'of copy':>9}"
        f"{'speed-up':>10}{'peak MiB':>10}"
    ]
    for point in points:
        reference = baseline.get((point.scope, point.tokens))
        speedup = f"{reference / point.seconds:.2f}x" if reference else "-"
        lines.append(
            f"{point.scope:14}{point.tokens:9d}  {point.provider:13}{1e3 * point.seconds:10.3f}"
            f"{point.info['tokens_per_second'] / 1e6:11.2f}{point.info['gb_per_second']:8.2f}"
            f"{point.info['share_of_copy_bandwidth']:9.1%}{speedup:>10}{point.info['peak_mib']:10.2f}"
        )
    return lines


def measure(files: Sequence[str], path: Path, options: Sequence[str]) -> dict[str, Any] | None:
    """The report of pytest-benchmark, also written to ``path``; None when the options select none of these cases."""
    command = [sys.executable, "-m", "pytest", *files, "--benchmark-quiet", "--no-header"]
    done = subprocess.run([*command, f"--benchmark-json={path}", *options], cwd=ROOT)
    if done.returncode == NOTHING_SELECTED:
        return None
    done.check_returncode()
    return json.loads(path.read_text())


def show_token_loss(report: dict[str, Any]) -> None:
    points = read_points(report)
    heading = title(report, points[0].info["device"])
    print(f"Token loss, forward and backward, with mask. {heading}")
    print(f"speed-up: against {BASELINE}; of copy: share of the bandwidth of a large copy on this device")
    print("\n".join(table(points)))
    draw(points, heading, OUTPUT / "token_loss.png")


def show_vocabulary(report: dict[str, Any]) -> None:
    rows = vocabulary_cases.read(report)
    if not rows:  # every selected case was skipped
        return
    sizes = f"T = {rows[0]['tokens']:,}, H = {rows[0]['hidden']:,}, {rows[0]['dtype']}"
    print(f"Loss from logits and from hidden states, forward and backward, {sizes}. {title(report, rows[0]['device'])}")
    device = "cpu" if "CPU" in rows[0]["device"] else "cuda"
    if rows[0]["device"] == "1 CPU thread":
        print("with one thread times are CPU times, to which other processes add little")
    print("\n".join([*vocabulary_cases.table(rows), *vocabulary_cases.legend(device)]))


def main(options: Sequence[str]) -> int:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    suites = {
        "token_loss.json": (("bench/bench_token_loss.py",), show_token_loss),
        "vocabulary.json": (vocabulary_cases.FILES, show_vocabulary),
    }
    for name, (files, show) in suites.items():
        try:
            report = measure(files, OUTPUT / name, options)
        except subprocess.CalledProcessError as error:
            return error.returncode
        if report is not None:
            show(report)
    print(f"figure and data in {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
