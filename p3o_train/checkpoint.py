"""Checkpoints of a run on Megatron-Core, from which it goes on with the same bits.

Each rank writes what it holds into a file of its own: parameters and buffers, the state and the float32 master weights
of Megatron's optimizer, the schedule, every random stream, and the rollout policy's weights where they lag behind.
A checkpoint is loaded into the topology that wrote it.

``megatron.core.dist_checkpointing``, which can also load into another topology, is not used: release 0.16.1 runs
without CUDA, but takes seconds for a model of 20,000 parameters, and loses the step count of torch's Adam under its
distributed optimizer, which then continues with other numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from p3o_train import checkpoint_files as files
from p3o_train.agreement import everywhere, on_first_rank
from p3o_train.checkpoint_files import is_native_checkpoint, latest_iteration
from p3o_train.random_state import random_states, set_random_states

__all__ = [
    "Loaded",
    "has_snapshot",
    "is_native_checkpoint",
    "latest_iteration",
    "load_checkpoint",
    "save_checkpoint",
]


class Loaded(NamedTuple):
    """What a checkpoint holds for its caller."""

    iteration: int
    progress: dict[str, Any]
    snapshot: dict[str, Tensor] | None
    """Name -> tensor, on the CPU."""


def save_checkpoint(
    directory: str | os.PathLike[str],
    iteration: int,
    *,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    progress: Mapping[str, Any],
    identity: Mapping[str, Any],
    snapshot: Mapping[str, Tensor] | None = None,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint; every rank calls. Killed at any moment, the directory still has the one before.

    Args:
        directory: on storage that all ranks see; made if needed.
        iteration: the number of the checkpoint.
        model, optimizer, scheduler: Megatron's; the scheduler may be None.
        progress: JSON values that the caller needs to go on.
        identity: JSON values that must be the same where it is loaded: whatever changes numbers.
        snapshot: weights of the rollout policy on this rank, if they are not those of the model.
        keep: newest checkpoints that stay.

    Raises:
        FileExistsError: the latest checkpoint is of this iteration.
        OSError: a rank could not write; raised on every rank, and the previous checkpoint is as it was.
    """
    directory = Path(directory)
    on_first_rank(lambda: files.prepare(directory, iteration))
    temporary = files.iteration_directory(directory, iteration).with_suffix(".tmp")
    content = {
        "model": dict(_model_tensors(model)),
        "optimizer": [_optimizer_state(inner) for inner in _inner_optimizers(optimizer)],
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "random": random_states(),
        "snapshot": None if snapshot is None else dict(snapshot),
    }

    def write() -> dict[str, Any]:
        path = temporary / _rank_file()
        with open(path, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        return {path.name: files.digest(path)}

    written = {name: found for part in everywhere(write) for name, found in part.items()}
    manifest = {
        "iteration": iteration,
        "progress": dict(progress),
        "identity": dict(identity),
        "has_snapshot": snapshot is not None,
        "files": written,
    }
    on_first_rank(lambda: files.publish(directory, iteration, manifest, keep))
    return files.iteration_directory(directory, iteration)


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    identity: Mapping[str, Any],
    iteration: int | None = None,
) -> Loaded:
    """Puts a checkpoint into a freshly built model, optimizer and schedule, and its random streams back.

    Every rank calls. Everything is checked on all ranks first: when it raises, nothing has changed.

    Args:
        directory: what was given to ``save_checkpoint``, or the directory of an iteration.
        identity: as it was saved.
        iteration: None is the latest.

    Raises:
        ValueError: no checkpoint, a damaged one, or one of another run, on every rank alike; what differs and what to
            do.
    """

    def check() -> None:
        path = files.find(directory, iteration)
        manifest = files.read_manifest(path)
        _check_identity(path, manifest, identity)
        content = _read(path, manifest)
        _check_tensors(path, "model", content["model"], dict(_model_tensors(model)))
        inner = [_optimized(one) for one in _inner_optimizers(optimizer)]
        saved = [one["weights"] for one in content["optimizer"]]
        _check_tensors(path, "optimizer", _flat(saved), _flat(inner))
        if (scheduler is None) != (content["scheduler"] is None):
            raise ValueError(f"{path}: a schedule was saved or is given, but not both; build what was saved")
        kept.append((manifest, content))

    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    everywhere(check)
    manifest, content = kept[0]
    _copy(content["model"], dict(_model_tensors(model)))
    for inner, state in zip(_inner_optimizers(optimizer), content["optimizer"], strict=True):
        inner.load_state_dict(state["state"])
        _copy(state["weights"], _optimized(inner))
    if scheduler is not None:
        scheduler.load_state_dict(content["scheduler"])
    set_random_states(content["random"])
    return Loaded(manifest["iteration"], manifest["progress"], content["snapshot"])


def has_snapshot(directory: str | os.PathLike[str], iteration: int | None = None) -> bool:
    """Whether a checkpoint holds weights of the rollout policy.

    Raises:
        ValueError: no checkpoint, or a damaged manifest.
    """
    return bool(files.read_manifest(files.find(directory, iteration))["has_snapshot"])


def _rank_file() -> str:
    return f"rank_{dist.get_rank() if dist.is_initialized() else 0:05d}.pt"


def _model_tensors(model: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for index, chunk in enumerate(model):
        for named in (chunk.named_parameters(), chunk.named_buffers()):
            for name, tensor in named:
                yield f"{index}.{name}", tensor.detach()


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers inside Megatron's."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [one.optimizer for one in ([optimizer] if chained is None else chained)]


def _optimized(inner: Any) -> dict[str, Tensor]:
    """What a torch optimizer moves: the parameters, their float32 masters, or this rank's shards of these."""
    moved = (tensor for group in inner.param_groups for tensor in group["params"])
    return {str(place): tensor.detach() for place, tensor in enumerate(moved)}


def _optimizer_state(inner: Any) -> dict[str, Any]:
    return {"state": inner.state_dict(), "weights": _optimized(inner)}


@torch.no_grad()
def _copy(saved: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    for name, tensor in current.items():
        tensor.copy_(saved[name])


def _check_identity(path: Path, manifest: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    saved, wanted = manifest["identity"], json.loads(json.dumps(dict(identity)))
    differences = [
        f"{name} was {saved.get(name, 'absent')!r} and is {wanted.get(name, 'absent')!r}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if differences:
        raise ValueError(
            f"{path} belongs to another run: {'; '.join(differences)}. Set them back, or start anew elsewhere"
        )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if len(manifest["files"]) != ranks:
        raise ValueError(
            f"{path} was written by {len(manifest['files'])} rank(s), but {ranks} are loading it; start as many again"
        )


def _read(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    name = _rank_file()
    file = path / name
    if not file.is_file() or files.digest(file) != manifest["files"][name]:
        state = "is missing" if not file.is_file() else "is not what was written: its checksum differs"
        raise ValueError(f"{file} {state}; load another iteration of {path.parent}")
    content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return content


def _flat(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{place}.{name}": tensor for place, part in enumerate(parts) for name, tensor in part.items()}


def _check_tensors(path: Path, kind: str, saved: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    shapes, wanted = (
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()} for named in (saved, current)
    )
    if shapes != wanted:
        names = sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
        raise ValueError(
            f"{path} holds another {kind}: {names[0]} is {shapes.get(names[0])} there and {wanted.get(names[0])} here "
            f"({len(names)} differ); build the {kind} that was saved"
        )
