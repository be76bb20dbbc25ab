"""The command line: ``p3o train`` and ``p3o doctor``, also as ``python -m p3o_train``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from p3o_train import doctor
from p3o_train.agreement import on_first_rank
from p3o_train.arguments import add_p3o_arguments, objective_from_arguments, validate_p3o_arguments
from p3o_train.config import (
    PRESETS,
    SamplingSettings,
    TrainConfig,
    add_train_arguments,
    config_from_arguments,
)
from p3o_train.contract import ContractViolation
from p3o_train.curves import draw_curves
from p3o_train.engine import RolloutFailed
from p3o_train.objective import Objective
from p3o_train.reward_workers import RewardFailed
from p3o_train.runtime import megatron_run
from p3o_train.sinks import FILE_NAME, Sink, open_sinks

CURVES, SETTINGS = "curves.png", "config.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status."""
    args = parse(argv)
    if args.command == "doctor":
        print(doctor.report())
        return 0 if doctor.healthy() else 1
    first = int(os.environ.get("RANK", "0")) == 0
    try:
        validate_p3o_arguments(args)
        _check_supported(args)
        config, objective = config_from_arguments(args), objective_from_arguments(args)
        sampling = _sampling(args)
        config.parallelism.data_size(int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        if first:
            print(f"p3o train: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        if first:
            print(json.dumps(vars(args), indent=2, sort_keys=True))
        return 0
    if problems := doctor.problems():
        if first:
            print(f"p3o train cannot run here: {'; '.join(problems)}. `p3o doctor` says what to do", file=sys.stderr)
        return 1
    try:
        train(config, objective, sampling, vars(args))
    except RunRefused as error:
        if first:
            print(f"p3o train: {error}", file=sys.stderr)
        return 2
    except (RolloutFailed, RewardFailed, ContractViolation) as error:
        if first:
            print(f"p3o train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if first:
            print(f"\nStopped. To go on from the last checkpoint, add --resume (run directory {config.run_dir}).")
        return 130
    return 0


def _check_supported(args: argparse.Namespace) -> None:
    """Flags of the parser that this trainer would have to ignore.

    Raises:
        ValueError: naming the flag and what to do.
    """
    if args.recompute_loss_function:
        raise ValueError(
            "--recompute-loss-function is for losses that keep logits for their backward pass; to save that memory "
            "here set --loss-from-hidden instead"
        )


def _sampling(args: argparse.Namespace) -> SamplingSettings:
    return SamplingSettings(
        temperature=args.rollout_temperature,
        convention=args.temperature_convention,
        top_p=args.rollout_top_p,
        top_k=args.rollout_top_k,
        update_weights_interval=args.update_weights_interval,
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags of either command; a preset gives defaults, and flags win over it."""
    parser = argparse.ArgumentParser(prog="p3o", description="P3O training on Megatron-Core")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print versions, devices, what will be used and what is missing")
    run = commands.add_parser("train", help="train a model", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    run.add_argument("--dry-run", action="store_true", help="check the flags, print all of them, and train nothing")
    run.add_argument("--preset", choices=sorted(PRESETS), help="defaults for a known run; other flags win over it")
    add_train_arguments(run)
    add_p3o_arguments(run)
    args = parser.parse_args(argv)
    if args.command == "train" and args.preset:
        run.set_defaults(**PRESETS[args.preset])
        args = parser.parse_args(argv)
    return args


def train(config: TrainConfig, objective: Objective, sampling: SamplingSettings, settings: dict[str, Any]) -> None:
    """One run, as every rank calls it.

    Raises:
        RunRefused: a run directory that is in use, without --resume; a checkpoint that cannot be resumed; files of
            weights or prompts that cannot be used. Nothing has changed then.
        RolloutFailed: requests that no engine answered.
        ContractViolation: log-probs that cannot be trained on.
    """
    from p3o_train.assembly import build_trainer, load_start

    # what Megatron says of missing accelerators while it is imported; `p3o doctor` says it once
    warnings.filterwarnings("ignore", module=r"megatron\.")
    directory = Path(config.run_dir)
    with megatron_run(config.parallelism, config.distributed_timeout_minutes), contextlib.ExitStack() as closing:
        on_first_rank(lambda: _check_unused(directory, config.resume))
        try:
            trainer = build_trainer(config, objective, sampling, load_start(config))
            closing.callback(trainer.rollouts.close)
            resumed = config.resume and trainer.resume()
        except (ValueError, ImportError, OSError) as error:
            raise RunRefused(str(error)) from error
        on_first_rank(lambda: _write_settings(directory, settings))
        sinks = closing.enter_context(_sinks(config, settings, trainer.steps_done))
        begin = trainer.steps_done
        if resumed and sinks:
            print(f"Going on after step {begin} of {config.total_steps}.")
        with _progress(config.total_steps, begin, bool(sinks)) as show:
            for step, row in trainer.run():
                for sink in sinks:
                    sink.write(step, row)
                show(row)
    if int(os.environ.get("RANK", "0")) == 0:
        draw_curves(directory / FILE_NAME, directory / CURVES)
        print(f"Numbers, curves and checkpoints are in {directory}: {FILE_NAME}, {CURVES}.")


class RunRefused(Exception):
    """A run that cannot start as it was asked for; the text says what to do."""


def _check_unused(directory: Path, resume: bool) -> None:
    if (directory / SETTINGS).exists() and not resume:
        raise RunRefused(
            f"--run-dir {directory} holds a run already; add --resume to go on with it, or name another directory"
        )


def _write_settings(directory: Path, settings: dict[str, Any]) -> None:
    """Resolved flags and versions, for whoever reads the run later."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / SETTINGS
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(settings | {"versions": doctor.versions()}, indent=2, sort_keys=True) + "\n")
    os.replace(temporary, path)


@contextlib.contextmanager
def _sinks(config: TrainConfig, settings: dict[str, Any], steps_done: int) -> Iterator[list[Sink]]:
    """Where the first rank writes numbers; none on the others."""
    if int(os.environ.get("RANK", "0")) != 0:
        yield []
        return
    sinks = open_sinks(
        Path(config.run_dir),
        tensorboard=config.tensorboard or None,
        wandb_project=config.wandb_project or None,
        resume_step=steps_done + 1 if config.resume else None,
        config=settings,
    )
    try:
        yield sinks
    finally:
        for sink in sinks:
            sink.close()


@contextlib.contextmanager
def _progress(total: int, begin: int, shown: bool) -> Iterator[Callable[[dict[str, float]], None]]:
    """A bar on a terminal, otherwise twenty lines."""
    from tqdm import tqdm

    every = max(1, total // 20)
    with tqdm(total=total, initial=begin, desc="p3o train", unit="step", disable=None if shown else True) as bar:

        def show(row: dict[str, float]) -> None:
            ess = next((value for name, value in row.items() if name.endswith("/normalized_ess")), 1.0)
            numbers = f"reward {row['train/reward_mean']:.3f}  ESS {ess:.4f}"
            nonlocal begin
            begin += 1
            bar.update()
            bar.set_postfix_str(numbers)
            if shown and bar.disable and (begin % every == 0 or begin == total):
                print(f"step {begin}/{total}  {numbers}", flush=True)

        yield show
