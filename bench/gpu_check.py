"""One command for a machine with a CUDA GPU: ``python -m bench.gpu_check``, at most 10 minutes.

Runs the tests that need a GPU, then measures the losses at real sizes: T = 8,192, V = 128,256 and 151,936, H = 4,096,
bfloat16. Prints the shares of what the GPU could do and writes them to ``bench/results``. What does not fit into the
time is listed as skipped. Exits with 0 when the tests passed and every measurement of this project was taken, else
with 1; with 2 on a machine without a GPU.
"""

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import gpu_report, interleave, peers
from bench.gpu_report import Measurement
from bench.vocabulary_workload import CUDA, GEMMS, Batch, Shape, Step, make_batch, p3o, peak_bytes
from p3o_kernels import token_log_probs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
BUDGET_SECONDS = 570.0  # of 600; the rest is for starting and writing
TESTS_SECONDS = 300.0
FINISH_SECONDS = 20.0  # left for the step that runs when time is up
ROUNDS = 20
LARGE_TILE = "given_context, one tile"


class Budget:
    """Time left."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        return self._end - self._clock()


def synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def run_tests(seconds: float) -> tuple[bool, str]:
    """Whether every gpu-marked test passed, and pytest's summary."""
    command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", "-o", "addopts=-ra", "--tb=short", "--no-header"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False, f"not finished within {seconds:.0f} s"
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-2000:])
    lines = done.stdout.strip().splitlines()
    return done.returncode == 0, lines[-1].strip("= ") if lines else f"pytest exited with {done.returncode}"


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, for a GPU without a data sheet here."""
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * source.nbytes / min(interleave.seconds({"copy": Step(copy)}, 6, synchronized)["copy"][1:])


def candidates(source: str, batch: Batch) -> dict[tuple[str, str], Callable[[], Step]]:
    """Builders by (provider, scope), what matters most first."""
    found: dict[tuple[str, str], Callable[[], Step]] = {}
    if source == "logits":
        logits = batch.leaves[0].detach()
        found["p3o", "log_probs"] = lambda: Step(lambda: token_log_probs(logits, batch.labels, mask=batch.mask))
    else:
        needed = batch.leaves[0].shape[0] * batch.leaves[1].shape[0] * batch.leaves[0].element_size()
        found["p3o", LARGE_TILE] = lambda: p3o(batch, "given_context", workspace_bytes=needed)
    # this project and the bound first: they are skipped last
    order = sorted(peers.providers(source), key=lambda name: name not in ("p3o", GEMMS))
    for name in order:
        for scope in peers.scopes(name):
            found[name, scope] = lambda name=name, scope=scope: peers.make_step(name, batch, scope)
    return found


def measure(source: str, shape: Shape, budget: Budget, share: float) -> list[Measurement]:
    """All candidates from ``source``, in ``share`` seconds of the budget."""
    stop = max(budget.left() - share, 0.0)
    batch = make_batch(shape, source, "cuda")
    found: dict[tuple[str, str], Measurement] = {}
    steps: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    for (provider, scope), build in candidates(source, batch).items():
        problem = peers.why_absent(provider, "cuda")
        if problem is None and budget.left() < stop + FINISH_SECONDS:
            problem = "skipped: no time left"
        if problem is None:
            problem = _prepare(f"{provider} {scope}", build, steps, peaks)
        sizes = (shape.vocab, shape.tokens, shape.hidden)
        found[provider, scope] = Measurement(source, scope, provider, *sizes, problem=problem)
    times = interleave.seconds(steps, ROUNDS, synchronized, until=lambda: budget.left() < stop + FINISH_SECONDS)
    medians = interleave.medians(times)
    return [
        replace(entry, seconds=medians.get(" ".join(key)), peak_bytes=peaks.get(" ".join(key)))
        for key, entry in found.items()
    ]


def _prepare(name: str, build: Callable[[], Step], steps: dict[str, Step], peaks: dict[str, int]) -> str | None:
    """Compiles, warms up and measures the peak; the reason when that fails. Other projects may fail in any way."""
    try:
        step = build()
        step()
        peaks[name] = peak_bytes(step, "cuda")
        step.clear()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    except Exception as error:
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    steps[name] = step
    return None


def environment(arguments: Sequence[str], bandwidth: float, measured: bool) -> dict[str, Any]:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = "not installed"
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": torch.cuda.get_device_name(),
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "bandwidth": f"{bandwidth / 1e12:.2f} TB/s ({'a measured copy' if measured else 'data sheet'})",
        "date": str(datetime.date.today()),
        "command": shlex.join(["python", "-m", "bench.gpu_check", *arguments]),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: this Python's torch finds no CUDA device; run it on a GPU machine.")
        return 2
    budget = Budget(BUDGET_SECONDS)
    passed, tests = (True, "not run") if options.skip_tests else run_tests(TESTS_SECONDS)
    print(f"GPU tests: {tests}", flush=True)
    known = gpu_report.data_sheet_bandwidth(torch.cuda.get_device_name())
    bandwidth = known or copy_bandwidth()
    facts = environment(arguments, bandwidth, known is None)
    work = [(source, shape) for source in ("logits", "hidden") for shape in CUDA]
    measurements: list[Measurement] = []
    for index, (source, shape) in enumerate(work):
        measurements += measure(source, shape, budget, budget.left() / (len(work) - index))
        torch.cuda.empty_cache()
        # after every part, so that an interruption leaves what there is
        rows = gpu_report.rows(measurements, bandwidth)
        paths = gpu_report.write(RESULTS, facts, tests, rows)
    print("\n".join(gpu_report.table(rows)))
    print("written:", *(path.relative_to(ROOT) for path in paths))
    return int(not passed or any(each.problem for each in measurements if each.provider == "p3o"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
