"""The suite notices: each fault that would ruin training is put into a copy, and the tests must fail there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EAGER, TRITON = {"TRITON_INTERPRET": "0"}, {"TRITON_INTERPRET": "1"}
GOLDEN = ["tests/kernels/test_golden.py", "-k", "not compiled"]
ROWS = ["tests/kernels/test_row_parity.py", "tests/kernels/test_row_pitfalls.py"]
ROWS += ["-k", "row_counts or padding or common_offset or masked_rows"]
# file, what stands there, what the fault makes of it, environment of the lane
FAULTS = {
    "eager, gradient sign": ("_eager_terms.py", ".sub_(weight)", ".add_(weight)", EAGER),
    "eager, dropped mask": ("_eager_terms.py", "if mask is None else mask", "if True else mask", EAGER),
    "eager, float32 sums": ("_eager_terms.py", "[ratio.sum(), (ratio", "[ratio.float().sum().double(), (ratio", EAGER),
    "triton, gradient sign": (
        "_token_kernels.py",
        "slope - capped * advantages",
        "slope + capped * advantages",
        TRITON,
    ),
    "triton, dropped mask": ("_math_kernels.py", "remaining, BLOCK) != 0", "remaining, BLOCK) != 9", TRITON),
    "triton, float32 sums": ("_token_kernels.py", "total[0] + ratio,", "total[0] + ratio.to(tl.float32),", TRITON),
}
ROW_FAULTS = {
    "eager, no label": ("_row_eager.py", "torch.where(owned[:, 0], onehot, 0.0)", "torch.zeros_like(onehot)", EAGER),
    "eager, zeros off target": ("_row_eager.py", "mul_(softmax[:, None])", "mul_(0.0 * softmax[:, None])", EAGER),
    "eager, lone normaliser": ("_row_eager.py", "high, normalizer - high]", "high, high - high]", EAGER),
    "eager, masked row kept": ("_row_eager.py", "idle = idle | ~mask", "idle = idle | False", EAGER),
    "triton, no label": ("_row_kernels.py", "slope, HAS_ENTROPY) + onehot", "slope, HAS_ENTROPY)", TRITON),
    "triton, zeros off target": (
        "_row_math_kernels.py",
        "return softmax * tl.exp2(u)",
        "return softmax * tl.exp2(u) * (u > -0.5)",
        TRITON,
    ),
    "triton, padding counts": (
        "_row_kernels.py",
        'mask=inside, other=float("-inf")',
        "mask=inside, other=0.0",
        TRITON,
    ),
    "triton, masked row kept": ("_row_kernels.py", "valid = (has_mask == 0) |", "valid = (row >= 0) |", TRITON),
}


def run_tests(copy: Path, lane: dict[str, str], tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | lane | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path):
    for name in ("p3o_kernels", "tests/kernels", "tests/data"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("fault", [*FAULTS, *(f"rows, {name}" for name in ROW_FAULTS)])
def test_a_fault_fails_the_suite(copy, fault):
    in_rows = fault.startswith("rows, ")
    name, before, after, lane = ROW_FAULTS[fault.removeprefix("rows, ")] if in_rows else FAULTS[fault]
    path = copy / "p3o_kernels" / name
    source = path.read_text()
    assert before in source, "the fault no longer applies: write it for today's code"
    path.write_text(source.replace(before, after))
    done = run_tests(copy, lane, ROWS if in_rows else GOLDEN)
    # 1: tests ran and failed; anything else would be a fault that does not even run
    assert done.returncode == 1 and "FAILED tests/kernels" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("tests", [GOLDEN, ROWS], ids=["golden", "rows"])
@pytest.mark.parametrize("lane", [EAGER, TRITON], ids=["eager", "triton"])
def test_without_a_fault_it_passes(copy, lane, tests):
    done = run_tests(copy, lane, tests)
    assert done.returncode == 0, done.stdout + done.stderr
