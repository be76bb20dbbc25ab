"""The command ``p3o study``."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from p3o_train import doctor
from p3o_train.study.cells import claim, prepare, run_cell, run_cells
from p3o_train.study.design import METHODS, SEEDS, SIZES, Cell, cells, settings
from p3o_train.study.page import about, write_page, write_tables
from p3o_train.study.results import read_results
from p3o_train.study.start import make_start, start_cells, start_path


def add_study_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("--run-dir", type=Path, default=Path("runs/study"), help="one file for each finished cell")
    parser.add_argument("--size", choices=SIZES, default="short", help="short: minutes on two cores; full: hours")
    names = ", ".join(settings("short"))
    parser.add_argument("--settings", nargs="+", default=[], metavar="NAME", help=f"some of {names}; all without it")
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME", help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="N", help="other seeds")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="cells at a time, a core each")
    parser.add_argument("--output", type=Path, help="write tables, pictures and the page study.md to this directory")
    parser.add_argument("--page-from", type=Path, metavar="DIR", help="run nothing: write DIR/study.md from DIR/data")


def run_study(args: argparse.Namespace) -> int:
    """Runs the cells that are missing, then writes what was asked for; the exit status."""
    if args.page_from is not None:
        return _page_from(args.page_from)
    try:
        if args.workers < 1:
            raise ValueError(f"--workers must be at least 1; got {args.workers}")
        asked = cells(args.size, args.settings, args.methods, args.seeds)
        if problems := doctor.problems():
            print(f"p3o study: cannot run here: {'; '.join(problems)}. `p3o doctor` says what to do", file=sys.stderr)
            return 1
        claim(args.run_dir, args.size)
    except ValueError as error:
        print(f"p3o study: {error}", file=sys.stderr)
        return 2
    try:
        status = _run(asked, args)
        if status == 0 and args.output is not None:
            write_tables(args.output, read_results(args.run_dir, asked), about(args.size, asked, args.workers))
            write_page(args.output)
            print(f"The page is {args.output / 'study.md'}, with data and images beside it.")
    except KeyboardInterrupt:
        print(f"\nStopped. The same command goes on: finished cells are in {args.run_dir}.", file=sys.stderr)
        return 130
    return status


def _run(asked: list[Cell], args: argparse.Namespace) -> int:
    prepare()
    make = partial(make_start, size=args.size, directory=args.run_dir)

    def run(cell: Cell, scratch: Path) -> dict[str, Any]:
        return run_cell(cell, scratch, args.size, start_path(args.run_dir, cell.seed))

    failures = run_cells(start_cells(args.seeds), args.run_dir, make, args.workers)
    if not failures:
        failures = run_cells(asked, args.run_dir, run, args.workers)
    for failure in failures:
        print(f"p3o study: {failure.cell.name} failed: {failure.why}", file=sys.stderr)
    if failures:
        print(
            f"p3o study: {len(failures)} of {len(asked)} cells failed; the same command runs them again.",
            file=sys.stderr,
        )
        return 1
    print(f"All {len(asked)} cells are in {args.run_dir}.")
    return 0


def _page_from(directory: Path) -> int:
    try:
        write_page(directory)
    except (OSError, ValueError) as error:
        print(f"p3o study: {error}", file=sys.stderr)
        return 2
    print(f"The page is {directory / 'study.md'}.")
    return 0
