"""What the numbers of a study say: sentences made of them, and none that goes further than the spread of the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from p3o_train.study.design import MICRO_BATCH_SCOPE, P3O
from p3o_train.study.results import CellRow, spread

CLOSE = 0.03
"""How far below the best of the GRPO clips P3O may end and count as level with it."""
FAILED = 0.8
"""A method fails in a setting when it ends below this share of the best one there, or diverges."""
CLIPS = ("grpo_0p2", "grpo_0p4", "grpo_0p6")
VARIANTS = (P3O, "p3o_importance", "p3o_kl_off")


class Score(NamedTuple):
    """Rewards of what a method has trained in a setting, over the seeds."""

    mean: float
    spread: float
    seeds: int
    diverged: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.spread:.3f}"


Scores = Mapping[str, Mapping[str, Score]]
"""setting -> method -> score."""


def scores_of(rows: Sequence[CellRow]) -> dict[str, dict[str, Score]]:
    """In the order in which settings and methods come."""
    groups: dict[tuple[str, str], list[CellRow]] = {}
    for row in rows:
        groups.setdefault((row.setting, row.method), []).append(row)
    scores: dict[str, dict[str, Score]] = {}
    for (setting, method), group in groups.items():
        finals = [row.evaluation for row in group]
        diverged = sum(row.diverged for row in group)
        scores.setdefault(setting, {})[method] = Score(statistics.fmean(finals), spread(finals), len(group), diverged)
    return scores


def comparison(one: Score, other: Score) -> str:
    """How ``one`` ended beside ``other``: a difference counts when it is larger than both spreads together."""
    difference = one.mean - other.mean
    if abs(difference) <= one.spread + other.spread:
        return f"not separated from it (difference {difference:+.3f}, spreads {one.spread:.3f} and {other.spread:.3f})"
    return f"{'above' if difference > 0 else 'below'} it by {abs(difference):.3f}, more than both spreads together"


def against_clips(scores: Mapping[str, Score]) -> str:
    """P3O beside the best GRPO clip of a setting."""
    clips = {name: scores[name] for name in CLIPS if name in scores}
    if P3O not in scores or not clips:
        return "P3O and GRPO were not both run."
    best = max(clips, key=lambda name: clips[name].mean)
    gap = clips[best].mean - scores[P3O].mean
    verdict = f"within {CLOSE}" if gap <= CLOSE else f"NOT within {CLOSE}"
    return (
        f"P3O ends at {scores[P3O]}, {verdict} of the best GRPO clip ({best.removeprefix('grpo_').replace('p', '.')}, "
        f"{clips[best]}): {comparison(scores[P3O], clips[best])}."
    )


def failures(scores: Mapping[str, Score]) -> dict[str, str]:
    """Method -> why it fails in a setting, for those that do."""
    best = max(score.mean for score in scores.values())
    found = {}
    for method, score in scores.items():
        if score.diverged:
            found[method] = f"{score}, diverged in {score.diverged} of {score.seeds} seeds"
        elif score.mean < FAILED * best:
            found[method] = f"{score}, {score.mean / best:.0%} of the best"
    return found


def count_close(scores: Scores) -> tuple[int, int]:
    """Settings in which P3O is within ``CLOSE`` of the best GRPO clip, and settings with both."""
    both = [row for row in scores.values() if P3O in row and any(name in row for name in CLIPS)]
    close = [row for row in both if max(row[name].mean for name in CLIPS if name in row) - row[P3O].mean <= CLOSE]
    return len(close), len(both)


def variants(scores: Mapping[str, Score]) -> list[str]:
    """The pulls of P3O beside its default, proxy_safe."""
    if P3O not in scores:
        return ["P3O was not run."]
    told = [f"proxy_safe: {scores[P3O]}."]
    for name, label in (("p3o_importance", "importance"), ("p3o_kl_off", "no KL")):
        if name in scores:
            told.append(f"{label}: {scores[name]}, {comparison(scores[name], scores[P3O])}.")
    return told


def scopes(scores: Scores) -> list[tuple[str, str]]:
    """(setting, micro-batch scope beside step scope), where both were run."""
    return [
        (
            setting,
            f"step scope {row[P3O]}; micro-batch scope {row[MICRO_BATCH_SCOPE]}, "
            f"{comparison(row[MICRO_BATCH_SCOPE], row[P3O])}.",
        )
        for setting, row in scores.items()
        if P3O in row and MICRO_BATCH_SCOPE in row
    ]


def drift(rows: Sequence[CellRow]) -> str:
    """e and KL of P3O in one setting, over the seeds."""
    mine = [row for row in rows if row.method == P3O]
    if not mine:
        return "P3O was not run."
    late, kl = (statistics.fmean(values) for values in zip(*((row.late_ess, row.mean_kl) for row in mine), strict=True))
    least = min(row.least_ess for row in mine)
    return f"P3O's e is {late:.3f} in the last third of the steps, {least:.3f} at least, and its KL {kl:.3g} nats."


def fresh_ess(rows: Sequence[CellRow]) -> str:
    """e of data that the trained weights themselves have sampled."""
    found = [row.least_ess for row in rows if row.setting == "on_policy" and row.method == P3O]
    if not found:
        return "On-policy P3O was not run."
    least = min(found)
    if least >= 0.9999:
        return f"On fresh data e is 1: the least of all steps and seeds is {least:.6f}."
    return f"On fresh data e is NOT 1 throughout: the least of all steps and seeds is {least:.6f}."
