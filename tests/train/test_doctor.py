"""``p3o doctor`` on machines that are not this one: packages come and go by their metadata."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import p3o_kernels
from p3o_kernels import _backend
from p3o_train import device_shim, doctor

pytestmark = pytest.mark.host_only  # starts a process, and makes believe about devices
ROOT = Path(__file__).resolve().parents[2]
REQUIRED = {
    "megatron-core": device_shim.TESTED_VERSION,
    "numpy": "2.0.0",
    "transformers": "4.55.0",
    "tqdm": "4.66",
    "matplotlib": "3.9",
}
EVERYTHING = REQUIRED | {
    "httpx": "0.27",
    "tenacity": "9.0",
    "pebble": "5.1",
    "math-verify": "0.8",
    "torch": "2.9.1+cu129",
    "triton": "3.5.0",
    "transformer-engine": "2.9.0",
    "sglang": "0.5.19",
    "tensorboard": "2.20",
    "wandb": "0.22",
    "p3o-kernels": "9.9.9",
}


@pytest.fixture
def machine(monkeypatch):
    """Gives the machine packages, CUDA devices and backends; without arguments it has none."""

    def have(packages=(), gpus=0, backends=("gloo",), triton=True, modules=()):
        installed = dict(packages)

        def version(name):
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        def find_spec(name, package=None):
            if name == "megatron.core" and name not in modules:
                raise ModuleNotFoundError("No module named 'megatron'")
            return SimpleNamespace(origin=dict(modules)[name]) if name in dict(modules) else None

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        properties = SimpleNamespace(name="H100", major=9, minor=0, total_memory=80 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(dist, "is_gloo_available", lambda: "gloo" in backends)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: "nccl" in backends)
        monkeypatch.setattr(_backend, "HAS_TRITON", triton)
        monkeypatch.setattr(_backend, "INTERPRETED", False)

    return have


def row(rows, name):
    (found,) = [row for row in rows if row[0] == name]
    return found


def section(title):
    """The lines of one section of the report."""
    (found,) = [part for part in doctor.report().split("\n\n") if part.startswith(f"{title}\n")]
    return found.splitlines()[1:]


def test_a_machine_for_everything(machine):
    machine(EVERYTHING, gpus=2, backends=("gloo", "nccl"), modules={"transformer_engine": "te.py"})
    assert doctor.healthy()
    assert doctor.device_rows() == [
        ("cuda:0", "H100", "capability 9.0, 80 GiB"),
        ("cuda:1", "H100", "capability 9.0, 80 GiB"),
    ]
    choices = doctor.choice_rows()
    assert row(choices, 'kernels, backend "auto"')[1:] == ("triton", "CUDA and triton are here")
    assert row(choices, "layers")[1] == "transformer-engine"
    assert row(choices, "CPU shim")[1] == "not loaded"
    assert row(choices, "torch.distributed")[1] == "gloo, nccl"
    assert row(choices, "optional sinks")[1] == "tensorboard, wandb, matplotlib"
    assert row(choices, "p3o train")[1:] == ("can run", "")
    assert section("missing") == ["  nothing"]


def test_a_cpu_that_trains(machine):
    machine(REQUIRED)
    assert doctor.healthy()
    assert doctor.device_rows() == [("cpu", f"{torch.get_num_threads()} threads")]
    choices = doctor.choice_rows()
    assert row(choices, 'kernels, backend "auto"')[1:] == ("eager", "no CUDA device")
    assert row(choices, "layers")[1:] == ("Megatron-Core's own, PackedAttention", "no CUDA device")
    assert row(choices, "CPU shim")[1] == "loaded"
    absent = [row[0] for row in doctor.missing_rows()]
    optional = ["httpx", "tenacity", "pebble", "math-verify", "tensorboard", "wandb"]
    assert absent == ["triton", "transformer-engine", "sglang", *optional]


def test_a_gpu_without_its_packages(machine):
    machine(REQUIRED, gpus=1, backends=("nccl",), triton=False)
    choices = doctor.choice_rows()
    assert row(choices, 'kernels, backend "auto"')[1:] == ("eager", "triton is missing")
    assert row(choices, "layers")[1:] == ("Megatron-Core's own, PackedAttention", "transformer-engine is missing")
    assert doctor.healthy()


def test_the_interpreter(machine, monkeypatch):
    machine(REQUIRED)
    monkeypatch.setattr(_backend, "INTERPRETED", True)
    kernels = row(doctor.choice_rows(), 'kernels, backend "auto"')
    assert kernels[1] == "triton"
    assert "TRITON_INTERPRET" in kernels[2]


@pytest.mark.parametrize("absent", REQUIRED)
def test_what_training_needs(machine, absent):
    machine({name: version for name, version in REQUIRED.items() if name != absent})
    assert not doctor.healthy()
    assert doctor.problems() == [f"{absent} is missing"]
    _, purpose, command = row(doctor.missing_rows(), absent)
    assert purpose
    assert command.startswith("pip install ")
    assert f"{absent} is missing" in row(doctor.choice_rows(), "p3o train")[2]


@pytest.mark.parametrize(
    ("gpus", "backends", "needed"), [(0, ("nccl",), "gloo"), (1, ("gloo",), "nccl"), (0, (), "gloo")]
)
def test_a_torch_without_the_backend(machine, gpus, backends, needed):
    machine(REQUIRED, gpus=gpus, backends=backends)
    assert doctor.problems() == [f"this build of torch has no {needed}"]


def test_a_torch_without_distributed(machine, monkeypatch):
    machine(REQUIRED)
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert not doctor.healthy()
    assert row(doctor.choice_rows(), "torch.distributed")[1] == "none"


@pytest.mark.parametrize(
    ("version", "healthy", "warning"),
    [
        (device_shim.TESTED_VERSION, True, ""),
        (f"{device_shim.TESTED_VERSION}+cu12", True, ""),
        ("0.16.2", True, f"tests and the CPU shim are for {device_shim.TESTED_VERSION}"),
        ("0.19.5", True, "tests and the CPU shim"),
        ("0.16.0", False, "outside the supported range >=0.16.1,<0.20"),
        ("0.9.0", False, "outside the supported range"),
        ("0.20", False, "outside the supported range"),
        ("0.20.0rc0", False, "outside the supported range"),
        ("1.0", False, "outside the supported range"),
    ],
)
def test_releases_of_megatron(machine, version, healthy, warning):
    machine(REQUIRED | {"megatron-core": version})
    assert doctor.healthy() is healthy
    _, shown, note = row(doctor.version_rows(), "megatron-core")
    assert shown == version
    assert warning in note if warning else note == ""
    (line,) = [line for line in section("versions") if "megatron-core" in line]
    assert version in line
    assert note in line


@pytest.mark.parametrize(
    ("text", "version", "healthy"),
    [
        ("MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = 'rc2'\n", "0.16.1", True),
        ("MAJOR = 0\nMINOR = 21\nPATCH = 0\n", "0.21.0", False),
        (None, "unknown version", False),
    ],
)
def test_a_source_tree_of_megatron(machine, tmp_path, text, version, healthy):
    if text:
        (tmp_path / "package_info.py").write_text(text)
    installed = {name: number for name, number in REQUIRED.items() if name != "megatron-core"}
    machine(installed, modules={"megatron.core": str(tmp_path / "__init__.py")})
    assert doctor.versions()["megatron-core"] == f"{version} (from source, not installed)"
    assert doctor.healthy() is healthy


def test_versions(machine):
    machine({name: version for name, version in EVERYTHING.items() if name != "sglang"})
    assert doctor.versions() == {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": "2.9.1+cu129",
        "triton": "3.5.0",
        "numpy": "2.0.0",
        "megatron-core": device_shim.TESTED_VERSION,
        "transformer-engine": "2.9.0",
        "transformers": "4.55.0",
        "sglang": None,
        "p3o-kernels": "9.9.9",
    }
    machine(REQUIRED)
    assert doctor.versions()["p3o-kernels"] == f"{p3o_kernels.__version__} (from source, not installed)"


def test_sections_and_columns(machine):
    machine(REQUIRED)
    titles = [part.splitlines()[0] for part in doctor.report().split("\n\n")]
    assert titles == ["versions", "devices", "used here", "missing"]
    lines = section("missing")
    assert len({line.index("pip install") for line in lines}) == 1
    assert all(line == line.rstrip() and line.startswith("  ") for line in lines)


def test_commands_and_range_are_those_of_the_project():
    """Every extra that a command names exists and brings the package; other commands name it."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: " ".join(needed) for name, needed in project["optional-dependencies"].items()}
    for piece in doctor.PIECES:
        extra = re.search(r"p3o-kernels\[(\w+)\]", piece.command)
        assert piece.name in extras[extra[1]] if extra else piece.name in piece.command
    assert f"megatron-core>={doctor.MEGATRON_FLOOR},<{doctor.MEGATRON_CEILING}" in extras["train"]


@pytest.mark.parametrize(
    ("gpus", "modules", "usable"),
    [(0, {"transformer_engine": "te.py"}, False), (1, {}, False), (1, {"transformer_engine": "te.py"}, True)],
)
def test_where_transformer_engine_is_used(machine, gpus, modules, usable):
    machine(REQUIRED, gpus=gpus, modules=modules)
    assert device_shim.has_transformer_engine() is usable


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from p3o_train import doctor; doctor.report(); doctor.healthy()\n"
        "heavy = ('megatron.core', 'transformer_engine', 'sglang', 'matplotlib', 'tensorboard', 'wandb')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
