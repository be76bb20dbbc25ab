"""A disk that is full while a checkpoint or a rollout is written, and files that are not what was written."""

from __future__ import annotations

import contextlib
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.soak.runs import (
    Campaign,
    Progress,
    finished,
    last_line,
    lines,
    saved_step,
    started,
    state,
    train_flags,
    undisturbed,
)
from tests.soak.trials import Trial

ROLLOUTS, DISK_ROLLOUTS = 12, 24
DISK_BYTES = 8 << 20
"""Of the small file system: some checkpoints fit."""
DAMAGES = ("truncated", "one bit flipped", "missing")


def full_disks(campaign: Campaign, times: int) -> list[Trial]:
    """Space runs out while the run goes on; it is given back, and the run goes on."""
    whole = undisturbed(campaign, "whole-disk", DISK_ROLLOUTS)
    trials = []
    for number in range(times):
        for place in ("checkpoints", ""):
            trials.append(campaign.told(_full(campaign, f"disk-{place or 'run'}-{number}", place, whole)))
    return trials


def _full(campaign: Campaign, name: str, place: str, whole: str) -> Trial:
    run_dir = campaign.directory(name)
    fault = f"no space left for {place or 'any file of the run'}"
    with contextlib.ExitStack() as stack:
        filled = stack.enter_context(_small_file_system(run_dir / place))
        if filled is None:
            return _size_limit(run_dir, whole)
        progress = Progress(run_dir)
        with started(train_flags(run_dir, DISK_ROLLOUTS)) as (process,):
            met = progress.wait(lambda: progress.began and saved_step(run_dir) > 0, process)
            ballast = _fill(filled)
            status = process.wait(60)
            text = process.text
        wrong = "" if met and status else f"ended with {status}: {last_line(text)}"
        if "No space left on device" not in text:
            wrong = wrong or f"does not say that the disk is full: {last_line(text)}"
        lost = len(lines(run_dir)) - saved_step(run_dir)
        ballast.unlink()
        wrong = wrong or _goes_on(run_dir, DISK_ROLLOUTS, whole)
        how = f"a tmpfs of {DISK_BYTES >> 20} MiB, filled while the run writes"
        return Trial(fault, how, not wrong, lost, None, wrong)


@contextlib.contextmanager
def _small_file_system(path: Path) -> Iterator[Path | None]:
    """A file system of its own at ``path``; None where this user cannot mount one."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        path.rmdir()
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _fill(path: Path) -> Path:
    """Takes all space that is left."""
    ballast = path / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return ballast


def _size_limit(run_dir: Path, whole: str) -> Trial:
    """Where nothing can be mounted: no file may grow beyond half a checkpoint."""
    flags = train_flags(run_dir, DISK_ROLLOUTS)
    progress = Progress(run_dir)
    with started(flags) as (process,):
        progress.wait(lambda: progress.began and saved_step(run_dir) > 0, process)
    largest = max(path.stat().st_size for path in run_dir.glob("checkpoints/iter_*/rank_*.pt"))
    limit = (largest // 2, largest // 2)
    (status,), text, _ = finished(flags, 120, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    wrong = "" if status and "File too large" in text else f"ended with {status}: {last_line(text)}"
    wrong = wrong or _goes_on(run_dir, DISK_ROLLOUTS, whole)
    return Trial("no space left for checkpoints", "RLIMIT_FSIZE of half a checkpoint", not wrong, None, None, wrong)


def _goes_on(run_dir: Path, rollouts: int, whole: str) -> str:
    """What is wrong with the end of a run that is started again."""
    statuses, text, _ = finished(train_flags(run_dir, rollouts))
    if statuses != [0]:
        return f"cannot go on, ended with {statuses}: {last_line(text)}"
    return "" if state(run_dir) == whole else "the end differs from that of an undisturbed run"


def damaged_files(campaign: Campaign, times: int) -> list[Trial]:
    """Files of a run that was killed, each damaged in a copy of it."""
    whole = undisturbed(campaign, "whole-damage", ROLLOUTS)
    original = campaign.directory("damage")
    progress = Progress(original)
    with started(train_flags(original, ROLLOUTS)) as (process,):
        progress.wait(lambda: progress.began and saved_step(original) >= 8 and progress.new_steps(0) >= 11, process)
        process.popen.send_signal(signal.SIGKILL)
        process.popen.wait()
    latest = f"checkpoints/iter_{saved_step(original):07d}"
    former = sorted(original.glob("checkpoints/iter_*[0-9]"))[0]
    following = f"rollouts/rollout_{saved_step(original) // 2:07d}.jsonl"
    trials = []
    for _ in range(times):
        for damage in DAMAGES:
            for file in (f"{latest}/rank_00000.pt", f"{latest}/manifest.json", following):
                run_dir = campaign.directory("damaged")
                shutil.copytree(original, run_dir)
                _damage(run_dir / file, damage, campaign)
                trials.append(campaign.told(_refused(run_dir, file, damage, int(former.name[5:]), whole)))
    return trials


def _damage(path: Path, how: str, campaign: Campaign) -> None:
    content = bytearray(path.read_bytes())
    if how == "one bit flipped":
        place = campaign.random.randrange(len(content))
        content[place] ^= 1 << campaign.random.randrange(8)
    path.write_bytes(content[: campaign.random.randrange(len(content))] if how == "truncated" else content)
    if how == "missing":
        path.unlink()


def _refused(run_dir: Path, file: str, damage: str, former: int, whole: str) -> Trial:
    """A damaged checkpoint must be refused by name, and the one before it must lead to the same end."""
    (status,), text, took = finished(train_flags(run_dir, ROLLOUTS), 120)
    path, rollout = run_dir / file, file.startswith("rollouts")
    kind = "rollout file" if rollout else "checkpoint manifest" if "manifest" in file else "checkpoint file"
    how = f"{damage}, after a kill"
    if rollout and damage == "missing":  # it is sampled again
        same = status == 0 and state(run_dir) == whole
        return Trial(f"{kind} {damage}", how, same, None, None, "" if same else last_line(text))
    if status == 0:
        silent = state(run_dir) != whole
        note = "loaded without a word, other numbers at the end" if silent else "loaded without effect"
        return Trial(f"{kind} {damage}", how, not silent, None, None, note)
    wrong = "" if status and path.name in text else f"ended with {status}: {last_line(text)}"
    if rollout:
        path.unlink()
    else:
        (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(f"{former}\n")
    return Trial(
        f"{kind} {damage}", how, not wrong and not (wrong := _goes_on(run_dir, ROLLOUTS, whole)), None, took, wrong
    )
