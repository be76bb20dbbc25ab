"""The picture of several runs shows the numbers of their files, and says what it does not show."""

import math
import os
import shlex
import struct
import sys
import warnings
from pathlib import Path

import pytest

from p3o_train import cli
from p3o_train.histogram import EDGES
from p3o_train.run_data import LAST_STEPS, read_runs
from tests.train.run_folders import STEPS, counts, numbers, write_run

pytest.importorskip("matplotlib")
from p3o_train.plots import (
    AGES,
    DPI,
    HISTOGRAM,
    LINES,
    MAX_RUNS,
    _figure,
    draw_comparison,
    notes,
    smoothed,
)

REWARD, ESS, CAP, KL, REFERENCE = (panel.title for panel in LINES)
DOCS = Path(__file__).resolve().parents[2] / "docs"
DRAWN = [REWARD, ESS, CAP, KL, HISTOGRAM, AGES]


@pytest.fixture
def p3o(tmp_path):
    return write_run(tmp_path / "one")


@pytest.fixture
def grpo(tmp_path):
    def without_ages(step, made):
        return {name: value for name, value in made.items() if "/ess_age_" not in name}

    return write_run(tmp_path / "two", "grpo", change=without_ages)


def panels(runs, smooth=1):
    return {axes.get_title(): axes for axes in _figure(runs, smooth).axes}


def lines(axes):
    """Those with a name: label -> (x, y)."""
    named = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    return {label: (list(line.get_xdata()), list(line.get_ydata())) for label, line in named.items()}


def column(name, method="p3o"):
    return [numbers(step, method)[name.format(method)] for step in range(1, STEPS + 1)]


def test_lines_are_the_numbers_in_the_files(p3o, grpo):
    drawn, steps = panels(read_runs([p3o, grpo])), list(range(1, STEPS + 1))
    assert list(drawn) == DRAWN
    for title, name in ((REWARD, "train/reward_mean"), (ESS, "train/{}/normalized_ess")):
        assert lines(drawn[title]) == {"one": (steps, column(name)), "two": (steps, column(name, "grpo"))}
    kl = "train/{}/behavior_kl_proxy"
    assert lines(drawn[KL]) == {"one": (steps, column(kl)), "two": (steps, column(kl, "grpo"))}
    assert lines(drawn[CAP]) == {"one": (steps, column("train/{}/cap_fraction"))}  # GRPO has none, though it says 0.5
    assert drawn[ESS].get_ylim() == (0, 1.02)


def test_the_histogram_is_the_share_of_tokens_per_nat_over_the_last_steps(p3o):
    (patch,) = panels(read_runs([p3o]))[HISTOGRAM].patches
    values, edges, _ = patch.get_data()
    assert list(edges) == list(EDGES)
    found = {edge: value for edge, value in zip(edges, values, strict=False) if not math.isnan(value)}
    last = range(STEPS - LAST_STEPS + 1, STEPS + 1)
    low, middle, high = (sum(counts(step)[edge] for step in last) for edge in counts(1))
    tokens = low + middle + high
    # widths of the bins that begin at these edges
    wanted = {-0.002: low / tokens / 0.001, -0.001: middle / tokens / 0.002, 0.5: high / tokens / 0.5}
    assert found == pytest.approx(wanted, rel=1e-12)


def test_ages_have_the_mean_of_the_last_steps(p3o):
    last = range(STEPS - LAST_STEPS + 1, STEPS + 1)
    means = []
    for age in (0, 1):
        values = [1 - step / 100 for step in last if step % 2 == age]
        means.append(sum(values) / len(values))
    ages, found = lines(panels(read_runs([p3o]))[AGES])["one"]
    assert ages == [0, 1] and found == pytest.approx(means, rel=1e-12)


def test_smoothing_is_a_trailing_mean_over_a_faint_line(p3o):
    axes = panels(read_runs([p3o]), smooth=4)[REWARD]
    raw = column("train/reward_mean")
    faint, line = axes.lines
    assert list(faint.get_ydata()) == raw and faint.get_alpha() < 0.5
    wanted = [sum(raw[max(0, at - 3) : at + 1]) / min(4, at + 1) for at in range(STEPS)]
    assert list(line.get_ydata()) == pytest.approx(wanted, rel=1e-12)
    assert axes.get_xlabel() == "step (mean of 4)"


def test_what_is_not_finite_does_not_smear():
    found = smoothed([math.nan, 1.0, math.nan, 3.0, math.nan, math.nan], 2)
    assert found == pytest.approx([math.nan, 1.0, 1.0, 3.0, 3.0, math.nan], nan_ok=True)


def test_what_is_left_out_is_said_in_the_picture(p3o, grpo, tmp_path):
    runs = read_runs([p3o, grpo])
    said = notes(runs)
    assert [text.split(":")[0] for text in said] == [CAP, f"No panel of {REFERENCE}", AGES]
    assert all("nothing of two (" in text for text in (said[0], said[2]))
    shown = _figure(runs, 1)._supxlabel.get_text().replace("\n", " ")
    assert all(text in shown for text in said)
    bare = write_run(tmp_path / "bare", histogram=False, without=["train/p3o"])
    assert list(panels(read_runs([bare]))) == [REWARD]
    assert sum(text.startswith("No panel of") for text in notes(read_runs([bare]))) == 6


def test_a_reference_policy_has_a_panel_and_tokens_beyond_the_ends_are_said(tmp_path):
    def change(step, made):
        return made | {"train/p3o/reference_kl": 0.1 * step, "train/ratio_histogram/10": 2.0}

    runs = read_runs([write_run(tmp_path / "one", change=change)])
    assert lines(panels(runs)[REFERENCE])["one"][1] == [0.1 * step for step in range(1, STEPS + 1)]
    tokens = sum(sum(counts(step).values()) + 2 for step in range(STEPS - LAST_STEPS + 1, STEPS + 1))
    assert notes(runs) == [f"{HISTOGRAM}: {2 * LAST_STEPS / tokens:.2%} of one are beyond 10."]


def test_runs_can_be_told_apart(tmp_path):
    directories = [write_run(tmp_path / f"{place:02}", steps=[1, 2]) for place in range(MAX_RUNS + 1)]
    drawn = panels(read_runs(directories[:-1]))[REWARD]
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn.lines}) == MAX_RUNS
    with pytest.raises(ValueError, match=f"at most {MAX_RUNS} runs can be told apart"):
        draw_comparison(read_runs(directories), tmp_path / "all.png")


@pytest.mark.parametrize(("name", "begin"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_the_same_files_give_the_same_picture_in_any_style(p3o, tmp_path, name, begin):
    from matplotlib import pyplot

    path, runs = tmp_path / name, read_runs([p3o])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_comparison(runs, path)
    content = path.read_bytes()
    assert content.startswith(begin) and len(content) > 8_000
    with pyplot.style.context("dark_background"):
        draw_comparison(runs, path)
    assert path.read_bytes() == content and pyplot.get_fignums() == []
    assert sorted(os.listdir(tmp_path)) == [name, "one"]
    if begin == b"\x89PNG":
        assert struct.unpack(">II", content[16:24])[0] == round(3 * 4.3 * DPI) and len(content) < 120_000


def text_boxes(figure):
    renderer = figure.canvas.get_renderer()
    texts = [figure._supxlabel, *figure.legends[0].get_texts()]
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]


@pytest.mark.parametrize("label", ["one", "$a_long_name_of_a_run_" + "x" * 20])
def test_no_text_covers_another(p3o, grpo, label):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _figure(read_runs([p3o, grpo], [label, "$other"]), 3)
    figure.set_dpi(DPI)
    FigureCanvasAgg(figure).draw()
    boxes = [box for box in text_boxes(figure) if box[1].width]
    width, height = figure.get_size_inches() * DPI
    for index, (text, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
        for other, other_box in boxes[index + 1 :]:
            assert not box.overlaps(other_box), (text, other)


def test_the_command_draws_and_says_what_is_missing(p3o, grpo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot", "one", "two", "--labels", "A,B", "--smooth", "5"]) == 0
    out = capsys.readouterr().out
    assert "nothing of B (only P3O has a cap)" in out and "The picture is plot.png" in out
    assert (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["one", "--output", "one/curves.png"], "is the picture that a run draws of itself; choose another name"),
        (["one", "--output", "plot.gif"], "--output must end in .png, .svg, .pdf; got plot.gif"),
        (["one", "--output", "missing/plot.png"], "must be a file in a directory that exists"),
        (["one", "--smooth", "0"], "--smooth must be 1 or more"),
        (["one", "--labels", "a,b"], "--labels must be 1 different names"),
        (["bare"], "none of the runs has a number that is drawn"),
    ],
)
def test_refusals_change_nothing(p3o, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run("bare", histogram=False, without=["train/"])
    (p3o / "curves.png").write_text("its own")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["plot", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before and (p3o / "curves.png").read_text() == "its own"


def test_a_picture_that_cannot_be_written_leaves_the_old_one(p3o, tmp_path, monkeypatch):
    path = tmp_path / "plot.png"
    path.write_text("old")

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        draw_comparison(read_runs([p3o]), path)
    assert path.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["one", "plot.png"]


def test_matplotlib_is_needed_to_draw_only(p3o, tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.style"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        draw_comparison(read_runs([p3o]), tmp_path / "plot.png")


def test_the_example_of_the_documentation_can_be_drawn_again():
    directories = sorted((DOCS / "data" / "report_runs").iterdir())
    assert list(panels(read_runs(directories), smooth=10)) == DRAWN
    assert sum(path.stat().st_size for directory in directories for path in directory.iterdir()) < 100_000
    assert (DOCS / "images" / "report_compare.png").stat().st_size < 120_000


def test_the_commands_of_the_documentation_are_understood():
    text = (DOCS / "reports.md").read_text(encoding="utf-8")
    commands = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("$ p3o ")]
    assert [cli.parse(command).command for command in commands] == ["plot", "plot", "report", "train", "train", "plot"]
