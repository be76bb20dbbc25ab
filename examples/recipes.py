"""Four ways in which rollouts drift from the policy, each with P3O and with GRPO, in three sizes.

    python -m examples.recipes temperature_0p6 --estimator p3o --size tiny       # one run
    python -m examples.recipes periodic_sync_3 --size a100x4 --dry-run -- --hf-checkpoint DIR --prompt-data FILE
    python -m examples.recipes all --size tiny                                   # all eight, and one table

What follows ``--`` goes to ``p3o train`` as it is. A run and its twin differ in the estimator and the clip range alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from p3o_train.sinks import FILE_NAME, read_jsonl

SCENARIOS = {
    # one optimizer step for each rollout, sampled by the weights that it trains
    "on_policy": [],
    # sampled at another temperature than the trainer's 1: honest importance sampling
    "temperature_0p6": ["--rollout-temperature", "0.6", "--temperature-convention", "mismatch"],
    "temperature_1p2": ["--rollout-temperature", "1.2", "--temperature-convention", "mismatch"],
    # the weights that sample are 0, 1, 2 rollouts old
    "periodic_sync_3": ["--update-weights-interval", "3"],
}
ESTIMATORS = {
    "p3o": ["--advantage-estimator", "p3o"],
    "grpo": ["--advantage-estimator", "grpo", "--clip-low", "0.4", "--clip-high", "0.4"],
}
SIZES = {
    # two layers learn to say two digits backwards, on a CPU
    "tiny": ["--preset", "tiny", "--global-batch-size", "512", "--num-rollouts", "120"],
    # SmolLM2-135M learns one-digit sums, on a CPU
    "smollm2": ["--preset", "smollm2"],
    # the published settings: Qwen3-4B-Thinking on four GPUs; give it --hf-checkpoint, --prompt-data and --sglang-urls
    "a100x4": ["--preset", "a100x4"],
}
COLUMNS = ("scenario", "estimator", "first reward", "last ten", "least ESS", "mean ESS", "oldest", "seconds")


def flags(scenario: str, estimator: str, size: str) -> list[str]:
    """What ``p3o train`` gets, but for the run directory."""
    return [*SIZES[size], *SCENARIOS[scenario], *ESTIMATORS[estimator]]


def train(recipe: Sequence[str], directory: Path) -> int:
    """One run in its own process; its exit status. A directory that holds a run is refused by it."""
    command = [sys.executable, "-m", "p3o_train", "train", *recipe, "--run-dir", str(directory)]
    return subprocess.run(command, check=False).returncode


def row(scenario: str, estimator: str, directory: Path) -> list[str]:
    """What became of a run."""
    rows = read_jsonl(directory / FILE_NAME)
    rewards = [line["train/reward_mean"] for line in rows]
    ess = [line[f"train/{estimator}/normalized_ess"] for line in rows]
    ages = [line[f"train/{estimator}/policy_age_max"] for line in rows]
    seconds = sum(value for line in rows for name, value in line.items() if "/time/" in name)
    last = rewards[-10:]
    numbers = (rewards[0], sum(last) / len(last), min(ess), sum(ess) / len(ess))
    return [scenario, estimator, *(f"{number:.3f}" for number in numbers), f"{max(ages):.0f}", f"{seconds:.0f}"]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def every(size: str, root: Path, extra: Sequence[str]) -> int:
    """All scenarios with both estimators, one after the other; finished ones are not run again."""
    rows = []
    for scenario in SCENARIOS:
        for estimator in ESTIMATORS:
            directory = root / f"{scenario}_{estimator}"
            if status := train([*flags(scenario, estimator, size), "--resume", *extra], directory):
                print(f"{directory} ended with status {status}; the same command goes on there", file=sys.stderr)
                return status
            rows.append(row(scenario, estimator, directory))
    made = table(rows)
    (root / "table.md").write_text(made + "\n")
    print(made)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.recipes", description=__doc__.split("\n")[0])
    parser.add_argument("scenario", choices=[*SCENARIOS, "all"], help="all: every one with both estimators")
    parser.add_argument("--estimator", choices=ESTIMATORS, default="p3o")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--root", type=Path, default=Path("runs/recipes"), help="run directories are made in here")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved arguments and train nothing")
    given = list(sys.argv[1:] if argv is None else argv)
    own = given[: given.index("--")] if "--" in given else given
    args, extra = parser.parse_args(own), given[len(own) + 1 :]
    if args.scenario == "all":
        return every(args.size, args.root / args.size, extra)
    recipe = [*flags(args.scenario, args.estimator, args.size), *(["--dry-run"] if args.dry_run else []), *extra]
    return train(recipe, args.root / args.size / f"{args.scenario}_{args.estimator}")


if __name__ == "__main__":
    sys.exit(main())
