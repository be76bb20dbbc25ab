"""What the study runs: settings x methods x seeds, each a list of flags of ``p3o train``."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from p3o_train.arguments import add_p3o_arguments, objective_from_arguments, validate_p3o_arguments
from p3o_train.config import SamplingSettings, TrainConfig, add_train_arguments, config_from_arguments
from p3o_train.objective import Objective

SEEDS = (42, 123, 2026)
P3O, MICRO_BATCH_SCOPE = "p3o", "p3o_micro_batch"


class Setting(NamedTuple):
    """One way in which what is sampled drifts from what is trained."""

    label: str
    flags: str
    scopes: bool = False
    """Whether micro-batch scope is run beside step scope."""


class Method(NamedTuple):
    """One loss."""

    label: str
    flags: str


class Cell(NamedTuple):
    """One run."""

    setting: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.setting}-{self.method}-{self.seed}"


# what every cell has in common
COMMON = (
    "--task reverse-digits --rollout-max-response-len 4 --use-rollout-logprobs --calculate-per-token-loss "
    "--save-interval 0 --no-save-rollouts --eval-interval 4 --n-eval-prompts 128"
)

SIZES = {
    "short": "--num-layers 1 --hidden-size 48 --num-query-groups 4 --ffn-hidden-size 96 --init-std 0.05 "
    "--rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 --num-rollouts 80 --lr 2e-3",
    "full": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --init-std 0.05 --rollout-batch-size 32 "
    "--n-samples-per-prompt 16 --global-batch-size 512 --num-rollouts 80 --lr 3e-3",
}
# four optimizer steps a rollout, and rollouts that are up to 16 rollouts old
LAG = {
    "short": "--rollouts-ahead 16 --save-rollouts --global-batch-size 32 --num-rollouts 80",
    "full": "--rollouts-ahead 16 --save-rollouts --global-batch-size 128 --num-rollouts 80",
}


def _temperature(value: str, convention: str) -> str:
    # evaluations are of the policy that is trained: with scaled, the one at this temperature
    evaluated = f" --eval-temperature {value}" if convention == "scaled" else ""
    return f"--rollout-temperature {value} --temperature-convention {convention}{evaluated}"


def settings(size: str) -> dict[str, Setting]:
    """Of a size of the study, by name."""
    lag = LAG[size]
    return {
        "on_policy": Setting("on-policy", ""),
        "t0p6_mismatch": Setting("temperature 0.6, mismatch", _temperature("0.6", "mismatch")),
        "t0p6_scaled": Setting("temperature 0.6, scaled", _temperature("0.6", "scaled")),
        "t0p6_raw": Setting("temperature 0.6, raw", _temperature("0.6", "raw")),
        "t1p2_mismatch": Setting("temperature 1.2, mismatch", _temperature("1.2", "mismatch"), scopes=True),
        "t1p2_scaled": Setting("temperature 1.2, scaled", _temperature("1.2", "scaled")),
        "t1p2_raw": Setting("temperature 1.2, raw", _temperature("1.2", "raw")),
        "t1p5_mismatch": Setting("temperature 1.5, mismatch", _temperature("1.5", "mismatch")),
        "sync_3": Setting("weights handed over every 3 rollouts", "--update-weights-interval 3"),
        "lag_16": Setting("16 rollouts old, learning rate 7e-4", f"{lag} --lr 7e-4", scopes=True),
        "lag_16_fast": Setting("16 rollouts old, learning rate 2e-3", f"{lag} --lr 2e-3", scopes=True),
    }


_STEP = "--advantage-estimator p3o --p3o-ess-scope step"
METHODS = {
    P3O: Method("P3O", f"{_STEP} --p3o-kl-mode proxy_safe"),
    "p3o_importance": Method("P3O, importance KL", f"{_STEP} --p3o-kl-mode importance"),
    "p3o_kl_off": Method("P3O, no KL", f"{_STEP} --p3o-kl-mode off"),
    "grpo_0p2": Method("GRPO 0.2", "--advantage-estimator grpo --clip-low 0.2 --clip-high 0.2"),
    "grpo_0p4": Method("GRPO 0.4", "--advantage-estimator grpo --clip-low 0.4 --clip-high 0.4"),
    "grpo_0p6": Method("GRPO 0.6", "--advantage-estimator grpo --clip-low 0.6 --clip-high 0.6"),
    "cispo": Method("CISPO", "--advantage-estimator cispo --clip-low 1 --clip-high 0.2"),
    "pg": Method("PG", "--advantage-estimator pg"),
    # where Setting.scopes: e of eight responses at a time
    MICRO_BATCH_SCOPE: Method(
        "P3O, micro-batch scope",
        "--advantage-estimator p3o --p3o-ess-scope micro-batch --p3o-kl-mode proxy_safe --micro-batch-size 8",
    ),
}


def cells(
    size: str,
    only_settings: Sequence[str] = (),
    only_methods: Sequence[str] = (),
    only_seeds: Sequence[int] = SEEDS,
) -> list[Cell]:
    """Every run of the study, or of the part of it that is named; an empty sequence stands for all.

    All methods of a setting and seed come before the next seed, so that a study that is broken off can be read.

    Raises:
        ValueError: a setting, method or size that there is none of, or a seed twice.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}; got {size!r}")
    known = settings(size)
    for flag, given, names in (("--settings", only_settings, known), ("--methods", only_methods, METHODS)):
        if unknown := [name for name in given if name not in names]:
            raise ValueError(f"{flag} must be some of {', '.join(names)}; got {', '.join(unknown)}")
    if not only_seeds or len(set(only_seeds)) != len(only_seeds):
        raise ValueError(f"--seeds must be different numbers, at least one; got {list(only_seeds)}")
    return [
        Cell(setting, method, seed)
        for seed, setting, method in itertools.product(only_seeds, known, METHODS)
        if (not only_settings or setting in only_settings)
        and (not only_methods or method in only_methods)
        and (method != MICRO_BATCH_SCOPE or known[setting].scopes)
    ]


def flags_of(cell: Cell, size: str) -> list[str]:
    """What ``p3o train`` takes to run the cell, but for the run directory. A later flag wins over an earlier one."""
    parts = (COMMON, SIZES[size], settings(size)[cell.setting].flags, METHODS[cell.method].flags, f"--seed {cell.seed}")
    return " ".join(parts).split()


def resolved(flags: Sequence[str]) -> tuple[TrainConfig, Objective, SamplingSettings]:
    """What flags of ``p3o train`` ask for, checked as that command checks them.

    Raises:
        ValueError: flags that do not go together.
    """
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    args = add_p3o_arguments(parser).parse_args(flags)
    validate_p3o_arguments(args)
    sampling = SamplingSettings(
        temperature=args.rollout_temperature,
        convention=args.temperature_convention,
        update_weights_interval=args.update_weights_interval,
    )
    return config_from_arguments(args), objective_from_arguments(args), sampling
