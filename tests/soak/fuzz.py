"""Random tries by the hundred: hypothesis draws from a seed, every try is counted, none stops the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.soak.loss import CALLS, check_call
from tests.soak.recordings import check_answer, check_sample, check_turn
from tests.soak.trials import Finding, Tally
from tests.soak.wires import check_file, check_sglang

READERS: dict[str, tuple[Callable[[random.Random], str], int]] = {
    "turns of a conversation": (check_turn, 1),
    "responses": (check_answer, 2),
    "samples": (check_sample, 3),
    "rollout files": (check_file, 2),
    "answers of SGLang": (check_sglang, 2),
}
"""What is read -> one random try, and its share of all tries."""


def fuzz_loss(number: int, start: int) -> list[Tally]:
    """``number`` random calls of ``p3o_loss``, which ``start`` decides."""
    tally = Tally("p3o_loss")
    _try(tally, CALLS, check_call, number, start)
    return [tally]


def fuzz_recordings(number: int, start: int) -> list[Tally]:
    """``number`` random recordings, which ``start`` decides, shared out over what reads them."""
    shares = sum(share for _, share in READERS.values())
    tallies = []
    for name, (check, share) in READERS.items():
        tally = Tally(name)
        # hypothesis likes some numbers better than others, and each of them is to be another recording
        one = _with_own_stream(tally, check, start)
        _try(tally, st.integers(0, 2**64), one, -(-number * share // shares), start)
        tallies.append(tally)
    return tallies


def _with_own_stream(tally: Tally, check: Callable[[random.Random], str], start: int) -> Callable[[int], str]:
    return lambda drawn: check(random.Random(f"{tally.target} {start} {tally.tries} {drawn}"))


def _try(tally: Tally, strategy: Any, check: Callable[[Any], str], number: int, start: int) -> None:
    """Counts the outcomes of ``number`` values of ``strategy``."""

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(drawn: Any) -> None:
        if tally.tries == number:
            return
        try:
            tally.add(check(drawn))
        except Finding as finding:
            tally.finding(finding.what, finding.example or _shown(drawn))
        except Exception as error:  # which nobody has promised
            tally.finding(f"{type(error).__name__} leaks: {str(error)[:80]}", _shown(drawn))

    while tally.tries < number:  # hypothesis may end early
        seed(start)(one)()
        start += 1


def _shown(drawn: Any) -> str:
    """What was drawn, without what was left at nothing."""
    if isinstance(drawn, dict):
        drawn = {name: value for name, value in drawn.items() if value is not None}
    return str(drawn)
