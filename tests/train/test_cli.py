"""The command line before anything runs: flags, presets, refusals. What runs is in tests/megatron."""

import dataclasses
import errno
import json
import re
import subprocess
import sys

import pytest

from p3o_train import cli
from p3o_train.config import PRESETS, TrainConfig
from p3o_train.engine import EngineError
from p3o_train.rollout_files import RolloutFileError


def test_flags_win_over_the_preset_and_the_preset_over_defaults():
    args = cli.parse(["train", "--preset", "tiny", "--lr", "0.25", "--p3o-ess-scope", "micro-batch"])
    assert args.lr == 0.25 and args.p3o_ess_scope == "micro-batch"
    assert args.use_rollout_logprobs
    assert args.rollout_max_response_len == PRESETS["tiny"]["rollout_max_response_len"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "-1"], "--lr must be at least --min-lr"),
        (["--tensor-model-parallel-size", "2"], "must divide the number of processes"),
        (["--rollout-top-p", "0.9"], "untruncated rollout distribution"),
        (["--rollout-temperature", "0.6"], "set --temperature-convention scaled"),
        (["--rollouts-ahead", "1", "--no-save-rollouts"], "--rollouts-ahead 1 with --no-save-rollouts"),
        (["--rollout-engine", "sglang"], "--sglang-urls is not set"),
        (["--recompute-loss-function"], "set --loss-from-hidden instead"),
        (["--p3o-ess-scope", "micro-batch", "--recompute-loss-function"], "--recompute-loss-function"),
    ],
)
def test_refusals_name_the_flag_and_leave_no_run_directory(flags, message, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert cli.main(["train", "--preset", "tiny", "--run-dir", str(run_dir), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not run_dir.exists()


def test_a_dry_run_prints_every_resolved_flag_and_trains_nothing(tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert cli.main(["train", "--preset", "tiny", "--run-dir", str(run_dir), "--lr", "0.25", "--dry-run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["lr"] == 0.25 and printed["rollout_batch_size"] == PRESETS["tiny"]["rollout_batch_size"]
    assert {field.name for field in dataclasses.fields(TrainConfig)} <= set(printed)
    assert cli.main(["train", "--dry-run", "--lr", "-1"]) == 2
    assert not run_dir.exists()


def test_a_missing_package_is_named_before_anything_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli.doctor, "problems", lambda: ["megatron-core is missing"])
    assert cli.main(["train", "--preset", "tiny", "--run-dir", str(tmp_path / "run")]) == 1
    assert "megatron-core is missing. `p3o doctor` says what to do" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "iter_7/model.pt"), r"No space .*iter_7/model\.pt.*--resume"),
        (
            RolloutFileError("rollout_3.jsonl, line 2: not a sample"),
            r"p3o train: rollout_3\.jsonl, line 2: not a sample$",
        ),
        (EngineError("http://a: gone"), "p3o train: http://a: gone$"),
    ],
)
def test_what_ends_a_run_is_said_in_one_line(error, message, monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(cli, "train", fail)
    monkeypatch.setattr(cli.doctor, "problems", list)
    assert cli.main(["train", "--preset", "tiny", "--run-dir", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err.strip()
    assert re.search(message, said) and "\n" not in said


def test_an_unknown_command_shows_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        cli.main(["teach"])
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["p3o_train", "p3o_train.cli"])
def test_importing_loads_no_heavy_package(module):
    heavy = "megatron", "transformer_engine", "transformers", "sglang", "httpx", "pebble", "matplotlib"
    heavy += "tensorboard", "wandb"
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
