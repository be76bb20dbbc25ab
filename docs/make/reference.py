"""Writes docs/reference.md from the code: flags, presets, environment variables and public names.

python -m docs.make.reference
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.make.reference_names import (
    PACKAGES,
    ROOT,
    environment_variables,
    exported,
    first_line,
    modules,
    public_names,
    signature,
)
from p3o_train.cli import parsers
from p3o_train.config import PRESETS

PAGE = ROOT / "docs" / "reference.md"

# heading -> flags whose names begin so; what fits none stands at the end
TOPICS: dict[str, tuple[str, ...]] = {
    "Run, checkpoints and logs": (
        *("dry_run", "preset", "run_dir", "num_rollouts", "seed", "save_interval", "keep_checkpoints", "resume"),
        *("mirror_metrics", "tensorboard", "wandb_project", "distributed_timeout_minutes", "output"),
    ),
    "Objective": (
        *("advantage_estimator", "p3o_", "loss_from_hidden", "clip_low", "clip_high", "entropy_coef", "kl_loss_coef"),
        *("use_rollout_logprobs", "calculate_per_token_loss", "normalize_by_std", "recompute_loss_function"),
    ),
    "Rollouts": (
        "rollout",
        "n_samples",
        "sglang",
        "max_staleness",
        "save_rollouts",
        "update_weights",
        "temperature",
        "record_kept",
    ),
    "Tasks, prompts and rewards": ("task", "prompt", "input_key", "label_key", "apply_chat", "rm_type", "reward"),
    "Evaluation": ("eval", "n_eval"),
    "Optimizer steps": (
        *("global_batch", "micro_batch", "max_tokens", "lr", "min_lr", "weight_decay", "adam", "clip_grad"),
    ),
    "Model": ("hf_checkpoint", "num_layers", "hidden_size", "num_att", "num_query", "ffn", "tie_", "init_std", "bf16"),
    "Parallelism": ("tensor_model", "pipeline_model", "context_parallel", "use_distributed_optimizer"),
}

READ_BY_US = {
    "WORLD_SIZE": "number of processes, set by `torchrun`; 1 where it is not set",
    "RANK": "number of this process, set by `torchrun`; rank 0 alone prints and writes metrics",
    "LOCAL_RANK": "number of this process on its machine, set by `torchrun`: the CUDA device that it takes",
}
"""What the packages read themselves: the name and one line."""

READ_BY_OTHERS = {
    "TRITON_INTERPRET": "1: kernels run in Triton's interpreter, on the CPU and slowly; read when Triton is imported, "
    "so set it before Python starts",
    "TRITON_CACHE_DIR": "where Triton keeps compiled kernels",
    "OMP_NUM_THREADS": "threads of PyTorch in each process; `torchrun` sets 1 where several processes start and "
    "nothing is set",
    "OMP_WAIT_POLICY": "`PASSIVE`: idle threads sleep, which helps on busy cores; the examples set it where it is not "
    "set",
    "CUDA_VISIBLE_DEVICES": "devices that PyTorch sees; empty: none, so that everything runs on the CPU",
    "MASTER_ADDR": "where ranks meet, set by `torchrun`",
    "MASTER_PORT": "its port, set by `torchrun`",
    "NCCL_DEBUG": "`INFO`: NCCL says what it does, for runs that hang on GPUs",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1, at the start of a server: log-probs before the temperature, for "
    "`--temperature-convention raw`",
    "SGLANG_USE_CPU_ENGINE": "1, at the start of a server: SGLang on the CPU, as `make test-sglang` runs it",
    "P3O_SGLANG_PYTHON": "the Python of the environment that has SGLang, for the tests in `tests/sglang`; "
    "`make test-sglang` sets it",
    "HF_HUB_OFFLINE": "1: transformers asks no server for files",
    "WANDB_MODE": "`offline`: Weights & Biases writes to disk alone",
}
"""What libraries, servers and tests read and users meet."""


def page() -> str:
    """The whole text of docs/reference.md."""
    parts = [
        "# Reference",
        "Every flag, preset, environment variable and public name, to look things up in. Written from the code by "
        "`python -m docs.make.reference`; a test compares it with the code.",
        *commands(),
        *presets(),
        *variables(),
        *names(),
    ]
    return "\n\n".join(parts) + "\n"


def commands() -> list[str]:
    """Flags of every subcommand; what a command shares with ``p3o train`` is not repeated."""
    parser, by_name = parsers()
    helps = {each.dest: each.help or "" for each in _choices_of(parser)}
    trained = _flags(by_name["train"])
    parts = ["## Commands", "`p3o NAME` and `python -m p3o_train NAME` are the same."]
    for name in ("train", *sorted(set(by_name) - {"train"})):
        flags = _flags(by_name[name])
        parts += [f"### p3o {name}", _ended(helps[name])]
        if name == "train":
            parts += _by_topic(flags)
            continue
        shared = name != "train" and flags.keys() >= trained.keys()
        own = {flag: action for flag, action in flags.items() if not shared or flag not in trained}
        if shared:
            parts.append("Takes the flags of `p3o train` and:" if own else "Takes the flags of `p3o train`.")
        parts += [_table(own.values())] if own else [] if shared else ["No flags."]
    return parts


def _choices_of(parser: argparse.ArgumentParser) -> Iterable[Any]:
    """argparse keeps the help of subcommands nowhere public."""
    actions: Any = parser._actions
    return next(each for each in actions if isinstance(each, argparse._SubParsersAction))._choices_actions


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {each.dest: each for each in parser._actions if each.dest != "help"}


def _by_topic(flags: Mapping[str, argparse.Action]) -> list[str]:
    left = dict(flags)
    parts = []
    for topic, beginnings in TOPICS.items():
        taken = [left.pop(name) for name in list(left) if name.startswith(beginnings)]
        parts += [f"#### {topic}", _table(taken)]
    return parts + (["#### More", _table(left.values())] if left else [])


def _table(actions: Iterable[argparse.Action]) -> str:
    rows = [(_spelled(each), _default(each), _cell(each.help or "")) for each in actions]
    return _markdown(("flag", "default", "what it does"), rows)


def _spelled(action: argparse.Action) -> str:
    text = ", ".join(f"`{each}`" for each in action.option_strings) or f"`{action.metavar or action.dest}`"
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return text
    if action.choices is not None:
        return text + ": " + ", ".join(f"`{each}`" for each in action.choices)
    return f"{text} {getattr(action.type, '__name__', 'text').replace('str', 'text')}"


def _default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    if action.default is None:
        return "none"
    if isinstance(action.default, bool):
        return "on" if action.default else "off"
    return f"`{action.default}`" if str(action.default) else "empty"


def _cell(text: str) -> str:
    return _ended(text.replace("%(default)s", "the default").replace("|", "\\|"))


def _ended(text: str) -> str:
    """With a full stop; not capitalised, since many begin with a value or a symbol."""
    return text.rstrip(".:") + "." if text else ""


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def presets() -> list[str]:
    """Every value that a preset sets, side by side."""
    every = list(dict.fromkeys(name for values in PRESETS.values() for name in values))
    rows = [
        (f"`--{name.replace('_', '-')}`", *(_value(values.get(name)) for values in PRESETS.values())) for name in every
    ]
    return [
        "## Presets",
        "`--preset NAME` gives these defaults; flags win over them. Empty: the default of the flag.",
        _markdown(("flag", *(f"`{name}`" for name in PRESETS)), rows),
    ]


def _value(value: Any) -> str:
    if value is None:
        return ""
    return ("on" if value else "off") if isinstance(value, bool) else f"`{value}`"


def variables() -> list[str]:
    """Environment variables of the code, and of what surrounds it.

    Raises:
        ValueError: the code reads one that has no line here, or one of these lines is of a variable it does not read.
    """
    read: dict[str, list[str]] = {}
    for package in PACKAGES:
        for name, where in environment_variables(package).items():
            read.setdefault(name, []).extend(where)
    if read.keys() != READ_BY_US.keys():
        differing = sorted(read.keys() ^ READ_BY_US.keys())
        raise ValueError(f"READ_BY_US and the code differ in {', '.join(differing)}: write one line for what is read")
    own = [(f"`{name}`", READ_BY_US[name], ", ".join(f"`{each}`" for each in where)) for name, where in read.items()]
    others = [(f"`{name}`", text) for name, text in READ_BY_OTHERS.items()]
    return [
        "## Environment variables",
        "The packages read these, and none of them changes a number:",
        _markdown(("variable", "meaning", "read by"), sorted(own)),
        "Libraries, servers, examples and tests read:",
        _markdown(("variable", "meaning"), others),
    ]


def names() -> list[str]:
    """Public functions and classes with their signatures."""
    parts = ["## p3o_kernels", "What `from p3o_kernels import ...` gives."]
    parts.append("\n".join(_name(name, node) for name, node in exported("p3o_kernels").items()))
    parts += ["## p3o_train", "By module. Names that begin with an underscore may change without notice."]
    for module, tree in modules("p3o_train").items():
        found = public_names(tree)
        if found:
            parts += [f"### {module}", _ended(first_line(tree)), "\n".join(_name(node.name, node) for node in found)]
    return parts


def _name(name: str, node: Any) -> str:
    text = signature(node) or name
    said = first_line(node)
    return f"- `{text}`" + (f": {_ended(said)}" if said else "")


def main() -> None:
    """Writes the page."""
    Path(PAGE).write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
