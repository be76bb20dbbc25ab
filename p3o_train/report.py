"""Runs on one page that needs nothing else: ``p3o report``."""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p3o_train.curves import METHODS
from p3o_train.findings import AGE_RISE, FAR_SHARE, LOW_ESS, SHIFT, findings
from p3o_train.plots import add_run_arguments, check_output, notes, render, runs_of
from p3o_train.report_page import PAGE
from p3o_train.run_data import LAST_STEPS, Run
from p3o_train.sinks import replace_file

NUMBERS = {
    "mean reward": "train/reward_mean",
    "evaluation reward": "eval/reward_mean",
    "response length": "train/response_length_mean",
    "normalized ESS": "train/{}/normalized_ess",
    "mean ratio": "train/{}/ratio_mean",
    "mean |log ratio|": "train/{}/log_ratio_abs_mean",
    "largest |log ratio|": "train/{}/log_ratio_abs_max",
    "share of tokens at P3O's cap": "train/p3o/cap_fraction",
    "KL to the policy that sampled": "train/{}/behavior_kl_proxy",
    "KL to the reference policy": "train/{}/reference_kl",
    "policy age in rollouts": "train/{}/policy_age_mean",
    "loss per token": "train/{}/total_loss",
    "gradient norm": "train/grad_norm",
    "valid tokens of a step": "train/{}/valid_tokens",
    "seconds: rollout": "train/time/rollout_s",
    "seconds: pre-pass": "train/time/prepass_s",
    "seconds: training": "train/time/train_s",
    "seconds: weights to engines": "train/time/sync_s",
}
"""Label -> name of a number, where {} stands for the method."""
LOOKED_FOR = (
    f"ESS below {LOW_ESS:g}; |log mean ratio| above {SHIFT:g}; a policy age that rises by more than {AGE_RISE:g} "
    "rollouts; steps that are missing, out of order or twice; numbers that are not finite; failed rewards; dropped "
    f"responses; invalid tokens; more than {FAR_SHARE:.1%} of tokens in the open bins of the histogram; a run that is "
    "not complete"
)
_NO_NUMBER = "-"
# run directories differ always
_NOT_COMPARED = ("versions", "run_dir")


def write_report(runs: Sequence[Run], path: str | os.PathLike[str], smooth: int = 1) -> None:
    """Writes the page. The same files give the same page.

    Args:
        path: .html in a directory that exists; a file of this name is replaced.
        smooth: as in ``draw_comparison``.

    Raises:
        ImportError, ValueError: those of ``draw_comparison``.
        OSError: the file cannot be written; nothing has changed then.
    """
    path = Path(path)
    if path.suffix.lower() != ".html":
        raise ValueError(f"--output must end in .html; got {path}")
    check_output(path)
    replace_file(path, page(runs, smooth).encode())


def page(runs: Sequence[Run], smooth: int = 1) -> str:
    """The page as text; everything that comes from files is escaped.

    Raises:
        ImportError, ValueError: those of ``draw_comparison``.
    """
    from jinja2 import Environment, StrictUndefined  # of which torch depends

    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE)
    one = "There is one run, so there is nothing to compare."
    return template.render(
        title=f"P3O: {', '.join(run.label for run in runs)}",
        labels=[run.label for run in runs],
        runs=[_described(run) for run in runs],
        warnings=[(run.label, findings(run)) for run in runs],
        looked_for=LOOKED_FOR,
        last_steps=LAST_STEPS,
        no_number=_NO_NUMBER,
        numbers=final_numbers(runs),
        picture=base64.b64encode(render(runs, "png", smooth)).decode(),
        alt=f"Curves over the steps of {', '.join(run.label for run in runs)}; the numbers are in the table above",
        notes=notes(runs),
        differing=differing(runs),
        nothing_differs=one if len(runs) == 1 else "None, as far as the runs have a config.json.",
        versions=_compared([_versions(run) for run in runs]),
        all_settings=[(run.label, [(name, _text(run.settings[name])) for name in _settings(run)]) for run in runs],
    )


def final_numbers(runs: Sequence[Run]) -> list[list[str]]:
    """[label, one number for each run]; numbers that no run has are left out."""
    rows = [(label, [run.last_mean(name) for run in runs]) for label, name in NUMBERS.items()]
    return [[label, *map(_number, values)] for label, values in rows if not all(map(math.isnan, values))]


def differing(runs: Sequence[Run]) -> list[list[str]]:
    """[setting, its value in each run] of those that are not the same everywhere; runs without any are left aside."""
    known = [{name: run.settings[name] for name in _settings(run)} for run in runs]
    some = [settings for settings in known if settings]
    rows = _compared(known)
    names = {name for one in some for name in one if any(one.get(name) != other.get(name) for other in some)}
    return [row for row in rows if row[0] in names]


def _described(run: Run) -> list[str]:
    method = METHODS.get(run.method, (run.method or "unknown",))[0]
    return [run.label, str(run.directory), method, str(len(run.rows)), str(run.steps[-1])]


def _settings(run: Run) -> list[str]:
    return sorted(run.settings.keys() - set(_NOT_COMPARED))


def _versions(run: Run) -> Mapping[str, Any]:
    versions = run.settings.get("versions")
    known = versions if isinstance(versions, dict) else {}
    return {name: version for name, version in known.items() if version is not None}  # None: not installed


def _compared(settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = sorted({name for one in settings for name in one})
    return [[name, *(_text(one[name]) if name in one else _NO_NUMBER for one in settings)] for name in names]


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    return _NO_NUMBER if math.isnan(value) else f"{value:.4g}"


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``p3o report``."""
    add_run_arguments(parser, "report.html", "page, .html")


def run_report(args: argparse.Namespace) -> int:
    """Writes the page, and prints its warnings. 2: refused, with the reason on stderr."""
    try:
        runs = runs_of(args)
        write_report(runs, args.output, args.smooth)
    except (ValueError, OSError, ImportError) as error:
        print(f"p3o report: {error}", file=sys.stderr)
        return 2
    for run in runs:
        for text in findings(run):
            print(f"{run.label}: {text}")
    print(f"The page is {args.output}.")
    return 0
