"""Measures everything that the performance page shows, and writes the page: ``python -m bench.page``, under 10 minutes.

Writes ``data/performance.json`` (medians, machine, versions, commit), and from it and the files of ``bench/results``
alone ``performance.md`` and ``images/performance_*.png``, all below ``--output`` (docs). ``--page-only`` renders again
without measuring; ``--smoke`` tries the code in seconds and measures nothing of use. Prints a short table last.

What is not installed (Liger, Megatron-Core) is named on the page. A part that fails ends the command with its output
and an exit status of 1; nothing is written then.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench import cpu_times, gpu_static, page_plots, page_text
from bench.page_tables import compact
from bench.peers import absences
from p3o_train import doctor

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"
DATA, PAGE = Path("data/performance.json"), Path("performance.md")
PACKAGES = ("torch", "triton", "megatron-core", "transformers", "liger-kernel")
THREADS = (1, 2)
MODULES_OF_STEP = ("megatron", "transformers")


class PartFailed(RuntimeError):
    """A process that measures ended with an error."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_part(arguments: Sequence[str], threads: int) -> dict[str, Any]:
    """What ``python -m`` with these arguments and ``--output`` writes, in a process with a heap of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.json"
        command = [sys.executable, "-m", *arguments, f"--output={path}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise PartFailed(
                f"{' '.join(arguments)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
            )
        return json.loads(path.read_text(encoding="utf-8"))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Of the checkout; says so where code that is measured differs from it."""
    folders = ("p3o_kernels", "p3o_train", "bench")
    try:
        name, changed = (
            subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for command in (("rev-parse", "--short=10", "HEAD"), ("status", "--porcelain", "--", *folders))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changed else name


def environment() -> dict[str, Any]:
    return {
        "date": str(datetime.date.today()),
        "cpu": doctor.cpu_name(),
        "cores": cores(),
        "commit": commit(),
        "versions": {"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }


def measure_step() -> dict[str, Any]:
    missing = [module for module in MODULES_OF_STEP if find_spec(module) is None]
    if missing:
        return {"problem": f"{' and '.join(missing)} not installed (pip install '.[train]')"}
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={min(2, cores())}", "-m"]
    return run_part([*launch, "bench.step_phases"], threads=1)


def measure() -> dict[str, Any]:
    """All data of the page."""
    data: dict[str, Any] = {"environment": environment()}
    rows: list[dict[str, Any]] = []
    for threads in (count for count in THREADS if count <= max(cores(), 1)):
        say(f"times on the CPU, threads: {threads}")
        rows += run_part(["bench.cpu_times", f"--threads={threads}"], threads)["rows"]
    data["cpu"] = {"rows": rows, "absent": absences("cpu")}
    say("phases of a training step")
    data["train_step"] = measure_step()
    say("kernels, compiled for GPUs")
    return data | {"kernels": gpu_static.measure()}


def smoke() -> dict[str, Any]:
    """The same shape of data from tiny sizes, in this process."""
    threads = torch.get_num_threads()
    try:
        rows = cpu_times.measure(1, smoke=True)
    finally:
        torch.set_num_threads(threads)
    return {
        "environment": environment(),
        "cpu": {"rows": rows, "absent": absences("cpu")},
        "train_step": {"problem": "left out of a smoke run"},
        "kernels": [gpu_static.measure_one("scale_grad", 90)],
    }


def gpu_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """What ``bench.gpu_check`` has written."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def draw(data: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = data["cpu"]["rows"]
    page_plots.token_loss(rows, folder / "performance_token_loss.png")
    page_plots.from_hidden(rows, folder / "performance_from_hidden.png")
    if "rows" in data["train_step"]:
        page_plots.step(data["train_step"]["rows"], folder / "performance_step.png")
    page_plots.scaling_overhead(page_text.scaling_clusters(), folder / "performance_scaling.png")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=DOCS, help="folder of the page (default docs)")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--page-only", action="store_true", help="render the data that are there")
    choice.add_argument("--smoke", action="store_true", help="tiny sizes, to try the code")
    options = parser.parse_args(arguments)
    path = options.output / DATA
    if options.page_only and not path.exists():
        parser.error(f"there is no {path} to render; run without --page-only first")
    try:
        data = None if options.page_only else smoke() if options.smoke else measure()
    except PartFailed as error:
        say(f"page: {error}")
        return 1
    if data is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    # what was written, so that rendering again gives the same
    data = json.loads(path.read_text(encoding="utf-8"))
    text = page_text.page(data, gpu_results())
    draw(data, options.output / "images")
    (options.output / PAGE).write_text(text, encoding="utf-8")
    print(compact(data["cpu"]["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
