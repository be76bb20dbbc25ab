"""The page of several runs: complete in itself, with the numbers of the files, and nothing of them is markup."""

import base64
import html.parser
import os
import sys

import pytest

from p3o_train import cli
from p3o_train.run_data import LAST_STEPS, read_runs
from tests.train.run_folders import STEPS, write_run

pytest.importorskip("matplotlib")
from p3o_train.plots import notes, render
from p3o_train.report import LOOKED_FOR, differing, final_numbers, page, write_report

EVIL = "<script>alert(1)</script>"
VOID = {"meta", "img", "link", "br", "hr", "input"}


class Parsed(html.parser.HTMLParser):
    """Tags that are open are closed in order; what is in cells and list entries, by section."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.rows, self.entries = [], set(), [], {}, {}
        self.section = self.cell = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        elif tag in ("td", "th"):
            self.rows[self.section][-1].append("")
        elif tag == "li":
            self.entries.setdefault(self.section, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else None
        if inside == "h2":
            self.section = data
        elif inside in ("td", "th"):
            self.rows[self.section][-1][-1] += data
        elif inside == "li":
            self.entries[self.section][-1] += data

    def table(self, section):
        return self.rows.get(section, [])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    failing = {"train/reward_failures": 1.0}
    versions = {"torch": "2.13", "sglang": None}
    write_run(folder / "one", lr=0.5, seed=0, hf_checkpoint="", run_dir="a", versions=versions)
    write_run(
        folder / "two",
        "grpo",
        change=lambda step, made: made | (failing if step == 9 else {}),
        lr=0.25,
        seed=0,
        task=EVIL,
        run_dir="b",
        versions={"torch": "2.12"},
    )
    write_run(folder / "three", without=["train/p3o"], histogram=False)
    return read_runs([folder / name for name in ("one", "two", "three")])


@pytest.fixture(scope="module")
def text(runs):
    return page(runs)


def test_the_page_needs_nothing_else(text):
    parsed = Parsed(text)
    assert "http:" not in text and "https:" not in text and "//" not in text.replace(picture(parsed), "")
    assert not parsed.tags & {"script", "link", "iframe", "object", "embed"}
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("href", "srcset")]
    (source,) = [value for name, value in parsed.attributes if name == "src"]
    assert source.startswith("data:image/png;base64,")
    assert "@import" not in text and "url(" not in text and text.startswith("<!DOCTYPE html>")


def picture(parsed):
    (source,) = [value for name, value in parsed.attributes if name == "src"]
    return source.partition(",")[2]


def test_the_picture_is_that_of_p3o_plot_and_its_notes_are_there(text, runs):
    parsed = Parsed(text)
    assert base64.b64decode(picture(parsed)) == render(runs, "png")
    assert parsed.entries["Curves"] == notes(runs)
    assert dict(parsed.attributes)["alt"].startswith("Curves over the steps of one, two, three")


def test_runs_and_final_numbers(text, runs):
    parsed = Parsed(text)
    assert [row[:1] + row[2:] for row in parsed.table("Runs")[1:]] == [
        ["one", "P3O", "30", "30"],
        ["two", "GRPO", "30", "30"],
        ["three", "unknown", "30", "30"],
    ]
    rows = {row[0]: row[1:] for row in parsed.table("Final numbers")}
    last = range(STEPS - LAST_STEPS + 1, STEPS + 1)
    mean = sum(last) / len(last)
    assert rows["number"] == ["one", "two", "three"]
    assert rows["mean reward"] == [f"{mean / 100:.4g}"] * 3
    assert rows["normalized ESS"] == [f"{1 - mean / 100:.4g}"] * 2 + ["-"]
    assert rows["share of tokens at P3O's cap"] == [f"{0.5 + mean / 100:.4g}", "-", "-"]
    assert "evaluation reward" not in rows and "gradient norm" not in rows
    assert [row[0] for row in final_numbers(runs)] == list(rows)[1:]


def test_settings_that_differ_and_versions(text):
    parsed = Parsed(text)
    assert parsed.table("Settings that differ") == [
        ["setting", "one", "two", "three"],
        ["hf_checkpoint", '""', "-", "-"],
        ["lr", "0.5", "0.25", "-"],
        ["task", "-", EVIL, "-"],
    ]
    assert parsed.table("Versions") == [["package", "one", "two", "three"], ["torch", "2.13", "2.12", "-"]]
    every = parsed.table("All settings")
    assert ["seed", "0"] in every and ["task", EVIL] in every and "has no config.json" in text


def test_one_run_has_nothing_to_compare(runs):
    assert differing(runs[:1]) == [] and differing(runs[2:]) == []
    alone = page(runs[:1])
    assert "There is one run, so there is nothing to compare." in alone
    assert Parsed(alone).table("Settings that differ") == []


def test_warnings_stand_by_their_run(text):
    entries = Parsed(text).entries["Warnings"]
    nothing = "nothing that is looked for"
    assert entries == [nothing, "1 rewards failed at 1 steps, first at step 9", nothing]
    assert all(word in LOOKED_FOR for word in ("below 0.5", "above 0.1", "0.1% of tokens"))


def test_nothing_from_files_is_markup(tmp_path):
    """The directory, a label, the name of a number, a setting and a version."""
    directory = write_run(
        tmp_path / "<script>",
        change=lambda step, made: made | {EVIL: float("nan")},
        versions={EVIL: EVIL},
        **{EVIL: [EVIL]},
    )
    text = page(read_runs([directory]))
    assert "<script" not in text and "&lt;script&gt;" in text
    assert Parsed(text).table("Versions")[1] == [EVIL, EVIL]
    assert Parsed(text).entries["Warnings"][0].startswith(EVIL)


def test_the_page_can_be_read_in_both_schemes(text):
    style = text.partition("<style>")[2].partition("</style>")[0]
    light, dark = style.split("@media (prefers-color-scheme: dark)")

    def brightness(part, name):
        color = part.partition(f"--{name}: #")[2][:6]
        return sum(int(color[place : place + 2], 16) for place in (0, 2, 4)) / 765

    for part in (light, dark):
        for behind in ("page", "note"):
            # about 4.5 to 1 of luminance, which text of this size needs
            assert abs(brightness(part, "text") - brightness(part, behind)) > 0.6
    assert brightness(light, "page") > 0.9 and brightness(dark, "page") < 0.2


def test_the_command_writes_the_page_and_prints_warnings(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *(str(run.directory) for run in runs[:2]), "--output", "r.html"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "two: 1 rewards failed at 1 steps, first at step 9",
        "The page is r.html.",
    ]
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == page(read_runs([run.directory for run in runs[:2]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["--output", "report.pdf"], "--output must end in .html; got report.pdf"),
        (["--output", "missing/r.html"], "must be a file in a directory that exists"),
        (["--smooth", "-1"], "--smooth must be 1 or more"),
    ],
)
def test_refusals_leave_no_file(runs, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(runs[0].directory), *arguments]) == 2
    assert message in capsys.readouterr().err and os.listdir(tmp_path) == []


def test_without_matplotlib_the_remedy_is_named(runs, tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.style"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        write_report(runs, tmp_path / "r.html")
    assert os.listdir(tmp_path) == []
