"""The reliability campaign, which writes docs/data/reliability.json and docs/reliability.md.

    python -m tests.soak.campaign                            all parts, 12 minutes on two idle cores
    python -m tests.soak.campaign --only kill --kills 5      one part anew; what the record has of the others stays
    python -m tests.soak.campaign --missing                  the parts that the record does not have yet
    python -m tests.soak.campaign --page-only                the page from the record

The record is replaced after each part, so that Ctrl-C loses no more than the part that is under way, and ends every
process that was started.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from p3o_train import doctor
from p3o_train.sinks import replace_file
from tests.soak.page import DATA, PAGE, render, write_page
from tests.soak.runs import Campaign
from tests.soak.trials import Tally, Trial, faults_to_json


class Part(NamedTuple):
    """One part of the campaign."""

    name: str
    option: str
    """How its size is called."""
    size: int
    run: Callable[[Campaign, int], list[Trial] | list[Tally]]


def _fuzz_loss(campaign: Campaign, cases: int) -> list[Tally]:
    from tests.soak.fuzz import fuzz_loss

    return fuzz_loss(cases, campaign.random.randrange(2**32))


def _fuzz_recordings(campaign: Campaign, cases: int) -> list[Tally]:
    from tests.soak.fuzz import fuzz_recordings

    return fuzz_recordings(cases, campaign.random.randrange(2**32))


def _trials(module: str, function: str) -> Callable[[Campaign, int], list[Trial]]:
    """Loaded when it runs: what one part needs is no reason not to run another."""

    def run(campaign: Campaign, times: int) -> list[Trial]:
        made: list[Trial] = getattr(importlib.import_module(f"tests.soak.{module}"), function)(campaign, times)
        return made

    return run


PARTS = (
    Part("loss", "cases", 10_000, _fuzz_loss),
    Part("recordings", "cases", 10_000, _fuzz_recordings),
    Part("kill", "kills", 20, _trials("kills", "kills")),
    Part("rank-kill", "rank-kills", 4, _trials("kills", "rank_kills")),
    Part("slow-rank", "times", 1, _trials("kills", "slow_ranks")),
    Part("signals", "times", 2, _trials("kills", "signals")),
    Part("disk", "times", 1, _trials("disks", "full_disks")),
    Part("damage", "times", 1, _trials("disks", "damaged_files")),
    Part("server", "times", 1, _trials("servers", "servers")),
    Part("reward", "times", 1, _trials("rewards", "rewards")),
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts that are asked for; 1 if a fault was not survived or an input made a finding."""
    args = _parse(arguments)
    record = json.loads(args.record.read_text()) if args.record.exists() else {"parts": {}}
    chosen = [] if args.page_only else [part for part in PARTS if not args.only or part.name in args.only]
    if args.missing:
        chosen = [part for part in chosen if part.name not in record["parts"]]
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    folder = Path(tempfile.mkdtemp(prefix="p3o-soak-"))
    try:
        for part in chosen:
            record["parts"][part.name] = found = _run(part, args, folder)
            record["parts"] = {one.name: record["parts"][one.name] for one in PARTS if one.name in record["parts"]}
            _replace(args.record, json.dumps(record, indent=1) + "\n")
            print(f"{part.name}: {_summary(found)}, {found['seconds']:.0f} s", flush=True)
    except KeyboardInterrupt:
        print("\nStopped; the parts that are done are in the record. Go on with --missing.")
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.page:
        write_page(args.page, render(record))
    return int(any(_is_bad(record["parts"][part.name]) for part in chosen))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.campaign", description="The reliability campaign.")
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS], help="this part; repeatable")
    parser.add_argument("--missing", action="store_true", help="leave out parts that are in the record")
    parser.add_argument("--page-only", action="store_true", help="write the page from the record")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="inputs of each fuzz (default: 10000)")
    parser.add_argument("--kills", type=int, help="of a single process (default: 20)")
    parser.add_argument("--rank-kills", type=int, help="of one of two ranks (default: 4)")
    parser.add_argument("--times", type=int, help="each fault of the other parts (default: 1, signals 2)")
    parser.add_argument("--record", type=Path, default=DATA)
    parser.add_argument("--page", type=Path, help="default: docs/reliability.md, with the default record alone")
    args = parser.parse_args(arguments)
    if args.page is None and args.record == DATA:
        args.page = PAGE
    return args


def _run(part: Part, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    size = getattr(args, part.option.replace("-", "_")) or part.size
    campaign = Campaign(folder, random.Random(f"{args.seed} {part.name}"))
    begin = time.monotonic()
    made = part.run(campaign, size)
    tallies = [one for one in made if isinstance(one, Tally)]
    return {
        "command": f"python -m tests.soak.campaign --only {part.name} --{part.option} {size} --seed {args.seed}",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": _machine(),
        "seconds": round(time.monotonic() - begin),
        "tallies": [tally.to_json() for tally in tallies],
        "faults": faults_to_json([one for one in made if isinstance(one, Trial)]),
    }


def _machine() -> str:
    import torch

    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} x {doctor.cpu_name()}, {platform.system()}, {versions}"


def _summary(found: dict[str, Any]) -> str:
    if found["tallies"]:
        bad = sum(tally["inputs_with_findings"] for tally in found["tallies"])
        return f"{bad} of {sum(tally['tries'] for tally in found['tallies'])} inputs with findings"
    times = sum(fault["times"] for fault in found["faults"])
    return f"{sum(fault['survived'] for fault in found['faults'])} of {times} survived"


def _is_bad(found: dict[str, Any]) -> bool:
    survived = all(fault["survived"] == fault["times"] for fault in found["faults"])
    return not survived or any(tally["inputs_with_findings"] for tally in found["tallies"])


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())


if __name__ == "__main__":
    sys.exit(main())
