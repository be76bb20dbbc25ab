"""Errors that docs/troubleshooting.md quotes are errors of the code."""

import ast
import re
from pathlib import Path

import pytest

from tests.project.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTES = re.findall(r"^> (`+) ?(.+?) ?\1$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
HOLE = "…"
# characters of the longest piece between holes; less could be anything
TELLING = 15


def texts() -> list[str]:
    """Every text in the packages, with a hole for what is filled in."""
    found = []
    for path in sorted([*ROOT.glob("p3o_kernels/**/*.py"), *ROOT.glob("p3o_train/**/*.py")]):
        found += texts_of(path)
    return found


def texts_of(path: Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return plain + [template(node) for node in nodes if isinstance(node, ast.JoinedStr)]


def template(node: ast.JoinedStr) -> str:
    return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)


def occurs(quote: str, every: list[str]) -> bool:
    """A hole at an end of the quote stands for what the sentence begins or ends with."""
    return any(quote.strip(HOLE).strip() in text for text in every)


EVERY = texts()


@pytest.mark.parametrize("quote", [quote for _, quote in QUOTES])
def test_a_quoted_error_is_in_the_code(quote):
    assert occurs(quote, EVERY)


def test_quotes_are_telling():
    assert len(QUOTES) >= 30 and len(set(QUOTES)) == len(QUOTES)
    short = [quote for _, quote in QUOTES if max(map(len, quote.split(HOLE))) < TELLING]
    assert short == []


def test_a_quote_that_is_not_in_the_code_is_noticed():
    assert not occurs("invalid data on … of … valid tokens of that optimizer step", EVERY)


def test_symptoms_are_many_and_have_an_answer():
    """Each has a cause, a fix, or an error that says both."""
    sections = re.split(r"^### ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(sections) >= 30
    empty = [text.split("\n")[0] for text in sections if not re.search(r"^(- \*\*|> `)", text, re.MULTILINE)]
    assert empty == []
