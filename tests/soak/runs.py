"""Runs of ``p3o train`` as processes that can be disturbed, and what they leave behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.soak.trials import Trial

SMALL = ["train", "--preset", "tiny", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
SMALL += ["--global-batch-size", "8", "--hidden-size", "16", "--ffn-hidden-size", "32"]
STEPS_PER_ROLLOUT, SAVE_INTERVAL = 2, 2
STEPS_PER_SAVE = STEPS_PER_ROLLOUT * SAVE_INTERVAL
START_LIMIT_S, END_LIMIT_S = 120.0, 300.0
"""For a process to write its first numbers, and for one that is not disturbed to end."""


class Campaign(NamedTuple):
    """What all parts share."""

    folder: Path
    """For runs; emptied by nobody but its owner."""
    random: random.Random

    def directory(self, name: str) -> Path:
        """A place for a run, with nothing in it."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        return path

    def told(self, trial: Trial) -> Trial:
        """The trial, once it is on the screen: a part takes minutes."""
        print(f"  {trial.fault}: {'survived' if trial.survived else trial.note}", flush=True)
        return trial


class Process(NamedTuple):
    """A started rank and where its output goes."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> int | None:
        """The exit status; None if it is still running."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """At once, whatever it does; a stopped one as well."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


def train_flags(run_dir: Path, rollouts: int, *more: str) -> list[str]:
    """Of a small run with a checkpoint every ``STEPS_PER_SAVE`` steps, which goes on where it can."""
    sizes = ["--num-rollouts", str(rollouts), "--save-interval", str(SAVE_INTERVAL)]
    return [*SMALL, *sizes, "--run-dir", str(run_dir), "--resume", *more]


@contextlib.contextmanager
def started(
    flags: list[str],
    *,
    ranks: int = 1,
    module: str = "p3o_train",
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Iterator[list[Process]]:
    """The ranks of a command, each in a process without a launcher that would clean up after it; none is left."""
    run_dir = Path(flags[flags.index("--run-dir") + 1])
    # unbuffered, or what a killed process has said would be lost
    base = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    base |= dict(environment or {})
    port = str(_free_port())
    processes: list[Process] = []
    try:
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            log = run_dir.with_name(f"{run_dir.name}.{rank}.log")
            with open(log, "wb") as file:
                popen = subprocess.Popen(
                    [sys.executable, "-m", module, *flags],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=base | (place if ranks > 1 else {}),
                    # Ctrl-C of the campaign is not theirs; and a background job starts with Ctrl-C ignored
                    start_new_session=True,
                    preexec_fn=lambda: _prepare(before),
                )
            processes.append(Process(popen, log))
        yield processes
    finally:
        for process in processes:
            process.kill()


def _prepare(before: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if before is not None:
        before()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finished(flags: list[str], seconds: float = END_LIMIT_S, **options: Any) -> tuple[list[int | None], str, float]:
    """Runs a command to its end: the status of each rank (None: it hung), their output, the seconds it took."""
    begin = time.monotonic()
    with started(flags, **options) as processes:
        statuses = [process.wait(max(0.1, begin + seconds - time.monotonic())) for process in processes]
        took = time.monotonic() - begin
    return statuses, "".join(process.text for process in processes), took


class Progress:
    """What a process that has just been started adds to the numbers of its run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._old = run_dir, _inode(run_dir / "metrics.jsonl")
        self._begin = time.time()

    @property
    def began(self) -> bool:
        """Whether the process has made the file its own."""
        return _inode(self.run_dir / "metrics.jsonl") not in (None, self._old)

    def new_steps(self, resumed: int) -> int:
        """Complete lines after step ``resumed``; -1 before the process has begun to train."""
        return len(lines(self.run_dir)) - resumed if self.began else -1

    def saving(self) -> bool:
        """Whether the process is writing a checkpoint."""
        return self._wrote("*.tmp")

    def publishing(self) -> bool:
        """Whether the process has all of a checkpoint but its name."""
        return self._wrote("*.tmp/manifest.json")

    def _wrote(self, pattern: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            found = (self.run_dir / "checkpoints").glob(pattern)
            return any(path.stat().st_mtime > self._begin for path in found)
        return False

    def wait(self, ready: Callable[[], bool], process: Process, seconds: float = START_LIMIT_S) -> bool:
        """Waits for a moment; False if the process ended or the time is over."""
        end = time.monotonic() + seconds
        while not ready():
            if process.popen.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def lines(run_dir: Path) -> list[bytes]:
    """Complete lines of the numbers of a run."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The numbers of a run but for times."""
    parsed = (json.loads(line) for line in lines(run_dir))
    return [{name: value for name, value in row.items() if "/time/" not in name} for row in parsed]


def saved_step(run_dir: Path) -> int:
    """The step of the checkpoint that a run would go on from; 0 for none."""
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def resumed_step(text: str) -> int:
    """The step after which a process said that it goes on; 0 if it began anew."""
    found = re.search(r"Going on after step (\d+) of", text)
    return int(found[1]) if found else 0


def state(run_dir: Path) -> str:
    """Digest of weights, optimizer and schedule of all ranks at the end, and of every number on the way."""
    total = hashlib.sha256()
    for path in sorted((run_dir / "checkpoints" / f"iter_{saved_step(run_dir):07d}").glob("rank_*.pt")):
        content = torch.load(path, weights_only=True)
        for part in ("model", "optimizer", "scheduler"):
            _update(total, content[part])
    total.update(json.dumps(rows(run_dir)).encode())
    return total.hexdigest()


def _update(total: Any, value: Any) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            total.update(str(name).encode())
            _update(total, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _update(total, inner)
    elif isinstance(value, torch.Tensor):
        total.update(f"{value.dtype} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
    else:
        total.update(repr(value).encode())


def undisturbed(campaign: Campaign, name: str, rollouts: int, *more: str, **options: Any) -> str:
    """The state that every disturbed run with these flags must end in."""
    run_dir = campaign.directory(name)
    statuses, text, _ = finished(train_flags(run_dir, rollouts, *more), **options)
    if any(statuses):
        raise RuntimeError(f"the undisturbed run {name} ended with {statuses}: {last_line(text)}")
    return state(run_dir)


def last_line(text: str) -> str:
    """Of what a process printed."""
    written = [line for line in text.splitlines() if line.strip()]
    return written[-1] if written else "nothing was printed"
