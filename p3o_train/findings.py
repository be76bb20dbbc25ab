"""What in the numbers of a run asks for a look: ``p3o report`` lists it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from p3o_train.histogram import EDGES
from p3o_train.run_data import Run

LOW_ESS = 0.5
"""A step with N valid tokens is worth e N on-policy ones: below this, more than half of them are lost."""
SHIFT = 0.1
"""Of |log mean ratio|. The mean of the ratio over tokens that the recorded policy sampled is 1, up to noise, however
far the policies are apart; 10% off is more than noise or rounding, and e does not see it."""
AGE_RISE = 0.5
"""Rollouts that the mean age rises between the second and the last quarter of a run; the first quarter, in which
rollouts ahead fill up, does not count. Within a schedule that repeats it stays the same."""
AGE_STEPS = 24
"""Steps that a run needs for that: fewer hold too few cycles of a schedule."""
FAR_SHARE = 0.001
"""Of tokens in the two open bins of the histogram. Their ratio is beyond exp(10), or below its inverse: so far apart
that the token was likely not sampled by the policy that is recorded."""


def findings(run: Run) -> list[str]:
    """One sentence for each thing, with numbers and what to look at; [] if there is nothing."""
    return [text for check in _CHECKS for text in check(run)]


def _low_ess(run: Run) -> Iterator[str]:
    steps, values = run.curve("train/{}/normalized_ess")
    low = [(value, step) for step, value in zip(steps, values, strict=True) if value < LOW_ESS]
    if low:
        least, where = min(low)
        yield (
            f"ESS below {LOW_ESS:g} at {len(low)} of {len(steps)} steps, first at step {min(s for _, s in low)}, least "
            f"{least:.3g} at step {where}: policies are far apart; more frequent weight updates or a lower learning "
            "rate bring them together"
        )


def _shift(run: Run) -> Iterator[str]:
    steps, values = run.curve("train/{}/ratio_mean")
    logs = [(math.log(value), step) for step, value in zip(steps, values, strict=True) if value > 0]
    far = [(log, step) for log, step in logs if abs(log) > SHIFT]
    if far:
        largest, where = max(far, key=lambda one: abs(one[0]))
        yield (
            f"|log mean ratio| above {SHIFT:g} at {len(far)} of {len(steps)} steps, most {largest:+.3g} at step "
            f"{where}: the mean ratio of sampled tokens is 1, so log-probs may not be those that were sampled with; "
            "compare temperature, precision and weights of trainer and engine. ESS does not see such a shift"
        )


def _rising_age(run: Run) -> Iterator[str]:
    _, ages = run.curve("train/{}/policy_age_mean")
    quarter = len(ages) // 4
    if len(ages) < AGE_STEPS:
        return
    early, late = _mean(ages[quarter : 2 * quarter]), _mean(ages[-quarter:])
    if late - early > AGE_RISE:
        yield (
            f"the policy that samples grows older: {early:.3g} rollouts in the second quarter of the run, {late:.3g} "
            "in the last; sampling falls behind training"
        )


def _skipped(run: Run) -> Iterator[str]:
    pairs = list(itertools.pairwise(run.steps))
    missing = [(before, after) for before, after in pairs if after > before + 1]
    if missing:
        before, after = missing[0]
        count = sum(after - before - 1 for before, after in missing)
        yield f"{count} steps without a line, first after step {before}, which step {after} follows"
    repeated = [after for before, after in pairs if after <= before]
    if repeated:
        yield f"steps out of order or twice, first step {repeated[0]}: do two runs write to this directory?"


def _not_finite(run: Run) -> Iterator[str]:
    names: dict[str, list[int]] = {}
    for row in run.rows:
        for name, value in row.items():
            if math.isnan(value):
                names.setdefault(name, []).append(int(row["step"]))
    for name, steps in names.items():
        yield f"{name} is NaN or infinite at {len(steps)} of {len(run.rows)} steps, first at step {steps[0]}"


def _counted(name: str, what: str) -> Callable[[Run], Iterator[str]]:
    def check(run: Run) -> Iterator[str]:
        steps, values = run.curve(name)
        some = [(step, value) for step, value in zip(steps, values, strict=True) if value > 0]
        if some:
            yield f"{sum(value for _, value in some):g} {what} at {len(some)} steps, first at step {some[0][0]}"

    return check


def _far_tokens(run: Run) -> Iterator[str]:
    total = sum(map(sum, run.histograms))
    far = sum(counts[0] + counts[-1] for counts in run.histograms)
    if total and far / total > FAR_SHARE:
        yield f"{far / total:.2%} of all tokens have a log-ratio beyond {EDGES[-1]:g}: were they sampled by this model?"


def _unfinished(run: Run) -> Iterator[str]:
    names = ("num_rollouts", "rollout_batch_size", "n_samples_per_prompt", "global_batch_size")
    sizes = [size for size in map(run.settings.get, names) if isinstance(size, int) and size > 0]
    if len(sizes) == len(names):
        rollouts, prompts, samples, batch = sizes
        steps = rollouts * (prompts * samples // batch)
        if max(run.steps) < steps:
            yield f"{max(run.steps)} of {steps} steps are there: the run goes on, or was stopped (--resume)"


def _mean(values: list[float]) -> float:
    found = [value for value in values if not math.isnan(value)]
    return sum(found) / len(found) if found else math.nan


_CHECKS: tuple[Callable[[Run], Iterator[str]], ...] = (
    _low_ess,
    _shift,
    _rising_age,
    _skipped,
    _not_finite,
    _counted("train/reward_failures", "rewards failed"),
    _counted("train/dropped_responses", "responses were dropped"),
    _counted("train/{}/invalid_tokens", "valid tokens had unusable log-ratios"),
    _far_tokens,
    _unfinished,
)
