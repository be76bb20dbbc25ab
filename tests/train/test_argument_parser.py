"""Arguments: the flags on parsers of our own and of others, checkpoints to resume from, and the objective."""

import argparse
from argparse import Namespace

import pytest

from p3o_train.arguments import (
    add_p3o_arguments,
    objective_from_arguments,
    validate_p3o_arguments,
    validate_p3o_resume,
)
from p3o_train.objective import Objective

ESTIMATORS = ("p3o", "grpo", "cispo", "pg")


def test_our_own_parser():
    parser = argparse.ArgumentParser()
    assert add_p3o_arguments(parser) is parser
    assert vars(parser.parse_args([])) == {
        "advantage_estimator": "p3o",
        "p3o_ess_scope": "micro-batch",
        "p3o_context_source": "prepass",
        "p3o_kl_mode": "proxy_safe",
        "loss_from_hidden": False,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "entropy_coef": 0.0,
        "kl_loss_coef": 0.0,
        "use_rollout_logprobs": False,
        "calculate_per_token_loss": False,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "temperature_convention": None,
        "record_kept_tokens": False,
        "update_weights_interval": 1,
        "recompute_loss_function": False,
    }
    validate_p3o_arguments(parser.parse_args(["--use-rollout-logprobs", "--calculate-per-token-loss"]))
    with pytest.raises(SystemExit):
        parser.parse_args(["--p3o-kl-mode", "exact"])


def test_help_says_why_proxy_is_not_the_default():
    text = " ".join(add_p3o_arguments(argparse.ArgumentParser()).format_help().split())
    assert "wrong sign at log-ratios below -10" in text


def test_help_has_every_method_of_comparison():
    text = " ".join(add_p3o_arguments(argparse.ArgumentParser()).format_help().split())
    assert "{p3o,grpo,cispo,pg}" in text and "{proxy_safe,proxy,importance,off}" in text
    for part in ("plain policy gradient, which has no ratio", "published with 1, which is no lower bound", "no pull"):
        assert part in text


@pytest.mark.parametrize("conflict_handler", ["error", "resolve"])
@pytest.mark.parametrize("choices", [["gspo", "grpo"], ("ppo",), None])
def test_what_a_parser_has_it_keeps(conflict_handler, choices):
    parser = argparse.ArgumentParser(conflict_handler=conflict_handler)
    group = parser.add_argument_group("theirs")
    group.add_argument("--advantage-estimator", choices=choices, default="gspo", help="theirs")
    group.add_argument("--clip-low", type=float, default=0.4, help="theirs")
    group.add_argument("--calculate-per-token-loss", action="store_true", dest="per_token")
    original = list(choices) if choices else None
    for _ in range(2):
        add_p3o_arguments(parser)
        args = parser.parse_args(["--advantage-estimator", "p3o", "--calculate-per-token-loss", "--rollout-top-k", "5"])
        assert (args.clip_low, args.clip_high, args.per_token, args.rollout_top_k) == (0.4, 0.2, True, 5)
        assert parser.get_default("advantage_estimator") == "gspo"
        estimator = parser._option_string_actions["--advantage-estimator"]
        assert estimator.help == "theirs"
        if choices is None:
            assert estimator.choices is None
        else:
            assert estimator.choices == [*original, *(name for name in ESTIMATORS if name not in original)]
            assert list(choices) == original
    assert parser.format_help().count("\np3o:\n") == 1


# resuming


@pytest.fixture
def native(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    return tmp_path


def resume(load, estimator="p3o", interval=3, finetune=False, snapshot=False):
    args = Namespace(advantage_estimator=estimator, update_weights_interval=interval, load=load, finetune=finetune)
    before = dict(vars(args))
    validate_p3o_resume(args, snapshot_in_checkpoint=snapshot)
    assert vars(args) == before


def test_resume_without_the_snapshot_is_refused(native):
    for load in (native, str(native), f"{native}/"):
        with pytest.raises(ValueError, match=r"interval 3 .*cannot resume exactly.*snapshot is not checkpointed"):
            resume(load)


@pytest.mark.parametrize(
    "change",
    [{"interval": 1}, {"interval": None}, {"estimator": "grpo"}, {"snapshot": True}, {"finetune": True}],
    ids=str,
)
def test_resume_is_accepted(native, change):
    resume(native, **change)


@pytest.mark.parametrize("load", [None, "absent"])
def test_a_fresh_run_is_accepted(tmp_path, load):
    resume(load and tmp_path / load)


def test_checkpoints_that_are_not_native(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    resume(tmp_path)
    (tmp_path / "iter_0000012").mkdir()
    resume(tmp_path / "iter_0000012")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    resume(tmp_path)


def test_an_iteration_itself_is_native(tmp_path):
    folder = tmp_path / "iter_0000012"
    folder.mkdir()
    (folder / "common.pt").write_bytes(b"0")
    with pytest.raises(ValueError, match="iter_0000012"):
        resume(folder)
    resume(folder.rename(tmp_path / "iter_12"))


# objective


def test_objective():
    args = Namespace(
        advantage_estimator="grpo",
        p3o_ess_scope="step",
        p3o_context_source="reuse",
        p3o_kl_mode="proxy",
        loss_from_hidden=True,
        clip_low=0.1,
        clip_high=0.3,
        entropy_coef=0.01,
        kl_loss_coef=0.02,
        rollout_temperature=0.6,
    )
    assert objective_from_arguments(args) == Objective(
        advantage_estimator="grpo",
        ess_scope="step",
        context_source="reuse",
        kl_mode="proxy",
        from_hidden=True,
        clip_low=0.1,
        clip_high=0.3,
        entropy_coef=0.01,
        ref_kl_coef=0.02,
        temperature=0.6,
    )


def test_objective_of_few_arguments():
    assert objective_from_arguments(Namespace(clip_low=None, rollout_temperature=0.8)) == Objective(temperature=0.8)
    for convention, temperature in (("scaled", 0.8), ("mismatch", 1.0), ("raw", 1.0)):
        args = Namespace(rollout_temperature=0.8, temperature_convention=convention)
        assert objective_from_arguments(args).temperature == temperature
    with pytest.raises(ValueError, match=r"advantage_estimator .*'ppo'"):
        objective_from_arguments(Namespace(advantage_estimator="ppo"))
