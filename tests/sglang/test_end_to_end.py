"""``p3o train`` with the responses of a real server, end to end: three steps, as a user starts them."""

import json
import subprocess
import sys

import pytest

from p3o_train.rollout_files import read_rollout, rollout_ids
from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = NEEDS_MEGATRON
TRAIN = [sys.executable, "-m", "p3o_train", "train"]
SMALL = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "16"]
SMALL += ["--rollout-max-response-len", "12", "--num-rollouts", "3", "--lr", "1e-3", "--save-interval", "0"]
P3O = ["--p3o-ess-scope", "step", "--use-rollout-logprobs", "--calculate-per-token-loss"]


def train(server, model_path, run_dir, *flags):
    """(rows, samples of every rollout)."""
    command = [
        sys.executable,
        "-m",
        "p3o_train",
        "train",
        "--hf-checkpoint",
        str(model_path),
        "--run-dir",
        str(run_dir),
    ]
    command += ["--rollout-engine", "sglang", "--sglang-urls", server.url, *SMALL, *P3O, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    folder = run_dir / "rollouts"
    return rows, [read_rollout(folder, rollout_id)[1] for rollout_id in rollout_ids(folder)]


@pytest.mark.parametrize(
    ("flags", "temperature"),
    [([], 1.0), (["--rollout-temperature", "0.6", "--temperature-convention", "scaled"], 0.6)],
    ids=["1", "0.6"],
)
def test_fresh_rollouts_have_ratio_one(server, model_path, tmp_path, flags, temperature):
    rows, rollouts = train(server, model_path, tmp_path / "run", *flags)
    assert len(rows) == len(rollouts) == 3
    for rollout_id, (row, samples) in enumerate(zip(rows, rollouts, strict=True)):
        assert {sample.recording.engine for sample in samples} == {"sglang"}
        assert {sample.recording.sampling.temperature for sample in samples} == {temperature}
        assert all(sample.weight_versions.eq(rollout_id).all() for sample in samples)
        # every weight change arrives: SGLang's float32 and Megatron's, log-probs around -6
        assert row["train/p3o/log_ratio_abs_max"] < 1e-3
        assert row["train/p3o/normalized_ess"] == pytest.approx(1, abs=1e-6)
        assert row["train/p3o/ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert row["train/p3o/valid_tokens"] == sum(sample.response_length for sample in samples) > 16


def test_another_temperature_than_the_trainer_s_lowers_ess(server, model_path, tmp_path):
    flags = ["--rollout-temperature", "0.6", "--temperature-convention", "mismatch"]
    rows, _ = train(server, model_path, tmp_path / "run", *flags)
    assert all(row["train/p3o/normalized_ess"] < 0.8 for row in rows)


def test_rollouts_ahead_are_one_policy_older(server, model_path, tmp_path):
    rows, rollouts = train(server, model_path, tmp_path / "run", "--rollouts-ahead", "1", "--lr", "1e-2")
    assert [row["train/p3o/policy_age_max"] for row in rows] == [0, 1, 1]
    assert [{*samples[0].weight_versions.tolist()} for samples in rollouts] == [{0}, {0}, {1}]
    assert rows[0]["train/p3o/normalized_ess"] > 1 - 1e-6 > rows[2]["train/p3o/normalized_ess"]


def test_truncated_sampling_is_normalised_over_the_kept_tokens(server, model_path, tmp_path):
    flags = ["--rollout-top-p", "0.9", "--rollout-top-k", "200", "--record-kept-tokens"]
    rows, rollouts = train(server, model_path, tmp_path / "run", *flags)
    assert {sample.recording.log_prob_kind for samples in rollouts for sample in samples} == {"truncated"}
    assert all(row["train/p3o/log_ratio_abs_max"] < 1e-3 for row in rows)


def test_a_server_that_is_not_there_is_named(tmp_path):
    command = [*TRAIN, "--preset", "tiny", "--run-dir", str(tmp_path / "run")]
    command += ["--rollout-engine", "sglang", "--sglang-urls", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("p3o train: ")]
    assert "http://127.0.0.1:9" in line and "Traceback" not in done.stderr
