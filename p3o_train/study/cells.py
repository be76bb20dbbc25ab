"""The cells of the study: one run each, in a process of its own that leaves one file.

A process is forked from one that has imported everything, since imports take longer than a cell. Until its file is
there, under its final name, a cell has not run: whatever ends it leaves nothing that a later start would take for a
result.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from p3o_train.engine import RolloutFailed
from p3o_train.sinks import replace_file
from p3o_train.study.design import Cell, cells, flags_of, resolved

DESIGN = "design.json"
COLUMNS = ("reward", "ess", "limited", "kl")
"""Of each optimizer step: mean reward; e of its tokens; the share of tokens whose weight the cap or the clip range
changes; the mean estimate of KL(policy || behavior policy)."""
# what a policy that has left the range of numbers makes the trainer say, before it changes anything
_DIVERGED = ("invalid data on ", "the norm of the gradients is ")
EVALUATION = "eval/reward_mean"
_STOPS = (signal.SIGINT, signal.SIGTERM)

Task = Callable[[Cell, Path], dict[str, Any]]


class Failure(NamedTuple):
    """A cell that ended without a result."""

    cell: Cell
    why: str


def claim(directory: Path, size: str) -> None:
    """Writes down what the files of ``directory`` are of, or checks that they are of this.

    Raises:
        ValueError: they are of another size or other flags. Nothing has changed then.
    """
    design = {"size": size, "flags": {cell.name: flags_of(cell, size) for cell in cells(size)}}
    path = directory / DESIGN
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _write(path, design)
        return
    found = json.loads(path.read_text())
    if found != design:
        other = f"of size {found['size']}" if found["size"] != size else "with other flags"
        raise ValueError(
            f"--run-dir {directory} holds cells {other}, and this study is of size {size}: numbers of both would be "
            "mixed; name another directory, or remove this one"
        )


def result_path(directory: Path, cell: Cell) -> Path:
    """Of the file that a finished cell leaves."""
    return directory / "cells" / f"{cell.name}.json"


def run_cells(asked: Sequence[Cell], directory: Path, task: Task, workers: int) -> list[Failure]:
    """Runs the cells that have no file yet, ``workers`` at a time, behind a bar; those that ended without one.

    Ctrl-C or a SIGTERM ends the cells that run, and theirs are the only numbers lost; either is a KeyboardInterrupt.

    Args:
        task: runs one cell, with a directory for its files that is removed afterwards; gives what the file holds.
    """
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # a thread that a fork would not copy
    waiting = deque(cell for cell in asked if not result_path(directory, cell).exists())
    failures: list[Failure] = []
    running: dict[int, tuple[Any, Cell]] = {}
    context: Any = multiprocessing.get_context("fork")
    for name in ("cells", "running", "failed"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # or children would outlive this process
    with tqdm(total=len(asked), initial=len(asked) - len(waiting), desc="p3o study", unit="cell") as bar:
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    cell = waiting.popleft()
                    process = context.Process(target=_process, args=(cell, directory, task), daemon=True)
                    # an exception in the hooks of a fork is lost, and a child that is not noted would go on alone
                    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
                    process.start()
                    running[process.sentinel] = (process, cell)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
                ended: Any = wait(list(running))
                for sentinel in ended:
                    process, cell = running.pop(sentinel)
                    process.join()
                    if not result_path(directory, cell).exists():
                        failures.append(Failure(cell, _reason(directory, cell, process.exitcode)))
                    bar.update()
                    bar.set_postfix_str(cell.name)
        finally:
            for process, _ in running.values():
                process.terminate()
                process.join()
            shutil.rmtree(directory / "running", ignore_errors=True)
            signal.signal(signal.SIGTERM, before)
    return failures


def _process(cell: Cell, directory: Path, task: Task) -> None:
    """What a child does. Ctrl-C is the parent's, which then ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    scratch, failed = directory / "running" / cell.name, directory / "failed" / f"{cell.name}.txt"
    scratch.mkdir(exist_ok=True)
    failed.unlink(missing_ok=True)
    with open(scratch / "output.txt", "w") as output:  # what libraries print would tear the bar
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            _write(result_path(directory, cell), task(cell, scratch))
        except Exception:  # told by the parent, and the other cells go on
            failed.write_text(traceback.format_exc())
    shutil.rmtree(scratch, ignore_errors=True)


def _reason(directory: Path, cell: Cell, exit_code: int | None) -> str:
    path = directory / "failed" / f"{cell.name}.txt"
    if not path.exists():
        return f"its process ended with status {exit_code}"
    return f"{path.read_text().splitlines()[-1]} (all of it is in {path})"


def _write(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, (json.dumps(content) + "\n").encode())


def prepare() -> None:
    """Imports what cells need, so that forked processes find it. Nothing is computed here: threads of OpenMP would not
    survive a fork."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    from p3o_train.assembly import load_start
    from p3o_train.hf_model import hf_config, transformers

    for name in ("optimizer", "optimizer_param_scheduler", "pipeline_parallel.schedules", "models.gpt.gpt_model"):
        importlib.import_module(f"megatron.core.{name}")
    start = load_start(resolved(flags_of(cells("short")[0], "short"))[0])
    with torch.device("meta"):  # which imports the model's own module
        transformers().AutoModelForCausalLM.from_config(hf_config(start.model))


def run_cell(cell: Cell, scratch: Path, size: str, start: Path) -> dict[str, Any]:
    """One cell on the trainer of ``p3o train``.

    Args:
        start: directory of the weights that it begins with.

    Returns:
        Its flags, the rows of ``COLUMNS`` for each optimizer step, mean rewards of evaluations, the seconds of CPU
        time, and as "diverged" what the trainer said of a policy whose numbers left their range, or "".
    """
    from p3o_train.assembly import build_trainer, load_start
    from p3o_train.runtime import megatron_run

    torch.set_num_threads(1)
    flags = flags_of(cell, size)
    config, objective, sampling = resolved([*flags, "--hf-checkpoint", str(start), "--run-dir", str(scratch)])
    begin, diverged = time.process_time(), ""
    rows: list[list[float]] = []
    evaluations: list[float] = []
    with megatron_run(config.parallelism):
        trainer = build_trainer(config, objective, sampling, load_start(config))
        try:
            for _, row in trainer.run():
                rows.append(_numbers(row, objective.advantage_estimator))
                if EVALUATION in row:
                    evaluations.append(row[EVALUATION])
        except (ValueError, RuntimeError, RolloutFailed) as error:
            diverged = divergence(error)
            if not diverged:
                raise
        finally:
            trainer.rollouts.close()
    return {
        "cell": list(cell),
        "flags": flags,
        "columns": list(COLUMNS),
        "rows": rows,
        "evaluations": evaluations,
        "planned": config.total_steps,
        "diverged": diverged,
        "seconds": time.process_time() - begin,
    }


def divergence(error: Exception) -> str:
    """What the error says if it means that training has diverged, otherwise "": then something is broken."""
    text = str(error)
    if isinstance(error, RolloutFailed):
        return text if "are not finite" in text else ""
    return text if text.startswith(_DIVERGED) else ""


def _numbers(row: dict[str, float], estimator: str) -> list[float]:
    limited = {"p3o": "cap_fraction", "pg": None}.get(estimator, "clip_fraction")
    prefix = f"train/{estimator}/"
    return [
        row["train/reward_mean"],
        row[f"{prefix}normalized_ess"],
        row[prefix + limited] if limited else 0.0,
        row[f"{prefix}behavior_kl_proxy"],
    ]
