"""Run directories with known numbers."""

import json
from pathlib import Path

from p3o_train.histogram import PREFIX
from p3o_train.sinks import FILE_NAME, HISTOGRAM_FILE, HistogramSink, JsonlSink

STEPS = 30


def numbers(step, method="p3o"):
    """Steps count from 1; the age is 0 and 1 in turns."""
    return {
        "train/reward_mean": step / 100,
        "train/reward_failures": 0.0,
        "train/dropped_responses": 0.0,
        f"train/{method}/normalized_ess": 1 - step / 100,
        f"train/{method}/ratio_mean": 1 + step / 1000,
        f"train/{method}/cap_fraction": 0.5 + step / 100,
        f"train/{method}/behavior_kl_proxy": step / 1000,
        f"train/{method}/reference_kl": 0.0,
        f"train/{method}/policy_age_mean": float(step % 2),
        f"train/{method}/ess_age_{step % 2}": 1 - step / 100,
        f"train/{method}/invalid_tokens": 0.0,
    }


def counts(step):
    """By lower edge."""
    return {"-0.002": float(step), "-0.001": 60.0, "0.5": 10.0}


def write_run(
    directory, method="p3o", *, steps=range(1, STEPS + 1), without=(), change=None, histogram=True, **settings
):
    """A run directory; ``change(step, numbers)`` alters the numbers of a step, and returns them."""
    directory = Path(directory)
    directory.mkdir(parents=True)
    sinks = [JsonlSink(directory / FILE_NAME)]
    if histogram:
        sinks.append(HistogramSink(directory / HISTOGRAM_FILE))
    for step in steps:
        made = {name: value for name, value in numbers(step, method).items() if not name.startswith(tuple(without))}
        made |= {PREFIX + edge: count for edge, count in counts(step).items()}
        made = made if change is None else change(step, made)
        for sink in sinks:
            sink.write(step, made)
    for sink in sinks:
        sink.close()
    if settings:
        (directory / "config.json").write_text(json.dumps(settings))
    return directory
