"""What the commands of ``p3o`` do once their flags are known: train, and write weights for others to read."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from p3o_train import doctor
from p3o_train.agreement import on_first_rank
from p3o_train.config import SamplingSettings, TrainConfig
from p3o_train.curves import draw_curves
from p3o_train.objective import Objective
from p3o_train.runtime import megatron_run
from p3o_train.sinks import FILE_NAME, Sink, open_sinks

CURVES, SETTINGS = "curves.png", "config.json"


class RunRefused(Exception):
    """A command that cannot start as it was asked for; the text says what to do."""


def train(config: TrainConfig, objective: Objective, sampling: SamplingSettings, settings: dict[str, Any]) -> None:
    """One run, as every rank calls it.

    Raises:
        RunRefused: a run directory that is in use, without --resume; a checkpoint that cannot be resumed; files of
            weights or prompts that cannot be used. Nothing has changed then.
        EngineError: an engine that is not there, or did not answer.
        ContractViolation: log-probs that cannot be trained on.
    """
    from p3o_train.assembly import build_trainer, load_start  # which import what may be missing

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


def export(config: TrainConfig, objective: Objective, sampling: SamplingSettings, output: Path) -> None:
    """Writes the weights of a run in Hugging Face form, as every rank calls it: those of the newest checkpoint with
    ``config.resume``, otherwise those that it starts from.

    Raises:
        RunRefused: a directory that exists, a checkpoint or files that cannot be used. Nothing is written then.
    """
    from p3o_train.assembly import build_trainer, load_start
    from p3o_train.hf_files import save_hf
    from p3o_train.hf_model import hf_config
    from p3o_train.hf_weights import export_hf_weights

    warnings.filterwarnings("ignore", module=r"megatron\.")
    with megatron_run(config.parallelism, config.distributed_timeout_minutes):
        try:
            start = load_start(config)
            trainer = build_trainer(config, objective, sampling, start, samples=False)
            if config.resume and not trainer.resume():
                raise ValueError(f"--resume, but there is no checkpoint in --run-dir {config.run_dir}")
            weights = export_hf_weights(trainer.trainee.model, trainer.trainee.groups)
            on_first_rank(lambda: save_hf(output, hf_config(start.model), weights))
        except (ValueError, ImportError, OSError) as error:
            raise RunRefused(str(error)) from error
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"Weights after step {trainer.steps_done} are in {output}.")


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
