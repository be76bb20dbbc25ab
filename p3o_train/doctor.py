"""What of ``p3o train`` works on this machine, as plain text: versions, devices, what will be used, what is missing.

Packages are looked up by their metadata, none is imported for it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import p3o_kernels
from p3o_kernels import _backend
from p3o_train.device_shim import TESTED_VERSION, has_transformer_engine

MEGATRON_FLOOR, MEGATRON_CEILING = "0.16.1", "0.20"
"""megatron-core from the one, below the other, as the extra "train" has it."""

_NOT_INSTALLED = " (from source, not installed)"


class Piece(NamedTuple):
    """A package that something here needs."""

    name: str
    """Of the distribution."""
    purpose: str
    command: str
    """That installs it."""
    required: bool = False
    """Whether ``p3o train`` stops without it."""


_TRAIN, _ROLLOUT, _MATH = (f"pip install 'p3o-kernels[{extra}]'" for extra in ("train", "rollout", "math"))
# its build compiles against the torch that is here
_TE = "pip install --no-build-isolation 'p3o-kernels[te]'"

PIECES = (
    Piece("megatron-core", "models, schedules and the optimizer of p3o train", _TRAIN, required=True),
    Piece("numpy", "megatron-core, and Triton's interpreter", "pip install 'numpy>=1.26,<3'", required=True),
    Piece("transformers", "the embedded engine, tokenizers and checkpoints", _TRAIN, required=True),
    Piece("tqdm", "the progress of p3o train", _TRAIN, required=True),
    Piece("matplotlib", "the curves that p3o train draws", _TRAIN, required=True),
    Piece("triton", "the kernels on a GPU; without it they run in eager PyTorch", "pip install 'triton>=3.4'"),
    Piece("transformer-engine", "fused layers, where CUDA is", _TE),
    Piece("sglang", "rollouts by an inference server, in an environment of its own", _ROLLOUT),
    Piece("httpx", "--rollout-engine sglang", _TRAIN),
    Piece("tenacity", "--rollout-engine sglang", _TRAIN),
    Piece("pebble", "rewards in worker processes: --rm-type math, or your own", _TRAIN),
    Piece("math-verify", "--rm-type math", _MATH),
    Piece("tensorboard", "event files beside the JSON lines", "pip install tensorboard"),
    Piece("wandb", "--wandb-project", "pip install wandb"),
)
_SHOWN = ("torch", "triton", "numpy", "megatron-core", "transformer-engine", "transformers", "sglang")
_SINKS = ("tensorboard", "wandb", "matplotlib")

Rows = list[tuple[str, ...]]


def report() -> str:
    """All of it, one table a section."""
    sections = {
        "versions": version_rows(),
        "devices": device_rows(),
        "used here": choice_rows(),
        "missing": missing_rows(),
    }
    return "\n\n".join(f"{title}\n{_table(rows)}" for title, rows in sections.items())


def healthy() -> bool:
    """Whether ``p3o train`` can run here."""
    return not problems()


def problems() -> list[str]:
    """Why ``p3o train`` cannot run here."""
    found = [f"{piece.name} is missing" for piece in PIECES if piece.required and version_of(piece.name) is None]
    version = version_of("megatron-core")
    if version is not None and not _in_range(version):
        found.append(f"megatron-core {version} is not >={MEGATRON_FLOOR},<{MEGATRON_CEILING}")
    needed = "nccl" if torch.cuda.is_available() else "gloo"
    if needed not in distributed_backends():
        found.append(f"this build of torch has no {needed}")
    return found


def versions() -> dict[str, str | None]:
    """Name -> version; None where a package is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    return found | {name: version_of(name) for name in (*_SHOWN, "p3o-kernels")}


def version_of(distribution: str) -> str | None:
    """By its metadata; None: not here. Source trees on the path have none and are looked into."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        if distribution == "p3o-kernels":
            return p3o_kernels.__version__ + _NOT_INSTALLED
        return _megatron_source() if distribution == "megatron-core" else None


def _megatron_source() -> str | None:
    """The version that a checkout of Megatron-LM on the path writes down."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    written = Path(spec.origin).with_name("package_info.py")
    text = written.read_text(encoding="utf-8") if written.is_file() else ""
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) *= *(\d+)", text, re.MULTILINE)
    return (".".join(numbers) or "unknown version") + _NOT_INSTALLED


def cpu_name() -> str:
    """As the system calls the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def distributed_backends() -> list[str]:
    """Of this build of torch."""
    if not dist.is_available():
        return []
    return [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there]


def version_rows() -> Rows:
    """(name, version, warning)."""
    warnings = {"megatron-core": _megatron_warning()}
    return [(name, version or "missing", warnings.get(name, "")) for name, version in versions().items()]


def _megatron_warning() -> str:
    version = version_of("megatron-core")
    if version is None:
        return ""
    if not _in_range(version):
        return f"warning: outside the supported range >={MEGATRON_FLOOR},<{MEGATRON_CEILING}; {_TRAIN}"
    if _release(version) != _release(TESTED_VERSION):
        return f"warning: tests and the CPU shim are for {TESTED_VERSION}"
    return ""


def _in_range(version: str) -> bool:
    return _release(MEGATRON_FLOOR) <= _release(version) < _release(MEGATRON_CEILING)


def _release(version: str) -> tuple[int, ...]:
    """(0, 16, 1) of "0.16.1rc0+cpu"; () of what begins with no number."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def device_rows() -> Rows:
    """CUDA devices with compute capability and memory, or the threads of the CPU."""
    if not torch.cuda.is_available():
        return [("cpu", f"{torch.get_num_threads()} threads")]
    found: Rows = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        found.append((f"cuda:{index}", device.name, f"capability {device.major}.{device.minor}, {memory}"))
    return found


def choice_rows() -> Rows:
    """(what, choice, reason)."""
    cuda = torch.cuda.is_available()
    no_cuda = "no CUDA device"
    # a stand-in: a tensor on the device would start CUDA
    stand_in: Any = SimpleNamespace(is_cuda=cuda)
    backend = _backend.resolve("auto", stand_in)
    fused = has_transformer_engine()
    present = [name for name in _SINKS if version_of(name) is not None]
    reasons = problems()
    return [
        ('kernels, backend "auto"', backend, _backend_reason(backend, cuda)),
        (
            "layers",
            "transformer-engine" if fused else "Megatron-Core's own, PackedAttention",
            "CUDA and the package are here" if fused else "transformer-engine is missing" if cuda else no_cuda,
        ),
        ("CPU shim", "not loaded" if cuda else "loaded", "CUDA is here" if cuda else no_cuda),
        ("torch.distributed", ", ".join(distributed_backends()) or "none", ""),
        ("optional sinks", ", ".join(present) or "none", "JSON lines are always written"),
        ("p3o train", "cannot run" if reasons else "can run", "; ".join(reasons)),
    ]


def _backend_reason(backend: str, cuda: bool) -> str:
    if backend == "eager":
        return "triton is missing" if cuda and not _backend.HAS_TRITON else "no CUDA device"
    return "CUDA and triton are here" if cuda else "TRITON_INTERPRET is set: slow, for tests"


def missing_rows() -> Rows:
    """(package, what it is for, the command)."""
    absent = [piece for piece in PIECES if version_of(piece.name) is None]
    return [(piece.name, piece.purpose, piece.command) for piece in absent] or [("nothing",)]


def _table(rows: Rows) -> str:
    """Columns of equal width, two spaces in between and in front."""
    widths = [max(len(row[place]) for row in rows if len(row) > place) for place in range(max(map(len, rows)))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)
