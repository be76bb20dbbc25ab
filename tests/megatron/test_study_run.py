"""The study on the real trainer: a few short cells, their files, the page, and a second start that runs nothing."""

import json
import subprocess
import sys

import pytest

from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]

# the command with a study that is smaller than any of its own
PROGRAM = """
import sys
from p3o_train.cli import main
from p3o_train.study import design, start

design.SIZES["short"] = (
    "--num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --init-std 0.05 --rollout-batch-size 4 "
    "--n-samples-per-prompt 4 --global-batch-size 16 --num-rollouts 3 --lr 1e-3"
)
design.LAG["short"] = "--rollouts-ahead 2 --save-rollouts --global-batch-size 4 --num-rollouts 4"
start.STEPS = 20
sys.exit(main(["study", "--workers", "2", "--seeds", "7", *sys.argv[1:]]))
"""


def study(*flags):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, flags)], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cells_page_and_second_start(tmp_path):
    run, output = tmp_path / "run", tmp_path / "docs"
    chosen = ("--run-dir", run, "--settings", "on_policy", "t0p6_raw", "lag_16")
    assert "All 6 cells are in" in study(*chosen, "--methods", "p3o_kl_off", "cispo", "--output", output)
    files = sorted(path for path in (run / "cells").iterdir() if not path.name.startswith("start"))
    assert len(files) == 6
    made = {path.stem: json.loads(path.read_text()) for path in files}
    for name, result in made.items():
        assert result["diverged"] == "" and result["seconds"] > 0
        assert len(result["rows"]) == result["planned"] == (16 if name.startswith("lag") else 3)
        assert len(result["evaluations"]) == 1
        assert all(0 <= reward <= 1 and 0 < ess <= 1.0000001 for reward, ess, _, _ in result["rows"])
    # the same weights, prompts and random numbers: the first rollout is the same for every method
    first = {name: result["rows"][0][0] for name, result in made.items()}
    assert first["on_policy-p3o_kl_off-7"] == first["on_policy-cispo-7"]
    fresh = made["on_policy-p3o_kl_off-7"]["rows"] + made["t0p6_raw-cispo-7"]["rows"]
    assert all(ess > 0.99999 and abs(kl) < 1e-6 for _, ess, _, kl in fresh)
    late = made["lag_16-p3o_kl_off-7"]["rows"][-1]
    assert late[1] < 0.9999 and late[3] > 0
    assert not (run / "running").exists()  # nor the rollout files of cells with old rollouts
    text = (output / "study.md").read_text()
    assert "Failed" in text and (output / "images" / "study_lag_16.png").exists()
    before = {path: path.stat().st_mtime_ns for path in (run / "cells").iterdir()}
    assert "All 6 cells are in" in study(*chosen, "--methods", "p3o_kl_off", "cispo")
    assert {path: path.stat().st_mtime_ns for path in (run / "cells").iterdir()} == before
