"""Rewards that cannot hang a step: computed in worker processes, which are killed when they take too long.

A thread cannot be ended from outside, a process can. Rewards whose time is bounded by the length of the text are
computed in this process instead, in microseconds: a worker would only add a start and two messages for each.

Workers are fresh interpreters ("spawn"): a fork of a process with torch's threads may inherit a lock that nobody
releases. Like all such workers they import the main script again, so that one needs ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import contextlib
import functools
import importlib.util
import logging
import math
import multiprocessing
import signal
from collections.abc import Sequence
from typing import Any

from p3o_train.rewards import IN_PROCESS, Reward, resolve_reward

ON_FAILURE = ("raise", "zero")
START_LIMIT_S = 120.0
"""For workers to start, with whatever they import."""
KILL_LIMIT_S = 5.0
"""For a worker to be killed and its successor to start, each time."""

_log = logging.getLogger(__name__)


class RewardFailed(RuntimeError):
    """A reward that could not be computed; the text names sample, reward and cause."""


Outcome = float | RewardFailed | None


class RewardWorkers:
    """Computes one reward for many responses; used by one thread at a time. A context manager; else ``close`` it.

    Args:
        reward_name: one of ``p3o_train.rewards.REWARDS``, or "module:function".
        workers: processes, which start when the first response is scored. The rewards "exact" and "digits" need none.
        time_limit_s: seconds for one response in a worker.
        on_failure: "raise", or "zero": a reward that fails is 0, is counted in ``failures``, and makes a warning.

    Raises:
        ValueError: an argument that cannot be; a reward that is not there.
        ImportError: a package that is not installed.
    """

    def __init__(
        self, reward_name: str, *, workers: int = 2, time_limit_s: float = 10.0, on_failure: str = "raise"
    ) -> None:
        if workers < 1 or not 0 < time_limit_s < math.inf:
            raise ValueError(f"workers must be >= 1 and time_limit_s > 0 and finite, got {workers} and {time_limit_s}")
        if on_failure not in ON_FAILURE:
            raise ValueError(f"on_failure must be one of {ON_FAILURE}, got {on_failure!r}")
        self._reward = resolve_reward(reward_name)
        if reward_name not in IN_PROCESS and importlib.util.find_spec("pebble") is None:
            raise ImportError(f"the reward {reward_name!r} needs a package that is not here: pip install pebble")
        self.reward_name, self.on_failure = reward_name, on_failure
        self.failures = 0
        """Rewards that failed and counted as 0, so far."""
        self._workers, self._time_limit_s = workers, time_limit_s
        self._pool: Any = None

    def score(self, pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> list[float]:
        """The rewards, in order.

        Args:
            pairs: (text of the response, label of its prompt).
            names: one for each, for errors.

        Raises:
            RewardFailed: with ``on_failure="raise"`` a reward that raised, gave no finite number, took too long, or
                ended its process; always where workers cannot work at all.
            ValueError: another number of names than of pairs.
        """
        if len(pairs) != len(names):
            raise ValueError(f"names must be one for each pair, got {len(names)} for {len(pairs)}")
        try:
            outcomes = self._in_process(pairs) if self.reward_name in IN_PROCESS else self._in_workers(pairs)
            return self._rewards(outcomes, pairs, names)
        except BaseException:  # Ctrl-C too: no worker goes on for nobody
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers at once; a later ``score`` starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()

    def __enter__(self) -> RewardWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_process(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for text, label in pairs:
            try:
                outcomes.append(_value(self._reward, text, label))
            except RewardFailed as error:
                outcomes.append(error)
        return outcomes

    def _in_workers(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        """With "raise", None in place of what was not waited for after the first failure."""
        if not pairs:
            return []
        pool = self._running_pool()
        limit = self._time_limit_s
        futures = [pool.schedule(_in_worker, args=(self.reward_name, *pair, limit), timeout=limit) for pair in pairs]
        seconds = START_LIMIT_S + math.ceil(len(pairs) / self._workers) * (limit + KILL_LIMIT_S)
        until = concurrent.futures.FIRST_EXCEPTION if self.on_failure == "raise" else concurrent.futures.ALL_COMPLETED
        done, waiting = concurrent.futures.wait(futures, timeout=seconds, return_when=until)
        outcomes = [self._outcome(future) if future in done else None for future in futures]
        if waiting and not any(isinstance(outcome, RewardFailed) for outcome in outcomes):
            raise RewardFailed(
                f"reward {self.reward_name!r}: {len(waiting)} of {len(pairs)} responses have no reward after "
                f"{seconds:.0f} s; see whether the machine can start worker processes"
            )
        return outcomes

    def _running_pool(self) -> Any:
        if self._pool is None:
            import pebble

            self._pool = pebble.ProcessPool(
                self._workers,
                initializer=_prepare,
                initargs=(self.reward_name,),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool

    def _outcome(self, future: concurrent.futures.Future[float]) -> Outcome:
        import pebble

        try:
            return future.result()
        except RewardFailed as error:
            return error
        except concurrent.futures.TimeoutError:
            return RewardFailed(f"gave no result within {self._time_limit_s:g} s: it hangs, or has ended its process")
        except pebble.ProcessExpired as error:
            return RewardFailed(f"has ended its process, {_reason(error.exitcode)}")
        except concurrent.futures.process.BrokenProcessPool as error:
            raise RewardFailed(
                f"reward {self.reward_name!r}: worker processes end as they start ({error}); what they write to "
                'stderr says why. A main script needs `if __name__ == "__main__":`'
            ) from error

    def _rewards(
        self, outcomes: Sequence[Outcome], pairs: Sequence[tuple[str, str]], names: Sequence[str]
    ) -> list[float]:
        failed = [
            f"sample {name!r}: reward {self.reward_name!r} {outcome}; the label is {_short(label)}, the response "
            f"{_short(text)}"
            for outcome, (text, label), name in zip(outcomes, pairs, names, strict=True)
            if isinstance(outcome, RewardFailed)
        ]
        if failed and self.on_failure == "raise":
            raise RewardFailed(f'{failed[0]}. Repair reward or data, or count failures as 0 with on_failure="zero"')
        if failed:
            self.failures += len(failed)
            _log.warning("%d of %d rewards failed and count as 0; the first: %s", len(failed), len(pairs), failed[0])
        return [outcome if isinstance(outcome, float) else 0.0 for outcome in outcomes]


def _prepare(reward_name: str) -> None:
    """In a new worker: what takes long the first time is done before the first response, whose time is limited."""
    # it warns that its own limit is off, which is the point
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    with contextlib.suppress(Exception):  # told with the first response
        reward = _resolved(reward_name)
        if reward_name == "math":
            reward("1", "1")


@functools.cache
def _resolved(reward_name: str) -> Reward:
    return resolve_reward(reward_name)


def _in_worker(reward_name: str, text: str, label: str, limit: float) -> float:
    # ends this process even when the one that would kill it is gone
    signal.alarm(math.ceil(limit) + 1)
    try:
        return _value(_resolved(reward_name), text, label)
    finally:
        signal.alarm(0)


def _value(reward: Reward, text: str, label: str) -> float:
    try:
        return reward(text, label)
    except (Exception, SystemExit) as error:
        # as text, since not every exception can be sent from process to process
        raise RewardFailed(f"failed with {type(error).__name__}: {error}") from None


def _reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    try:
        return f"by {signal.Signals(-exit_code).name}"
    except ValueError:  # a number without a name
        return f"by signal {-exit_code}"


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}... ({len(text)} characters)"
