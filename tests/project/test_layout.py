"""What CONTRIBUTING.md promises about the shape of the code, counted."""

import ast
import dataclasses
import inspect
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import p3o_kernels

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("p3o_kernels", "p3o_train", "bench", "docs", "examples", "tests")
MAX_FILE_LINES, MAX_MEDIAN_LINES, MAX_FUNCTION_LINES = 400, 150, 50
HEAVY_MODULES = ("megatron", "transformer_engine", "sglang", "transformers")
# joined here so that this file does not mention what it forbids
MACHINE_TRACES = [f"/{folder}/" for folder in ("tmp", "root", "home", "work")] + ["-".join(["index", "url"])]


def project_files() -> list[Path]:
    """Files of the checkout, tracked or about to be; without git, all but hidden and generated ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        generated = {"build", "dist", "__pycache__"}
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(part.startswith(".") or part in generated for part in path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in paths if path.is_file())


def code_files() -> list[Path]:
    files = [path for path in project_files() if path.suffix == ".py"]
    return [path for path in files if path.relative_to(ROOT).parts[0] in CODE_FOLDERS]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def public_objects() -> dict[str, object]:
    exported = {name: getattr(p3o_kernels, name) for name in p3o_kernels.__all__}
    return {name: value for name, value in exported.items() if callable(value)}


def missing_annotations(function: object) -> list[str]:
    signature = inspect.signature(inspect.unwrap(function))
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.annotation is parameter.empty and name not in ("self", "cls")
    ]
    return missing + (["return"] if signature.return_annotation is signature.empty else [])


def own_functions(cls: type) -> dict[str, object]:
    """Public methods and the constructor that the class itself writes down."""
    written = {
        name: getattr(value, "fget", None) or getattr(value, "__func__", value)
        for name, value in vars(cls).items()
        if name == "__init__" or not name.startswith("_")
    }
    generated = dataclasses.is_dataclass(cls) or issubclass(cls, tuple)
    return {
        name: value
        for name, value in written.items()
        if inspect.isfunction(value) and not (generated and name == "__init__")
    }


def run_python(code: str, **env: str) -> str:
    """Output of ``code`` in a fresh interpreter, without Triton's interpreter mode."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=inherited | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A long description of many arguments does not make a function long."""
    if ast.get_docstring(node) is None:
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


def test_code_was_found():
    names = [relative(path) for path in code_files()]
    assert "p3o_kernels/__init__.py" in names
    assert "tests/project/test_layout.py" in names


def test_files_are_short():
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in code_files()}
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == {}
    assert statistics.median(lines.values()) <= MAX_MEDIAN_LINES


def test_functions_are_short():
    too_long = {}
    for path in code_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = node.end_lineno - node.lineno + 1 - docstring_lines(node)
                if count > MAX_FUNCTION_LINES:
                    too_long[f"{relative(path)}:{node.lineno} {node.name}"] = count
    assert too_long == {}


@pytest.mark.parametrize("name", public_objects())
def test_public_names_are_documented_and_annotated(name):
    value = public_objects()[name]
    text = value.__doc__ or ""
    assert text.strip()
    if not inspect.isclass(value):
        assert missing_annotations(value) == []
        return
    assert not text.startswith(f"{value.__name__}("), "dataclass and NamedTuple wrote this docstring"
    for method_name, method in own_functions(value).items():
        assert missing_annotations(method) == [], method_name
        assert method_name == "__init__" or inspect.getdoc(method), f"{name}.{method_name} has no docstring"


def test_import_is_light(tmp_path):
    """No CUDA context, no heavy dependency, and no kernel compiled (a compile would fill the cache)."""
    code = (
        "import sys, p3o_kernels, p3o_train, torch\n"
        "print(torch.cuda.is_initialized())\n"
        f"print(sorted(sys.modules.keys() & {set(HEAVY_MODULES)!r}))"
    )
    assert run_python(code, TRITON_CACHE_DIR=str(tmp_path)).split("\n")[:2] == ["False", "[]"]
    assert list(tmp_path.rglob("*")) == []


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, p3o_kernels\n"
        "tokens = torch.zeros(3, requires_grad=True)\n"
        "print(p3o_kernels.p3o_loss(tokens, torch.zeros(3), torch.ones(3)).loss.item())\n"
        "try: p3o_kernels.p3o_loss(tokens, torch.zeros(3), torch.ones(3), backend='triton')\n"
        "except ValueError as error: print(error)"
    )
    loss, error = run_python(code).strip().split("\n")
    assert float(loss) == 0.0
    assert error.startswith('backend="triton" needs the triton package: pip install')


def test_text_names_no_machine():
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{relative(path)}: {trace}" for trace in MACHINE_TRACES if trace in text]
    assert found == []
