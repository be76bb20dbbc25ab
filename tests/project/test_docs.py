"""The pages keep their word: links lead somewhere, code runs, commands exist with the flags that they are given."""

import csv
import json
import re
import time
import urllib.parse

import pytest

from tests.project import commands, pages
from tests.project.commands import flags_in, tomllib
from tests.project.pages import ROOT
from tests.project.stand_ins import prepared

# where a link may lead outside of the checkout; nothing is fetched
HOSTS = {"arxiv.org", "github.com"}
PYTHON = pages.all_blocks("python")
COMMANDS = [command for block in pages.all_blocks("console", "bash") for command in commands.commands(block)]
FLAG = re.compile(r"--[a-z][a-z0-9-]+")
# flags that the text mentions beside ours: those of our scripts, and of other programs
FOREIGN_FLAGS = {
    *(flag for folder in ("examples", "bench") for path in (ROOT / folder).glob("*.py") for flag in flags_in(path)),
    *commands.SERVER_FLAGS,
    *commands.SLIME_FLAGS,
    *commands.torchrun_flags(),
    *("--use-tis", "--cp-comm-type"),  # slime and miles, where they are to be left out
    *("--logprobs-mode", "--no-deps"),  # vLLM; pip
}
LANGUAGES = {"python", "console", "bash", "toml", "yaml", "json", "text", ""}
took: dict[str, float] = {}


def ids(things):
    return [str(thing) for thing in things]


def test_there_is_something_to_check():
    assert {pages.name(path) for path in pages.pages()} >= {"README.md", "CONTRIBUTING.md", "docs/README.md"}
    assert len(PYTHON) >= 8 and len(COMMANDS) >= 30
    assert {block.page for block in PYTHON} >= {"README.md", "docs/adapters.md", "examples/verl_p3o.md"}


@pytest.mark.parametrize("path", pages.pages(), ids=pages.name)
def test_links_lead_somewhere(path):
    broken = []
    for target in pages.links(path):
        address, _, anchor = target.partition("#")
        if urllib.parse.urlsplit(target).scheme:
            host = urllib.parse.urlsplit(target).hostname
            broken += [f"{target}: host not in HOSTS"] if host not in HOSTS else []
            continue
        file = (path.parent / urllib.parse.unquote(address)).resolve() if address else path
        if not file.exists() or not file.is_relative_to(ROOT):
            broken.append(f"{target}: no such file")
        elif anchor and urllib.parse.unquote(anchor) not in pages.anchors(file):
            broken.append(f"{target}: no such heading")
    assert broken == []


@pytest.mark.parametrize("path", pages.pages(), ids=pages.name)
def test_languages_are_known(path):
    assert {block.language for block in pages.blocks(path)} <= LANGUAGES


@pytest.mark.parametrize("block", PYTHON, ids=ids(PYTHON))
def test_python_runs(block, tmp_path, monkeypatch):
    """In a namespace and a directory of its own."""
    monkeypatch.chdir(tmp_path)
    names = prepared(block, monkeypatch)
    begin = time.process_time()
    exec(compile(block.text, str(block), "exec"), names)
    took[block.page] = took.get(block.page, 0.0) + time.process_time() - begin


def test_python_is_quick():
    """So that the pages stay in the quick tests: 25 s of a core in all, most of them imports."""
    print("\n".join(f"{seconds:6.2f} s  {page}" for page, seconds in sorted(took.items())))
    assert sum(took.values()) < 25


@pytest.mark.parametrize("command", COMMANDS, ids=ids(COMMANDS))
def test_command(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands.check(command)


@pytest.mark.parametrize("block", pages.all_blocks("toml", "yaml", "json"), ids=str)
def test_data_parses(block):
    if block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "json":
        json.loads(block.text)
    else:
        pytest.importorskip("yaml").safe_load(block.text)


@pytest.mark.parametrize("path", pages.pages(), ids=pages.name)
def test_what_the_text_names_exists(path):
    """Flags, targets of make, files and modules in inline code."""
    known = commands.our_flags() | FOREIGN_FLAGS
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    missing = []
    for code in pages.inline_code(path):
        words = code.split()
        if words[0].startswith(("--", "p3o", "torchrun", "python", "make")):
            missing += [
                word for word in words if FLAG.fullmatch(word.split("=")[0]) and word.split("=")[0] not in known
            ]
        if words[0] == "make" and len(words) > 1:
            missing += [] if words[1] in targets else [code]
        elif re.fullmatch(r"(p3o_kernels|p3o_train|tests|bench|docs|examples)/[\w./*-]+", words[0]):
            missing += [] if any(ROOT.glob(words[0].rstrip("/"))) else [code]
        elif re.fullmatch(r"p3o_(train|kernels)(\.\w+)+", words[0]):
            missing += [] if is_there(words[0]) else [code]
    assert missing == []


def is_there(dotted: str) -> bool:
    """A module, or a name in one; what needs an absent package is looked up in the text."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        file = ROOT.joinpath(*parts[:count])
        source = file.with_suffix(".py") if file.with_suffix(".py").is_file() else file / "__init__.py"
        if source.is_file():
            rest = parts[count:]
            return not rest or re.search(rf"\b{rest[0]}\b", source.read_text(encoding="utf-8")) is not None
    return False


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=pages.name)
def test_a_page_says_what_it_is_for(path):
    """One heading, then a sentence; and the index has a line for it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert re.match(r"# \S", lines[0]) and lines[1] == "" and re.match(r"[^#|`!<-]", lines[2])
    index = ROOT / "docs" / "README.md"
    if path != index:
        assert path.name in pages.links(index), "docs/README.md does not list it"


@pytest.mark.parametrize("page", ["docs/recipes.md", "docs/recipes_zh.md"])
def test_results_of_recipes_are_those_of_the_data(page):
    with (ROOT / "docs/data/recipes_tiny.csv").open(encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    lines = [head, ["---"] * len(head), *rows]
    assert "\n".join("| " + " | ".join(line) + " |" for line in lines) in (ROOT / page).read_text(encoding="utf-8")


def test_the_chinese_recipes_have_the_commands_of_the_english_ones():
    english, chinese = (
        [command.text for block in pages.blocks(ROOT / page) for command in commands.commands(block)]
        for page in ("docs/recipes.md", "docs/recipes_zh.md")
    )
    assert english == chinese


def test_findings_in_the_readme_are_those_of_the_study():
    """Word for word, and none of its failures left out."""
    study = (ROOT / "docs/study.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.findall(r"^- .* of 11 settings.*$", readme, re.MULTILINE)
    assert len(said) >= 5
    assert [line for line in said if line not in study.splitlines()] == []
    methods = re.findall(r"^- (.*) fails in ", study, re.MULTILINE)
    left_out = [name for name in methods if not any(line.startswith(f"- {name} fails in ") for line in said)]
    assert left_out == ["P3O, micro-batch scope"]  # run in three settings alone
