"""docs/reference.md is what the code says, and says all of it."""

import ast
import re

import pytest

from docs.make import reference, reference_names
from p3o_train import cli
from p3o_train.config import PRESETS
from tests.project.pages import ROOT

PAGE = reference.PAGE.read_text(encoding="utf-8")


def test_the_page_is_up_to_date():
    assert reference.page() == PAGE, "the code has changed: python -m docs.make.reference"


def test_every_flag_of_every_command_is_there():
    """Found by walking the parsers, not by the page's own tables."""
    _, by_name = cli.parsers()
    assert set(by_name) >= {"train", "export", "parity", "doctor"}
    for name, parser in by_name.items():
        assert f"### p3o {name}\n" in PAGE
        # what export shares with train stands there
        section = PAGE.split(f"### p3o {name}\n")[1].split("\n### ")[0].split("\n## ")[0]
        shared = PAGE.split("### p3o train\n")[1].split("\n### ")[0] if "Takes the flags of" in section else ""
        flags = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
        assert {flag for flag in flags if f"`{flag}`" not in section + shared} == set()


def test_topics_are_of_flags_that_exist():
    names = {action.dest for action in cli.parsers()[1]["train"]._actions} | {"output"}
    beginnings = [each for topic in reference.TOPICS.values() for each in topic]
    assert [each for each in beginnings if not any(name.startswith(each) for name in names)] == []
    assert "#### More" not in PAGE, "a new flag has no topic in docs/make/reference.py"


def test_presets_have_their_values():
    lines = [line.strip("| ").split("|") for line in PAGE.split("## Presets")[1].split("\n## ")[0].splitlines()]
    cells = {line[0].strip(" `"): [cell.strip(" `") for cell in line] for line in lines if len(line) > 1}
    for name, values in PRESETS.items():
        column = cells["flag"].index(name)
        for flag, value in values.items():
            shown = cells[f"--{flag.replace('_', '-')}"][column]
            assert shown == (("on" if value else "off") if isinstance(value, bool) else str(value)), flag


def test_environment_variables_are_found_in_every_form():
    """In a file with all of them; a name that is computed is an error."""
    source = (
        "import os\nNAME = 'A_CONSTANT'\n"
        "os.environ.get('A_GET'); os.environ['AN_INDEX']; os.getenv('A_GETENV')\n"
        "'A_MEMBER' in os.environ; 'NO_MEMBER' not in os.environ; os.environ.setdefault('A_DEFAULT', '')\n"
        "os.environ.get(NAME)\n"
    )
    found = set(reference_names._reads(ast.parse(source), "example"))
    assert found == {"A_GET", "AN_INDEX", "A_GETENV", "A_MEMBER", "NO_MEMBER", "A_DEFAULT", "A_CONSTANT"}
    with pytest.raises(ValueError, match="example, line 2: write the name"):
        list(reference_names._reads(ast.parse("import os\nos.environ[str(1)]"), "example"))


def test_no_environment_variable_is_missing():
    """Words in capitals beside environ or getenv, by plain search."""
    texts = [path.read_text(encoding="utf-8") for name in reference.PACKAGES for path in (ROOT / name).rglob("*.py")]
    read = {word for text in texts for word in re.findall(r"(?:environ|getenv)\W+(?:\w+\()?[\"']([A-Z_0-9]+)", text)}
    read |= {word for text in texts for word in re.findall(r"[\"']([A-Z_0-9]+)[\"'] (?:not )?in os\.environ", text)}
    assert len(read) >= 3
    assert {name for name in read if f"| `{name}` |" not in PAGE} == set()


def test_a_variable_without_a_line_is_an_error(monkeypatch):
    monkeypatch.setattr(reference, "READ_BY_US", {"RANK": "", "NOWHERE_READ": ""})
    with pytest.raises(ValueError, match="LOCAL_RANK, NOWHERE_READ, WORLD_SIZE"):
        reference.variables()


def test_public_names_are_there_with_their_arguments():
    import p3o_kernels

    section = PAGE.split("## p3o_kernels\n")[1].split("\n## ")[0]
    assert re.findall(r"^- `(\w+)", section, re.MULTILINE) == sorted(p3o_kernels.__all__, key=str.lower)
    assert "behavior_log_probs: Tensor" in section
    for name in (
        "pack_step(",
        "step_gradients(",
        "add_p3o_arguments(",
        "apply_p3o_kernels_to_megatron(",
        "TrainConfig(",
    ):
        assert f"- `{name}" in PAGE, name
