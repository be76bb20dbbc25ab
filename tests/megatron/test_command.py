"""``p3o train`` as a user runs it: processes, kills, Ctrl-C, a second start."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
SMALL = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "8", "--hidden-size", "16"]
ROLLOUTS = 8
FLAGS = ["train", "--preset", "tiny", *SMALL, "--num-rollouts", str(ROLLOUTS), "--save-interval", "1"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(run_dir, *more, ranks=1):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*(start if ranks > 1 else [sys.executable]), "-m", "p3o_train", *FLAGS, "--run-dir", str(run_dir), *more]


def finished(arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, env=ENVIRONMENT, timeout=200)
    return done.returncode, done.stdout, done.stderr


def rows(run_dir):
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if "/time/" not in name} for line in lines]


def weights(run_dir, rank=0):
    last = Path(run_dir) / "checkpoints" / f"iter_{2 * ROLLOUTS:07d}" / f"rank_{rank:05d}.pt"
    return torch.load(last, weights_only=True)["model"]


def started(arguments, run_dir, lines):
    """A process that has written some steps."""
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        # a shell starts background jobs, such as a test run, with Ctrl-C ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    metrics, limit = Path(run_dir) / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert process.poll() is None and time.monotonic() < limit, process.stdout.read()
        time.sleep(0.02)
    return process


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    code, out, err = finished(command(run_dir))
    assert code == 0, err
    return run_dir, out


def test_a_run_leaves_numbers_curves_settings_and_checkpoints(whole):
    run_dir, out = whole
    assert f"step {2 * ROLLOUTS}/{2 * ROLLOUTS}" in out and "curves.png" in out
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 2 * ROLLOUTS + 1))
    assert (run_dir / "curves.png").read_bytes()[:4] == b"\x89PNG"
    settings = json.loads((run_dir / "config.json").read_text())
    assert settings["lr"] == 3e-3 and settings["versions"]["torch"] == torch.__version__
    assert not list(run_dir.glob("*.tmp"))


def test_kill_9_and_resume_end_in_the_same_bits(whole, tmp_path):
    killed = tmp_path / "killed"
    arguments = command(killed)
    for lines in (3, 8):
        process = started(arguments, killed, lines)
        process.send_signal(signal.SIGKILL)
        process.wait()
        arguments = command(killed, "--resume")
    code, out, err = finished(arguments)
    assert code == 0 and "Going on after step" in out, err
    assert rows(killed) == rows(whole[0])
    first, second = weights(killed), weights(whole[0])
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_finished_run_resumes_to_nothing(whole):
    before = rows(whole[0])
    code, out, err = finished(command(whole[0], "--resume"))
    assert code == 0 and f"Going on after step {2 * ROLLOUTS} of {2 * ROLLOUTS}" in out, err
    assert rows(whole[0]) == before


def test_a_run_directory_in_use(whole):
    code, _, err = finished(command(whole[0]))
    assert code == 2 and "holds a run already; add --resume" in err and "Traceback" not in err


def test_resume_with_another_learning_rate(whole):
    code, _, err = finished(command(whole[0], "--resume", "--lr", "0.5"))
    assert code == 2 and "lr was 0.003 and is 0.5" in err and "Traceback" not in err


def test_ctrl_c_says_how_to_go_on(tmp_path):
    run_dir = tmp_path / "stopped"
    process = started(command(run_dir, "--num-rollouts", "500"), run_dir, 4)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in out and "Traceback" not in out


def test_two_processes_of_tensor_parallelism(whole, tmp_path):
    code, out, err = finished(command(tmp_path / "two", "--tensor-model-parallel-size", "2", ranks=2))
    assert code == 0 and out.count(f"step {2 * ROLLOUTS}/{2 * ROLLOUTS}") == 1, err  # one rank talks
    found, wanted = rows(tmp_path / "two"), rows(whole[0])
    assert found[0]["train/reward_mean"] == wanted[0]["train/reward_mean"]
    for one, two in zip(found[:4], wanted, strict=False):
        # float32 sums in another order, through four steps
        assert one["train/p3o/total_loss"] == pytest.approx(two["train/p3o/total_loss"], abs=1e-4)
    assert weights(tmp_path / "two", rank=1)["0.module.output_layer.weight"].shape == (8, 16)
