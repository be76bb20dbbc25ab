"""Compiles every variant of every kernel for GPUs that need not be there and reports what came out.

Run ``python -m bench.kernel_report``: prints a line per variant and architecture, writes
``build/kernel_report.json``, and exits with 1 when a budget is broken. Each entry of the file holds all that is
needed to compile it again, see ``bench.compiled.inspect``.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from bench import compiled, roofline
from bench.budgets import BUDGETS, violations
from p3o_kernels._variants import VARIANTS

ARCHITECTURES = (80, 90, 100, "gfx942")
OUTPUT = Path(__file__).parents[1] / "build" / "kernel_report.json"
BOUND = "bound, not a measurement: max(bytes / bandwidth, instructions / issue rate, fp64 and special instructions)"


def entry(launch: dict[str, Any]) -> dict[str, Any]:
    """``launch`` with what its machine code shows, and the bound that follows."""
    try:
        measured = launch | compiled.inspect(launch)
    except Exception as error:
        raise RuntimeError(f"{launch['variant']} does not compile for {launch['arch']}") from error
    measured["bytes_per_element"] = roofline.bytes_per_element(launch)
    return measured | {"roofline": roofline.bounds(measured)}


def entries(launches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per launch, in order, compiled by two processes."""
    # spawn: a compiler that has started threads does not survive a fork
    context = multiprocessing.get_context("spawn")
    made: list[dict[str, Any]] = []
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=context) as pool:
        for made_now in pool.map(entry, launches):
            made.append(made_now)
            if len(made) % 9 == 0 or len(made) == len(launches):
                print(f"compiled {len(made)} of {len(launches)}", file=sys.stderr, flush=True)
    return made


def report(made: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "bound": BOUND,
        "devices": {name: asdict(device) for name, device in roofline.DEVICES.items()},
        "budgets": {name: asdict(budget) for name, budget in BUDGETS.items()},
        "kernels": made,
    }


def row(entry: dict[str, Any]) -> str:
    wide = sum(count for name, count in entry["memory"].items() if name.endswith((".128", "dwordx4")))
    cells = [
        f"{entry['role']:4} {entry['variant']:56} {entry['arch']!s:>6} {entry['registers']:4d}",
        f"{entry['spill_bytes']:5d} {wide:4d} {entry['bytes_per_element']:6d}",
    ]
    for unit in ("sass", "fp64", "conversion", "mufu"):
        value = entry.get(f"{unit}_per_element")
        cells.append("     -" if value is None else f"{value:6.2f}")
    bounds = entry["roofline"].items()
    limits = (f"{name} {bound['us_per_million_elements']:.2f} {bound['limited_by']}" for name, bound in bounds)
    return " ".join([*cells, " ", ", ".join(limits)]).rstrip()


def main() -> int:
    launches = [variant.launch(arch) for variant in VARIANTS for arch in ARCHITECTURES]
    made = entries(launches)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(report(made), indent=1) + "\n")
    print("per thread: registers, spilled bytes; per kernel: 128-bit loads, stores; per element: bytes, instructions")
    print("an element is a token, or in K1, K3 and K1K3, which stream [T, V] logits, one logit")
    print(f"last column, us per 1M elements: {BOUND}")
    print(f"{'':4} {'variant':56} {'arch':>6} regs spill wide  bytes   sass   fp64   conv   mufu")
    for made_now in made:
        print(row(made_now))
    broken = [sentence for made_now in made for sentence in violations(made_now)]
    for sentence in broken:
        print(f"over budget: {sentence}")
    print(f"{len(made)} kernels compiled, {len(broken)} budgets broken; details in {OUTPUT}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
