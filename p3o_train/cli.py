"""The command line: ``p3o train``, ``export``, ``plot``, ``report``, ``study``, ``parity`` and ``doctor``.

Also as ``python -m p3o_train``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from p3o_train import doctor
from p3o_train.arguments import add_p3o_arguments, objective_from_arguments, validate_p3o_arguments
from p3o_train.config import PRESETS, SamplingSettings, add_train_arguments, config_from_arguments
from p3o_train.contract import ContractViolation
from p3o_train.engine import EngineError
from p3o_train.parity import add_parity_arguments, run_parity
from p3o_train.plots import add_plot_arguments, run_plot
from p3o_train.report import add_report_arguments, run_report
from p3o_train.reward_workers import RewardFailed
from p3o_train.rollout_files import RolloutFileError
from p3o_train.run import RunRefused, export, train
from p3o_train.study.command import add_study_arguments, run_study


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status."""
    args = parse(argv)
    simple = {"doctor": _doctor, "parity": run_parity, "plot": run_plot, "report": run_report, "study": run_study}
    if args.command in simple:
        return simple[args.command](args)
    try:
        action = _action(args)
    except ValueError as error:
        return _stopped(args, error, 2)
    if args.dry_run:
        _say(json.dumps(vars(args), indent=2, sort_keys=True))
        return 0
    if problems := doctor.problems():
        return _stopped(args, f"cannot run here: {'; '.join(problems)}. `p3o doctor` says what to do", 1)
    try:
        action()
    except RunRefused as error:
        return _stopped(args, error, 2)
    except (EngineError, RewardFailed, ContractViolation, RolloutFileError) as error:
        return _stopped(args, error, 1)
    except OSError as error:  # a full disk, a directory that went away: the text names the file
        return _stopped(args, f"{error}; once that is repaired, --resume goes on from the last checkpoint", 1)
    except KeyboardInterrupt:
        _say(f"\nStopped. To go on from the last checkpoint, add --resume (run directory {args.run_dir}).")
        return 130
    return 0


def _doctor(args: argparse.Namespace) -> int:
    print(doctor.report())
    return 0 if doctor.healthy() else 1


def _action(args: argparse.Namespace) -> Callable[[], None]:
    """What the flags ask for, checked.

    Raises:
        ValueError: naming the flag and what to do.
    """
    validate_p3o_arguments(args)
    _check_supported(args)
    config, objective, sampling = config_from_arguments(args), objective_from_arguments(args), _sampling(args)
    config.parallelism.data_size(int(os.environ.get("WORLD_SIZE", "1")))
    if args.command == "export":
        return lambda: export(config, objective, sampling, Path(args.output))
    return lambda: train(config, objective, sampling, vars(args))


def _stopped(args: argparse.Namespace, why: object, status: int) -> int:
    _say(f"p3o {args.command}: {why}", sys.stderr)
    return status


def _say(text: str, where: TextIO | None = None) -> None:
    """Once, whatever the number of ranks."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, file=where)


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
    """Flags of any command; a preset gives defaults, and flags win over it."""
    parser, commands = parsers()
    args = parser.parse_args(argv)
    if args.command in ("train", "export") and args.preset:
        for name in ("train", "export"):
            commands[name].set_defaults(**PRESETS[args.preset])
        args = parser.parse_args(argv)
    return args


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """A new parser of the command line, and those of its commands by name."""
    parser = argparse.ArgumentParser(prog="p3o", description="P3O training on Megatron-Core")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print versions, devices, what will be used and what is missing")
    differences = "how far loss, ESS and gradient are from another implementation's, on one batch"
    add_parity_arguments(commands.add_parser("parity", help=differences))
    add_plot_arguments(commands.add_parser("plot", help="draw runs into one picture"))
    add_report_arguments(commands.add_parser("report", help="write runs, with what stands out, into one HTML file"))
    comparison = "P3O beside GRPO, CISPO and PG on a small task: hundreds of short runs, tables, pictures, a page"
    add_study_arguments(commands.add_parser("study", help=comparison))
    _with_flags(commands, "train", "train a model")
    write = _with_flags(commands, "export", "write the weights of a run in Hugging Face form")
    write.add_argument("--output", required=True, help="directory that is made for config.json and model.safetensors")
    return parser, dict(commands.choices)


def _with_flags(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--dry-run", action="store_true", help="check the flags, print all of them, and do nothing")
    made.add_argument("--preset", choices=sorted(PRESETS), help="defaults for a known run; other flags win over it")
    add_train_arguments(made)
    add_p3o_arguments(made)
    return made
