"""Peak memory that a step needs beyond what was allocated before it."""

import weakref
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_extra_bytes(step: Callable[[], object], device: str) -> int:
    """Of one call of ``step``, results that survive it included. Call ``step`` before, so that caches are warm."""
    return _cuda_peak(step) if device == "cuda" else _cpu_peak(step)


def _cuda_peak(step: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak(step: Callable[[], object]) -> int:
    """From the allocator's own records: they see inside custom operators and compiled code, unlike a dispatch mode."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


class FakePeak(TorchDispatchMode):
    """Counts what is allocated while it is entered, on tensors of a FakeTensorMode as well as on real ones.

    ``bytes`` is the peak of live memory, ``operators`` and ``shapes`` list every operator and its results. What
    a custom operator allocates inside is not seen: call the function behind it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.operators: list[str] = []
        self.shapes: list[tuple[str, torch.Size]] = []
        self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {_storage_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self.operators.append(str(func))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.shapes.append((str(func), tensor.shape))
                self._count(tensor, before)
        return result

    def _count(self, tensor: torch.Tensor, before: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = _storage_key(tensor)
        if key in before or key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self._live += size
        self.bytes = max(self.bytes, self._live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
