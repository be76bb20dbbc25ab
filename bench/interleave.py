"""Times of several steps from rounds in which each takes its turn, so that a slow spell of the machine meets all."""

import statistics
import time
from collections.abc import Callable, Mapping

from bench.vocabulary_workload import Step

Clock = Callable[[], float]


def clock_for(threads: int) -> Clock:
    """With one thread a step costs its CPU time, to which other processes add little; with more, time on the clock."""
    return time.process_time if threads == 1 else time.perf_counter


def seconds(
    steps: Mapping[str, Step], rounds: int, clock: Clock, until: Callable[[], bool] = lambda: False
) -> dict[str, list[float]]:
    """Of every step, warmed up by the caller; ``until`` ends it early, after a whole round.

    Gradients are cleared after the clock has stopped: no step meets a heap that holds those of another.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = clock()
            step()
            times[name].append(clock() - begin)
            step.clear()
        if until():
            break
    return times


def turns(steps: Mapping[str, Callable[[], object]], rounds: int, calls: int, clock: Clock) -> dict[str, list[float]]:
    """Of every step, for steps of milliseconds: in each round it has a turn of ``calls`` calls.

    A turn begins with a call that is not timed: it finds the cache and the heap as another implementation left them.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            for _ in range(calls):
                begin = clock()
                step()
                times[name].append(clock() - begin)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}
