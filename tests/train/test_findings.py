"""What stands out in a run is found, with its numbers, and nothing is found where nothing stands out."""

import math

import pytest

from p3o_train.findings import findings
from p3o_train.run_data import read_runs
from tests.train.run_folders import STEPS, write_run


def found(tmp_path, change=None, **options):
    (run,) = read_runs([write_run(tmp_path / "a", change=change, **options)])
    return findings(run)


def at(*steps, **values):
    """Sets numbers at these steps; "p3o__" in a name stands for train/p3o/, "train__" for train/."""
    named = {name.replace("p3o__", "train/p3o/").replace("train__", "train/"): one for name, one in values.items()}
    return lambda step, made: made | (named if step in steps else {})


def test_nothing_stands_out(tmp_path):
    # an ESS of 0.7 at the least, a ratio of 1.03, ages that take turns
    assert found(tmp_path) == []


@pytest.mark.parametrize("method", ["p3o", "grpo"])
def test_low_ess(tmp_path, method):
    def change(step, made):
        low = {4: 0.49, 7: 0.25, 9: 0.5}  # the threshold itself is not below it
        return made | {f"train/{method}/normalized_ess": low.get(step, 0.9)}

    (text,) = found(tmp_path, change, method=method)
    assert text.startswith("ESS below 0.5 at 2 of 30 steps, first at step 4, least 0.25 at step 7:")


@pytest.mark.parametrize(("ratio", "said"), [(1.2, "+0.182"), (0.8, "-0.223"), (1.1, None), (0.92, None)])
def test_uniform_shift(tmp_path, ratio, said):
    texts = found(tmp_path, at(5, 6, p3o__ratio_mean=ratio))
    if said is None:
        assert texts == []
    else:
        assert texts[0].startswith(f"|log mean ratio| above 0.1 at 2 of 30 steps, most {said} at step 5:")


@pytest.mark.parametrize(
    ("age", "rises"),
    [
        (lambda step: 0.1 * step, True),
        (lambda step: 2 if step > 4 else 0, False),  # rollouts ahead, which fill up at the start
        (lambda step: step % 3, False),  # a schedule
        (lambda step: 0.02 * step, False),
    ],
    ids=["rising", "filling up", "in turns", "hardly"],
)
def test_rising_age(tmp_path, age, rises):
    texts = found(tmp_path, lambda step, made: made | {"train/p3o/policy_age_mean": float(age(step))})
    assert [text.startswith("the policy that samples grows older: 1.1 rollouts") for text in texts] == [True] * rises


def test_short_runs_are_not_judged_by_age(tmp_path):
    rising = found(tmp_path, lambda step, made: made | {"train/p3o/policy_age_mean": float(step)}, steps=range(1, 20))
    assert rising == []


def test_skipped_steps(tmp_path):
    steps = [step for step in range(1, 21) if step not in (4, 9, 10)]
    assert found(tmp_path, steps=steps) == ["3 steps without a line, first after step 3, which step 5 follows"]


def test_steps_twice(tmp_path):
    (text,) = found(tmp_path, steps=[1, 2, 3, 3, 4])
    assert text.startswith("steps out of order or twice, first step 3:")


def test_counts_of_failures(tmp_path):
    change = at(3, 8, train__reward_failures=2.0, train__dropped_responses=1.0, p3o__invalid_tokens=5.0)
    assert found(tmp_path, change) == [
        "4 rewards failed at 2 steps, first at step 3",
        "2 responses were dropped at 2 steps, first at step 3",
        "10 valid tokens had unusable log-ratios at 2 steps, first at step 3",
    ]


def test_not_finite(tmp_path):
    change = at(6, 7, train__grad_norm=math.nan)
    assert found(tmp_path, change) == [f"train/grad_norm is NaN or infinite at 2 of {STEPS} steps, first at step 6"]


@pytest.mark.parametrize(("far", "told"), [(10.0, True), (0.01, False)])
def test_tokens_beyond_the_bins(tmp_path, far, told):
    def change(step, made):
        return made | {"train/ratio_histogram/-inf": far / 2, "train/ratio_histogram/10": far / 2}

    tokens = sum(70 + step + far for step in range(1, STEPS + 1))
    wanted = f"{STEPS * far / tokens:.2%} of all tokens have a log-ratio beyond 10: were they sampled by this model?"
    assert found(tmp_path, change) == [wanted] * told


@pytest.mark.parametrize(("rollouts", "told"), [(20, True), (15, False)])
def test_runs_that_are_not_complete(tmp_path, rollouts, told):
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "global_batch_size": 16}
    wanted = "30 of 40 steps are there: the run goes on, or was stopped (--resume)"
    assert found(tmp_path, num_rollouts=rollouts, **sizes) == [wanted] * told
