"""Train a toy policy on stale rollouts, on the CPU, with P3O, GRPO and plain policy gradient side by side.

    python examples/quickstart.py            a few minutes on two cores; --help lists the flags

Stale as in an asynchronous trainer: a rollout waits in a queue until ``--lag`` newer ones have been sampled, and
the policy takes ``--updates-per-rollout`` steps for each. Per seed, every method starts from the same weights and
prompts. An on-policy run comes first: all ratios are 1 there, so is the ESS, and the three gradients agree.

Watch the ESS beside the reward: plain policy gradient climbs first, with an ESS near 0, and on most seeds then
loses what it had learned; the clip keeps GRPO near its data and slow. Two seeds show a tendency, not a ranking.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read by torch at import; spinning threads stall on busy cores

import torch
import toy_task as toy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

COLUMNS = ("scenario", "method", "seed", "step", "reward", "ess", "cap", "ratio_mean", "loss")
PANELS = {"reward": "reward (share of correct digits)", "ess": "normalized ESS", "cap": "cap on the ratio"}
COLORS = {"p3o": "tab:blue", "grpo": "tab:orange", "pg": "tab:green"}
LEARNING_RATE = 1e-3
FINAL_STEPS = 5  # the final reward is a mean over this many rollouts

Row = dict[str, str | int | float]


@dataclass(frozen=True)
class Scenario:
    """How old the data is, and how long to train."""

    name: str
    lag: int
    updates_per_rollout: int
    steps: int
    seeds: int


def train(method: str, seed: int, scenario: Scenario, prompts: int = 64) -> Iterator[dict[str, float]]:
    """Train one model; yield the numbers of each step.

    The reward is that of the rollout which the current weights have just sampled, whenever it will be trained on.
    The other numbers belong to the last update of the step, the one with the oldest data.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = toy.TinyTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def rollout_of_current_weights() -> toy.Rollout:
        return toy.sample(model, toy.make_prompts(prompts, generator), generator)

    waiting = deque(rollout_of_current_weights() for _ in range(scenario.lag))
    for _ in range(scenario.steps):
        newest = rollout_of_current_weights()
        waiting.append(newest)
        rollout = waiting.popleft()
        behavior = rollout.behavior_log_probs.flatten()
        advantages = toy.group_advantages(rollout.rewards.view(-1, toy.GROUP_SIZE)).flatten()
        for _ in range(scenario.updates_per_rollout):
            log_probs = toy.answer_log_probs(model, rollout.tokens).flatten()
            loss, numbers = toy.loss_and_stats(method, log_probs, behavior, advantages)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield {"reward": newest.rewards.mean().item(), **numbers}


def run(scenario: Scenario, methods: list[str], file: TextIO, rows: list[Row]) -> dict[str, float]:
    """Train every method and seed; add each step to ``rows`` and to the CSV at once. Return the seconds."""
    writer = csv.DictWriter(file, COLUMNS)
    seconds = {}
    for method in methods:
        begin = time.perf_counter()
        label = f"{scenario.name:9} {toy.METHODS[method]:15}"
        with tqdm(total=scenario.seeds * scenario.steps, desc=label, dynamic_ncols=True) as bar:
            for seed in range(scenario.seeds):
                for step, numbers in enumerate(train(method, seed, scenario)):
                    rows.append({"scenario": scenario.name, "method": method, "seed": seed, "step": step, **numbers})
                    writer.writerow(rows[-1])
                    file.flush()
                    bar.set_postfix_str(f"reward {numbers['reward']:.3f}, ESS {numbers['ess']:.3f}", refresh=False)
                    bar.update()
        seconds[method] = time.perf_counter() - begin
    return seconds


def print_table(scenario: Scenario, rows: list[Row], seconds: dict[str, float]) -> None:
    """Print one line per method: where the reward ended, and how far the policy drifted from its data."""
    updates = f"{scenario.updates_per_rollout} updates per rollout"
    print(f"\n{scenario.name}: lag {scenario.lag}, {updates}, {scenario.steps} steps, {scenario.seeds} seeds")
    print(f"{'method':16}{'final reward':>14}{'min ESS':>10}{'late ESS':>10}{'seconds':>10}")
    for method, spent in seconds.items():
        mine = [row for row in rows if row["scenario"] == scenario.name and row["method"] == method]
        reward = statistics.fmean(row["reward"] for row in mine if row["step"] >= scenario.steps - FINAL_STEPS)
        late = statistics.fmean(row["ess"] for row in mine if row["step"] >= scenario.steps * 3 // 4)
        lowest = min(row["ess"] for row in mine)
        print(f"{toy.METHODS[method]:16}{reward:14.3f}{lowest:10.3f}{late:10.3f}{spent:10.1f}")
    print(f"(final reward: mean of the last {FINAL_STEPS} rollouts; late ESS: mean over the last quarter)")


def draw_curve(axes: Axes, rows: list[Row], method: str, column: str) -> None:
    """Draw the mean over the seeds, in a band from the lowest seed to the highest."""
    by_step: dict[int, list[float]] = {}
    for row in rows:
        if row["method"] == method:
            by_step.setdefault(row["step"], []).append(row[column])
    steps, values = list(by_step), list(by_step.values())
    axes.plot(steps, [statistics.fmean(v) for v in values], color=COLORS[method], label=toy.METHODS[method])
    axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=COLORS[method], alpha=0.2)


def draw(scenario: Scenario, rows: list[Row], methods: list[str], path: Path) -> None:
    """Draw reward, ESS and cap over the steps of ``scenario``, side by side."""
    figure = Figure(figsize=(13, 4), layout="constrained")  # without pyplot: no display is needed
    panels = figure.subplots(1, len(PANELS))
    mine = [row for row in rows if row["scenario"] == scenario.name]
    for axes, (column, label) in zip(panels, PANELS.items(), strict=True):
        for method in methods:
            draw_curve(axes, mine, method, column)
        axes.set(xlabel="rollout step", ylabel=label, ylim=(0, 1.25 if column == "cap" else 1.02))
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(methods))
    panels[2].set_title("plain policy gradient has no cap", fontsize="medium")
    figure.suptitle(f"Reversing five digits, rollouts {scenario.lag} steps old: mean, range of {scenario.seeds} seeds")
    figure.savefig(path, dpi=120)


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argument type that accepts whole numbers from ``minimum`` on."""

    def number(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {text}")
        return int(text)

    return number


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the flags and create the output folder; exit with a message when one of them cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--steps", type=at_least(1), default=100, help="rollouts to train on (default %(default)s)")
    add("--seeds", type=at_least(1), default=2, help="runs per method (default %(default)s)")
    add("--lag", type=at_least(0), default=16, help="age of the data in rollouts (default %(default)s)")
    add("--updates-per-rollout", type=at_least(1), default=4, help="optimizer updates (default %(default)s)")
    add("--on-policy-steps", type=at_least(0), default=80, help="0 skips that run (default %(default)s)")
    add("--methods", nargs="+", choices=toy.METHODS, default=list(toy.METHODS), help="(default: all three)")
    add("--out", type=Path, default=Path("build/demo"), help="folder of the results (default %(default)s)")
    parsed = parser.parse_args(arguments)
    try:
        parsed.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error.strerror}: {parsed.out}")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Run both scenarios and write the CSV and the PNG; return the exit code."""
    chosen = parse_arguments(arguments)
    torch.set_num_threads(min(4, torch.get_num_threads()))  # more threads than this slow such a small model down
    scenarios = [Scenario("on-policy", 0, 1, chosen.on_policy_steps, 1)] if chosen.on_policy_steps else []
    stale = Scenario("stale", chosen.lag, chosen.updates_per_rollout, chosen.steps, chosen.seeds)
    methods, rows, seconds = list(dict.fromkeys(chosen.methods)), [], {}
    table, picture = chosen.out / "quickstart.csv", chosen.out / "quickstart.png"
    with open(table, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(COLUMNS)
        try:
            for scenario in [*scenarios, stale]:
                seconds[scenario] = run(scenario, methods, file, rows)
        except KeyboardInterrupt:
            print(f"\nInterrupted. The {len(rows)} rows so far are in {table}", file=sys.stderr)
            return 130
    for scenario, spent in seconds.items():
        print_table(scenario, rows, spent)
    draw(stale, rows, methods, picture)
    print(f"\nEvery step: {table}\nCurves:     {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
