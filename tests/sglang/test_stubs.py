"""The stubs stand in for names that the real sglang imports, and for nothing else."""

import ast
import json
import subprocess
import sys

import pytest

from tests.sglang.server import STUBS, in_server_environment

PACKAGES = ("torchvision", "torchaudio", "sgl_kernel")
# every module and name that sglang and transformers, which it loads, take from these packages
IMPORTED = """
import ast, importlib.util, json, pathlib
found = set()
for package in ("sglang", "transformers"):
    for path in pathlib.Path(importlib.util.find_spec(package).origin).parent.rglob("*.py"):
        text = path.read_text(errors="replace")
        if not any(name in text for name in NAMES):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
print(json.dumps(sorted(name for name in found if name.split(".")[0] in NAMES)))
"""


def stub_modules():
    for path in STUBS.rglob("*.py"):
        parts = path.relative_to(STUBS).with_suffix("").parts
        yield path, ".".join(part for part in parts if part != "__init__")


@pytest.fixture(scope="module")
def imported():
    return set(json.loads(in_server_environment(f"NAMES = {PACKAGES!r}\n{IMPORTED}").splitlines()[-1]))


def test_every_stub_is_imported_by_the_real_source(imported):
    unused = [name for _, name in stub_modules() if not any(f"{found}.".startswith(f"{name}.") for found in imported)]
    assert unused == []


def test_every_class_of_a_stub_is_imported_by_the_real_source(imported):
    for path, module in stub_modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                assert f"{module}.{node.name}" in imported


def test_stubs_say_that_they_are_stubs():
    for path, module in stub_modules():
        assert ast.get_docstring(ast.parse(path.read_text())).startswith("Stub of "), module


@pytest.mark.parametrize(
    "name",
    [
        "torchvision.io.decode_jpeg",
        "torchvision.transforms.v2.functional.resize",
        "torchaudio.load",
        "sgl_kernel.rmsnorm",
    ],
)
def test_nothing_runs_on_a_stub_unnoticed(name):
    module, _, function = name.rpartition(".")
    code = f"import importlib; importlib.import_module({module!r}).{function}()"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(STUBS)}, capture_output=True, text=True)
    assert "NotImplementedError" in done.stderr and "is a stub" in done.stderr
