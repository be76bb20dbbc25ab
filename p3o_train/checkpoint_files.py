"""Checkpoint directories: names, manifests, and an order of writing that survives a kill at any moment.

    DIR/latest_checkpointed_iteration.txt       the iteration to load
    DIR/iter_0000010/rank_00000.pt ...          what each rank holds
    DIR/iter_0000010/manifest.json              sizes and SHA-256 of these files and its own, written when
                                                all of them are on disk

A checkpoint is written beside its place (``iter_0000010.tmp``), put on disk, renamed, and only then named by the
tracker; older ones go last. Until the tracker is replaced, which happens at once or not at all, the previous one
counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRACKER, MANIFEST = "latest_checkpointed_iteration.txt", "manifest.json"
_NAME = re.compile(r"iter_(\d{7,})")


def iteration_directory(directory: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is."""
    return directory / f"iter_{iteration:07d}"


def latest_iteration(directory: str | os.PathLike[str]) -> int | None:
    """The iteration that the tracker of ``directory`` names; None without a tracker.

    Raises:
        ValueError: a tracker that holds no number.
    """
    tracker = Path(directory) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8").strip()
    if not text.isdigit():
        raise ValueError(
            f"{tracker} must hold the number of an iteration, got {text[:40]!r}; write the right one into it"
        )
    return int(text)


def is_native_checkpoint(path: Any) -> bool:
    """Whether Megatron would resume from ``path``: weights, optimizer and iteration.

    So it is for a folder with ``latest_checkpointed_iteration.txt`` (unless that says "release": weights alone), and
    for one of its ``iter_0000123`` that is not empty. It is not for other formats, an absent path, or None.
    """
    if path is None:
        return False
    folder = Path(path)
    tracker = folder / TRACKER
    if tracker.is_file():
        return tracker.read_text(encoding="utf-8").strip() != "release"
    return _NAME.fullmatch(folder.name) is not None and folder.is_dir() and any(folder.iterdir())


def find(directory: str | os.PathLike[str], iteration: int | None = None) -> Path:
    """The directory of a checkpoint: the named iteration of ``directory``, its latest, or ``directory`` itself.

    Raises:
        ValueError: there is none, with what was looked for.
    """
    directory = Path(directory)
    if _NAME.fullmatch(directory.name) and iteration is None:
        found = directory
    else:
        iteration = latest_iteration(directory) if iteration is None else iteration
        if iteration is None:
            raise ValueError(f"{directory} holds no checkpoint: {TRACKER} is missing; save one first, or name another")
        found = iteration_directory(directory, iteration)
    if not (found / MANIFEST).is_file():
        raise ValueError(f"{found} is no complete checkpoint: {MANIFEST} is missing; load another iteration")
    return found


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: it is not what was written.
    """
    damaged = f"{path / MANIFEST} is damaged; load another iteration"
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(damaged) from error
    if not isinstance(content, dict) or content != _signed(content.get("manifest")):
        raise ValueError(damaged)
    manifest: dict[str, Any] = content["manifest"]
    return manifest


def prepare(directory: Path, iteration: int) -> Path:
    """An empty directory to write the checkpoint to; what an earlier crash has left is removed.

    Raises:
        FileExistsError: the latest checkpoint is of this iteration: replacing it would leave none for a moment.
    """
    if latest_iteration(directory) == iteration and (iteration_directory(directory, iteration) / MANIFEST).is_file():
        raise FileExistsError(
            f"{iteration_directory(directory, iteration)} is the latest checkpoint already; resume from it, or save "
            "to another directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob("iter_*.tmp"):
        shutil.rmtree(left)
    temporary = iteration_directory(directory, iteration).with_suffix(".tmp")
    temporary.mkdir()
    return temporary


def digest(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return {"bytes": path.stat().st_size, "sha256": total.hexdigest()}


def publish(directory: Path, iteration: int, manifest: Mapping[str, Any], keep: int) -> Path:
    """Makes what is in the temporary directory the latest checkpoint, then removes all but the newest ``keep``."""
    final = iteration_directory(directory, iteration)
    temporary = final.with_suffix(".tmp")
    _write(temporary / MANIFEST, json.dumps(_signed(manifest), indent=1) + "\n")
    sync_directory(temporary)
    if final.exists():  # of a run that was killed before its tracker was written
        _remove(final)
    os.rename(temporary, final)
    sync_directory(directory)
    tracker = directory / TRACKER
    _write(tracker.with_suffix(".tmp"), f"{iteration}\n")
    os.replace(tracker.with_suffix(".tmp"), tracker)
    sync_directory(directory)
    older = sorted(
        (int(match[1]), path)
        for path in directory.iterdir()
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) <= iteration
    )
    for _, path in older[:-keep]:
        _remove(path)
    return final


def sync_directory(directory: Path) -> None:
    """Puts the names in a directory on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _signed(manifest: Any) -> dict[str, Any]:
    canonical = json.dumps(manifest, sort_keys=True).encode()
    return {"manifest": manifest, "sha256": hashlib.sha256(canonical).hexdigest()}


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Under a name that nobody loads first, so that no half of it is taken for a checkpoint."""
    doomed = path.with_suffix(".old.tmp")
    os.rename(path, doomed)
    shutil.rmtree(doomed)
