"""Settings of a run: every field is a flag, every refusal names its flag."""

import argparse
import dataclasses

import pytest
import torch

from p3o_train.arguments import add_p3o_arguments, validate_p3o_arguments
from p3o_train.config import PRESETS, TrainConfig, add_train_arguments, config_from_arguments


def parser():
    made = argparse.ArgumentParser()
    add_train_arguments(made)
    return made


def test_no_flag_gives_the_defaults():
    assert config_from_arguments(parser().parse_args([])) == TrainConfig()


def test_every_field_is_a_flag_of_its_type():
    other = {
        "run_dir": "there",
        "lr_decay_style": "cosine",
        "wandb_project": "mine",
        "rollout_batch_size": 32,
        "global_batch_size": 64,
        "lr_warmup_iters": 3,
        "num_rollouts": 50,
        "n_samples_per_prompt": 4,
        "task": "prompts",
        "rollout_engine": "sglang",
        "reward_on_failure": "zero",
        "mirror_metrics": "verl",
        **dict.fromkeys(("prompt_data", "eval_prompt_data", "sglang_urls", "hf_checkpoint"), "somewhere"),
        "save_rollouts": True,  # rollouts ahead need it
    }
    flags, want = [], {}
    for field in dataclasses.fields(TrainConfig):
        name, value = "--" + field.name.replace("_", "-"), field.default
        if isinstance(value, bool):
            want[field.name] = other.get(field.name, not value)
            flags.append(name if want[field.name] else name.replace("--", "--no-", 1))
        else:
            want[field.name] = other.get(field.name, value + 1 if isinstance(value, int) else value)
            flags += [name, str(want[field.name])]
    assert dataclasses.asdict(config_from_arguments(parser().parse_args(flags))) == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rollouts": 0}, "--num-rollouts must be at least 1; got 0"),
        ({"micro_batch_size": -1}, "--micro-batch-size must be 0 or more; got -1"),
        ({"global_batch_size": 100}, "--global-batch-size must be a divisor of the 128 responses of a rollout"),
        ({"lr": 0.1, "min_lr": 0.2}, "--lr must be at least --min-lr"),
        ({"lr_decay_style": "step"}, "--lr-decay-style must be one of constant, linear"),
        ({"lr_warmup_iters": 100}, "--lr-warmup-iters must be less than the 100 optimizer steps"),
        ({"keep_checkpoints": 0}, "--keep-checkpoints must be at least 1"),
        ({"max_tokens_per_gpu": 0}, "--max-tokens-per-gpu must be at least 1"),
        ({"rollouts_ahead": -1}, "--rollouts-ahead must be 0 or more; got -1"),
        ({"rollouts_ahead": 1, "save_rollouts": False}, "--rollouts-ahead 1 with --no-save-rollouts"),
        ({"eval_interval": -1}, "--eval-interval must be 0 or more"),
        ({"eval_temperature": 0.0}, "--eval-temperature must be a finite number above 0; got 0.0"),
        ({"n_eval_prompts": 0}, "--n-eval-prompts must be at least 1"),
        ({"rollout_engine": "vllm"}, "--rollout-engine must be one of local, sglang; got 'vllm'"),
        ({"rollout_engine": "sglang"}, "--sglang-urls is not set: --rollout-engine sglang asks a server"),
        ({"mirror_metrics": "wandb"}, "--mirror-metrics must be one of none, verl, slime; got 'wandb'"),
        ({"reward_on_failure": "skip"}, "--reward-on-failure must be one of raise, zero; got 'skip'"),
        ({"task": "chess"}, "--task must be one of reverse-digits, digit-sums, prompts; got 'chess'"),
        ({"task": "digit-sums"}, "--hf-checkpoint is not set: --task digit-sums needs a tokenizer"),
        ({"task": "prompts", "hf_checkpoint": "x"}, "--prompt-data is not set: --task prompts reads them from a file"),
        (
            {"task": "prompts", "hf_checkpoint": "x", "prompt_data": "y", "eval_interval": 5},
            "--eval-prompt-data is not set: --eval-interval 5",
        ),
    ],
)
def test_values_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)


def test_steps_of_a_run():
    config = TrainConfig(num_rollouts=7, rollout_batch_size=4, n_samples_per_prompt=6, global_batch_size=8)
    assert config.steps_per_rollout == 3 and config.total_steps == 21
    assert config.optimizer_settings().total_steps == 21


def test_neither_precision_flag_means_float32():
    assert TrainConfig().model_config(16).dtype == torch.float32
    assert TrainConfig(bf16=True).model_config(16).dtype == torch.bfloat16


def test_identity_is_what_changes_numbers():
    same = dataclasses.replace(
        TrainConfig(), run_dir="x", save_interval=1, keep_checkpoints=9, resume=True, distributed_timeout_minutes=1.0
    )
    assert same.identity() == TrainConfig().identity()
    for change in ({"lr": 2e-3}, {"seed": 1}, {"context_parallel_size": 2}, {"micro_batch_size": 4}):
        assert dataclasses.replace(TrainConfig(), **change).identity() != TrainConfig().identity()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_name_flags_that_exist_and_agree(name):
    made = parser()
    add_p3o_arguments(made)
    known = vars(made.parse_args([]))
    assert set(PRESETS[name]) <= set(known)
    made.set_defaults(**PRESETS[name])
    # what only its user can know
    yours = ("--hf-checkpoint", "dir", "--prompt-data", "file", "--sglang-urls", "url") if name == "a100x4" else ()
    args = made.parse_args(yours)
    validate_p3o_arguments(args)
    config_from_arguments(args)
