"""What the source text of the packages says: public names with their signatures, and environment variables it reads.

Nothing is imported, so the result depends neither on the optional packages that are installed nor on the machine.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("p3o_kernels", "p3o_train")
MAX_SIGNATURE = 400
"""Characters; a dataclass with more has its fields in the code, a line each."""

_READERS = ("os.environ.get", "os.getenv", "os.environ.setdefault", "os.environ.pop", "environ.get", "getenv")


def modules(package: str) -> dict[str, ast.Module]:
    """Public modules by dotted name, their syntax trees; those of a package itself under its name."""
    return {name: tree for name, tree in _all_modules(package).items() if "._" not in name}


@functools.cache
def _all_modules(package: str) -> dict[str, ast.Module]:
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def first_line(node: ast.AST) -> str:
    """The first paragraph of a docstring on one line; empty without one."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    text = ast.get_docstring(node) or ""
    return " ".join(text.split("\n\n")[0].split())


def public_names(tree: ast.Module) -> list[ast.ClassDef | ast.FunctionDef]:
    """Functions and classes of a module that do not begin with an underscore, in the order of the file."""
    return [
        node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    ]


def exported(package: str = "p3o_kernels") -> dict[str, ast.AST]:
    """The names of ``__all__``, where they are defined; a module stands for itself."""
    trees = _all_modules(package)
    found: dict[str, ast.AST] = {}
    for node in trees[package].body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            module = f"{node.module}.{alias.name}"
            if module in trees:
                found[alias.name] = trees[module]
                continue
            found |= {each.name: each for each in public_names(trees[str(node.module)]) if each.name == alias.name}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def signature(node: ast.AST) -> str:
    """As it would be called: ``name(arguments) -> result``; of a class its constructor or its fields."""
    if isinstance(node, ast.Module):
        return ""
    if isinstance(node, ast.FunctionDef):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{node.name}({_without_self(node)}){result}"
    assert isinstance(node, ast.ClassDef)
    made = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if made is not None:
        return f"{node.name}({_without_self(made)})"
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and not _is_private(each)]
    text = ", ".join(_field(each) for each in fields)
    if len(text) > MAX_SIGNATURE:
        text = f"... {len(fields)} fields"
    return f"{node.name}({text})" if fields else node.name


def _without_self(node: ast.FunctionDef) -> str:
    text = ast.unparse(node.args)
    return text.removeprefix("self").removeprefix(", ")


def _is_private(node: ast.AnnAssign) -> bool:
    return isinstance(node.target, ast.Name) and node.target.id.startswith("_")


def _field(node: ast.AnnAssign) -> str:
    given = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    return given if node.value is None else f"{given} = {ast.unparse(node.value)}"


def environment_variables(package: str) -> dict[str, list[str]]:
    """Names that the code reads -> modules that read them.

    Raises:
        ValueError: a read whose name cannot be seen in the source text.
    """
    found: dict[str, list[str]] = {}
    for module, tree in _all_modules(package).items():
        for name in sorted(set(_reads(tree, module))):
            found.setdefault(name, []).append(module)
    return found


def _reads(tree: ast.Module, module: str) -> Iterator[str]:
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for key in _keys(tree):
        value = key.value if isinstance(key, ast.Constant) else constants.get(getattr(key, "id", ""))
        if not isinstance(value, str):
            raise ValueError(f"{module}, line {key.lineno}: write the name of the environment variable as a constant")
        yield value


def _keys(tree: ast.Module) -> Iterator[ast.expr]:
    """What environ is asked for: by a call, by an index, or by ``in``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _READERS and node.args:
            yield node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("os.environ", "environ"):
            yield node.slice
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) in ("os.environ", "environ"):
            yield node.left
