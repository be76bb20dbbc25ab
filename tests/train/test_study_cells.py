"""Cells in processes: what is finished stays, what is missing runs, what fails is told, and Ctrl-C loses nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p3o_train.engine import RolloutFailed
from p3o_train.study.cells import claim, divergence, result_path, run_cells
from p3o_train.study.design import Cell

CELLS = [Cell("on_policy", "p3o", seed) for seed in (1, 2, 3)]


def result(cell, scratch):
    (scratch / "rollout.jsonl").write_text("of the run")
    os.write(1, b"a line that would tear the bar")
    return {"cell": list(cell), "process": os.getpid()}


def test_a_second_start_runs_the_missing_ones(tmp_path, capfd):
    assert run_cells(CELLS[:2], tmp_path, result, workers=2) == []
    before = [result_path(tmp_path, cell).read_bytes() for cell in CELLS[:2]]
    assert run_cells(CELLS, tmp_path, result, workers=2) == []
    assert [result_path(tmp_path, cell).read_bytes() for cell in CELLS[:2]] == before
    processes = [json.loads(result_path(tmp_path, cell).read_text())["process"] for cell in CELLS]
    assert len({*processes, os.getpid()}) == 4  # one each, and none is this one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells", "failed"]
    assert len(list((tmp_path / "cells").iterdir())) == 3
    assert "a line that would tear the bar" not in "".join(capfd.readouterr())


def test_a_crash_is_told_and_others_go_on(tmp_path):
    def task(cell, scratch):
        if cell.seed == 1:
            raise KeyError("no such thing")
        if cell.seed == 2:
            os._exit(7)
        return result(cell, scratch)

    first, second = sorted(run_cells(CELLS, tmp_path, task, workers=1), key=lambda failure: failure.cell)
    assert first.cell == CELLS[0] and first.why.startswith("KeyError: 'no such thing' (all of it is in ")
    assert "Traceback" in Path(first.why.split(" is in ")[1].rstrip(")")).read_text()
    assert second == (CELLS[1], "its process ended with status 7")
    assert result_path(tmp_path, CELLS[2]).exists()
    assert run_cells(CELLS, tmp_path, result, workers=1) == []
    assert list((tmp_path / "failed").iterdir()) == []


PROGRAM = """
import sys, time
from pathlib import Path
from p3o_train.study.cells import run_cells
from p3o_train.study.design import Cell

def task(cell, scratch):
    if cell.seed > 1:
        (scratch / "begun").write_text("")
        time.sleep(60)
    return {"cell": list(cell)}

try:
    run_cells([Cell("on_policy", "p3o", seed) for seed in (1, 2, 3, 4)], Path(sys.argv[1]), task, workers=2)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_kill(tmp_path, stop):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 100  # importing torch on a busy machine
        while len(list(tmp_path.glob("running/*/begun"))) < 2:
            assert time.monotonic() < end and program.poll() is None
            time.sleep(0.05)
        if stop == signal.SIGINT:
            os.killpg(program.pid, stop)  # as a terminal does: parent and children
        else:
            program.send_signal(stop)
        assert program.wait(20) == 130  # a child that is waited for would take 60 seconds
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        os.killpg(program.pid, 0)
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["on_policy-p3o-1.json"]
    assert not (tmp_path / "running").exists()


def test_a_directory_of_another_design(tmp_path):
    claim(tmp_path, "short")
    claim(tmp_path, "short")
    before = (tmp_path / "design.json").read_bytes()
    with pytest.raises(ValueError, match="holds cells of size short, and this study is of size full"):
        claim(tmp_path, "full")
    assert (tmp_path / "design.json").read_bytes() == before
    changed = json.loads(before)
    changed["flags"]["on_policy-pg-42"].append("--lr")
    (tmp_path / "design.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="holds cells with other flags"):
        claim(tmp_path, "short")


@pytest.mark.parametrize(
    ("error", "diverged"),
    [
        (ValueError("invalid data on 3 of 12 valid tokens of this optimizer step: log-ratios"), True),
        (RuntimeError("the norm of the gradients is nan although all log-ratios are finite"), True),
        (RolloutFailed("rollout 3: sample 'a': the logits of response token 0 are not finite; weights", {}), True),
        (RolloutFailed("rollout 3: no server answers", {}), False),
        (ValueError("--lr must be at least --min-lr"), False),
        (RuntimeError("out of memory"), False),
    ],
    ids=str,
)
def test_divergence_is_a_result_and_a_crash_is_none(error, diverged):
    assert divergence(error) == (str(error) if diverged else "")
