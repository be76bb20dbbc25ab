"""Random streams: every one that is in use as plain values, to be put back and saved, and named ones of our own."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on ``seed`` and ``name`` alone; other names have unrelated numbers."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def random_states() -> dict[str, Any]:
    """Stream -> state: tensors, numbers, strings and tuples of them.

    Streams: ``python``, ``torch``, ``numpy`` where it is loaded, ``cuda`` of all devices where it is in use, and
    ``megatron``, the tracker of CUDA streams, where Megatron-Core has seeded it.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    tracker = _megatron_tracker()
    if tracker is not None:
        states["megatron"] = tracker.get_states()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Puts back what ``random_states`` gave."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    tracker = _megatron_tracker()
    if "megatron" in states and tracker is not None:
        tracker.set_states(states["megatron"])


def _megatron_tracker() -> Any:
    """Megatron's tracker of CUDA random streams, when Megatron is loaded and has seeded it."""
    module: Any = sys.modules.get("megatron.core.tensor_parallel.random")
    # asking for the tracker would make one, of a kind that Megatron may not want
    if module is None or not getattr(module, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True):
        return None
    tracker: Any = module.get_cuda_rng_tracker()
    return tracker if tracker.is_initialized() else None
