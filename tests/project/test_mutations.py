"""The suite notices: each fault that would ruin training is put into a copy, and the golden test must fail there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EAGER, TRITON = {"TRITON_INTERPRET": "0"}, {"TRITON_INTERPRET": "1"}
# file, what stands there, what the fault makes of it, environment of the lane
FAULTS = {
    "eager, gradient sign": ("_eager_terms.py", ".sub_(weight)", ".add_(weight)", EAGER),
    "eager, dropped mask": ("_eager_terms.py", "if mask is None else mask", "if True else mask", EAGER),
    "eager, float32 sums": ("_eager_terms.py", "[ratio.sum(), (ratio", "[ratio.float().sum().double(), (ratio", EAGER),
    "triton, gradient sign": (
        "_token_kernels.py",
        "kl_slope - capped * advantages",
        "kl_slope + capped * advantages",
        TRITON,
    ),
    "triton, dropped mask": ("_math_kernels.py", "remaining, BLOCK) != 0", "remaining, BLOCK) != 9", TRITON),
    "triton, float32 sums": ("_token_kernels.py", "total[0] + ratio,", "total[0] + ratio.to(tl.float32),", TRITON),
}


def golden_test(copy: Path, lane: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", "not compiled"]
    environment = os.environ | lane | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, "tests/kernels/test_golden.py"], cwd=copy, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def copy(tmp_path):
    for name in ("p3o_kernels", "tests/kernels", "tests/data"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_suite(copy, fault):
    name, before, after, lane = FAULTS[fault]
    path = copy / "p3o_kernels" / name
    source = path.read_text()
    assert before in source, "the fault no longer applies: write it for today's code"
    path.write_text(source.replace(before, after))
    done = golden_test(copy, lane)
    # 1: tests ran and failed; anything else would be a fault that does not even run
    assert done.returncode == 1 and "FAILED tests/kernels" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("lane", [EAGER, TRITON], ids=["eager", "triton"])
def test_without_a_fault_it_passes(copy, lane):
    done = golden_test(copy, lane)
    assert done.returncode == 0, done.stdout + done.stderr
