"""Peak memory that a step needs beyond what was allocated before it."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


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
