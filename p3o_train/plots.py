"""Several runs in one picture: ``p3o plot``."""

from __future__ import annotations

import argparse
import io
import itertools
import math
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from p3o_train.histogram import EDGES
from p3o_train.run_data import LAST_STEPS, Run, read_runs
from p3o_train.sinks import FILE_NAME, replace_file

if TYPE_CHECKING:  # drawing is optional: matplotlib is imported by the functions that draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
DPI = 110
# Okabe and Ito's without yellow, which is faint on white; a second seven are dashed, a third dotted
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":")
MAX_RUNS = len(_COLORS) * len(_DASHES)
_OWN_CURVES = "curves.png"
_METADATA = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


class _Lines(NamedTuple):
    """A panel of one number over the steps."""

    title: str
    number: str
    """Its name; {} stands for the method."""
    needs: str
    """Which runs have it."""
    top: float | None = None
    """Of the y axis, which then begins at 0."""


LINES = (
    _Lines("mean reward", "train/reward_mean", "every run records it"),
    _Lines("normalized ESS (P3O: the cap on the ratio)", "train/{}/normalized_ess", "every run records it", 1.02),
    _Lines("share of tokens at the cap", "train/p3o/cap_fraction", "only P3O has a cap", 1.02),
    _Lines("KL to the policy that sampled", "train/{}/behavior_kl_proxy", "every run records it"),
    _Lines("KL to the reference policy", "train/{}/reference_kl", "--kl-loss-coef is 0"),
)
HISTOGRAM = "log-ratios of tokens"
AGES = "ESS of the tokens of each policy age"
_NEEDS = {
    HISTOGRAM: "P3O's micro-batch scope and older versions do not record it",
    AGES: "only P3O's step scope records it",
}


def draw_comparison(runs: Sequence[Run], path: str | os.PathLike[str], smooth: int = 1) -> list[str]:
    """Draws the runs into one picture; returns what it does not show, in words, as the picture says it itself.

    The same files give the same picture, whatever style is set. No window is opened.

    Args:
        path: .png, .svg or .pdf in a directory that exists; a file of this name is replaced.
        smooth: a line is the mean over so many steps, up to the one that it is drawn at.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: another kind of file, or the curves.png of a run; too many runs, or nothing to draw.
        OSError: the file cannot be written; nothing has changed then.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise ValueError(f"--output must end in .{', .'.join(FORMATS)}; got {path}")
    check_output(path)
    content = render(runs, kind, smooth)
    replace_file(path, content)
    return notes(runs)


def check_output(path: Path) -> None:
    """Refuses what cannot be a new file or replaced.

    Raises:
        ValueError: the curves.png of a run, a directory, or a file in a directory that is not there.
    """
    if path.name == _OWN_CURVES and (path.parent / FILE_NAME).exists():
        raise ValueError(f"--output {path} is the picture that a run draws of itself; choose another name")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--output {path} must be a file in a directory that exists; make it, or choose another")


def render(runs: Sequence[Run], kind: str, smooth: int = 1) -> bytes:
    """The picture as the content of a file of this kind.

    Raises:
        ImportError, ValueError: those of ``draw_comparison``.
    """
    try:
        import matplotlib
        import matplotlib.style
    except ImportError as error:
        raise ImportError("p3o plot needs a package that is not here: pip install matplotlib") from error
    if smooth < 1:
        raise ValueError(f"--smooth must be 1 or more, a number of steps; got {smooth}")
    if len(runs) > MAX_RUNS:
        raise ValueError(f"at most {MAX_RUNS} runs can be told apart in one picture, got {len(runs)}; draw fewer")
    with matplotlib.style.context("default"), matplotlib.rc_context({"svg.hashsalt": "p3o"}):
        buffer = io.BytesIO()
        _figure(runs, smooth).savefig(buffer, format=kind, dpi=DPI, metadata=_METADATA[kind])
    return _fewer_colors(buffer) if kind == "png" else buffer.getvalue()


def _fewer_colors(png: io.BytesIO) -> bytes:
    """The picture with a palette, which is a third of the size: lines and letters need few shades."""
    from PIL import Image  # of which matplotlib depends

    smaller = io.BytesIO()
    Image.open(png).convert("RGB").quantize(128).save(smaller, format="png", optimize=True)
    return smaller.getvalue()


def notes(runs: Sequence[Run]) -> list[str]:
    """Panels that no run has, runs that a panel has nothing of, and tokens beyond the ends of the histogram."""
    found = []
    needs = {panel.title: panel.needs for panel in LINES} | _NEEDS
    for title, why in needs.items():
        shown = _having(runs, title)
        if not shown:
            found.append(f"No panel of {title}: {why}.")
        elif len(shown) < len(runs):
            missing = ", ".join(run.label for run in runs if run not in shown)
            found.append(f"{title}: nothing of {missing} ({why}).")
    for run in _having(runs, HISTOGRAM):
        counts = last_counts(run)
        if beyond := counts[0] + counts[-1]:
            found.append(f"{HISTOGRAM}: {beyond / sum(counts):.2%} of {run.label} are beyond {EDGES[-1]:g}.")
    return found


def last_counts(run: Run) -> list[float]:
    """[NUM_BINS]: tokens by log-ratio over the last ``LAST_STEPS`` steps that recorded them; [] without any."""
    return [sum(column) for column in zip(*run.histograms[-LAST_STEPS:], strict=True)]


def age_ess(run: Run) -> tuple[list[int], list[float]]:
    """Ages in rollouts, youngest first, and the mean e of their tokens over the last ``LAST_STEPS`` steps."""
    prefix = f"train/{run.method}/ess_age_"
    names = {name for row in run.rows[-LAST_STEPS:] for name in row if name.startswith(prefix)}
    means = {int(name.removeprefix(prefix)): run.last_mean(name) for name in names}
    ages = sorted(age for age, mean in means.items() if not math.isnan(mean))
    return ages, [means[age] for age in ages]


def smoothed(values: Sequence[float], steps: int) -> list[float]:
    """The mean of each value and those before it, ``steps`` in all; NaN does not count, and stays where none does."""
    made = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - steps) : end] if not math.isnan(value)]
        made.append(sum(window) / len(window) if window else math.nan)
    return made


def _having(runs: Sequence[Run], title: str) -> list[Run]:
    """Those with numbers for this panel."""
    if title == HISTOGRAM:
        return [run for run in runs if run.histograms]
    if title == AGES:
        return [run for run in runs if age_ess(run)[0]]
    (number,) = (panel.number for panel in LINES if panel.title == title)
    found = [run for run in runs if run.curve(number)[0]]
    # it is recorded as 0 where there is no reference policy
    return [run for run in found if number != "train/{}/reference_kl" or any(run.curve(number)[1])]


def _figure(runs: Sequence[Run], smooth: int) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    titles = [title for title in (*(panel.title for panel in LINES), HISTOGRAM, AGES) if _having(runs, title)]
    if not titles:
        raise ValueError(
            f"none of the runs has a number that is drawn; expected {LINES[0].number} or others in the {FILE_NAME} of "
            f"{', '.join(str(run.directory) for run in runs)}"
        )
    columns = min(3, len(titles)) if len(titles) < 7 else 4
    lines = math.ceil(len(titles) / columns)
    said = notes(runs)
    # without pyplot: no window, and nothing to close
    figure = Figure(figsize=(4.3 * columns, 3.3 * lines + 0.4 + 0.18 * len(said)), layout="constrained")
    styles = {run.label: _style(place) for place, run in enumerate(runs)}
    for place, title in enumerate(titles, 1):
        axes = figure.add_subplot(lines, columns, place)
        axes.set_title(title, fontsize="medium")
        _fill(axes, title, _having(runs, title), styles, smooth)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    handles = [Line2D([], [], label=_plain(label), color=color, ls=dash) for label, (color, dash) in styles.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(runs)), frameon=False)
    if said:
        width = 34 * columns
        wrapped = "\n".join(textwrap.fill(_plain(note), width) for note in said)
        figure.supxlabel(wrapped, fontsize=8, x=0.01, ha="left", color="0.25")
    return figure


def _plain(text: str) -> str:
    """A dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def _style(place: int) -> tuple[str, str]:
    dashes, color = divmod(place, len(_COLORS))
    return _COLORS[color], _DASHES[dashes]


def _fill(axes: Axes, title: str, runs: Sequence[Run], styles: dict[str, tuple[str, str]], smooth: int) -> None:
    for run in runs:
        color, dash = styles[run.label]
        if title == HISTOGRAM:
            axes.stairs(_density(last_counts(run)), EDGES, color=color, ls=dash, lw=1.5, label=run.label)
        elif title == AGES:
            axes.plot(*age_ess(run), color=color, ls=dash, marker="o", label=run.label)
        else:
            (panel,) = (panel for panel in LINES if panel.title == title)
            steps, values = run.curve(panel.number)
            if smooth > 1:
                axes.plot(steps, values, color=color, ls=dash, lw=0.8, alpha=0.3)
            marker = "." if len(steps) == 1 else None  # which has no line
            axes.plot(steps, smoothed(values, smooth), color=color, ls=dash, marker=marker, label=run.label)
    if title == HISTOGRAM:
        _log_axes(axes, runs)
    elif title == AGES:
        _integer_axis(axes, f"age in rollouts (mean of the last {LAST_STEPS} steps)")
        axes.set_ylim(0.0, 1.02)
    else:
        _integer_axis(axes, "step" if smooth == 1 else f"step (mean of {smooth})")
        if panel.top is not None:
            axes.set_ylim(0.0, panel.top)


def _density(counts: Sequence[float]) -> list[float]:
    """Of the bins with two ends: the share of all tokens for each nat; NaN, which leaves a gap, for 0."""
    total = sum(counts)
    widths = [upper - lower for lower, upper in itertools.pairwise(EDGES)]
    return [count / total / width if count else math.nan for count, width in zip(counts[1:-1], widths, strict=True)]


def _log_axes(axes: Axes, runs: Sequence[Run]) -> None:
    """Logarithmic on both sides of 0, as far as there are tokens."""
    used = [edge for run in runs for k, count in enumerate(last_counts(run)) if count for edge in _ends(k)]
    far = max(map(abs, used))
    axes.set_xscale("symlog", linthresh=EDGES[len(EDGES) // 2], linscale=0.5)
    ticks = [10.0**power for power in (-2, -1, 0, 1)]
    axes.set_xticks([*(-tick for tick in reversed(ticks)), 0.0, *ticks], minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set(yscale="log", xlim=(-far, far), xlabel=f"log-ratio in nats (last {LAST_STEPS} steps)")
    axes.set_ylabel("share of tokens per nat")


def _ends(place: int) -> tuple[float, ...]:
    return EDGES[max(place - 1, 0) : place + 1]


def _integer_axis(axes: Axes, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set_xlabel(label)


def add_run_arguments(parser: argparse.ArgumentParser, output: str, what: str) -> None:
    """What ``p3o plot`` and ``p3o report`` share."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help=f"run directory with {FILE_NAME}; it may still go on")
    parser.add_argument("--output", default=output, help=f"{what}, which is replaced if it exists")
    parser.add_argument("--labels", default=None, help="names of the runs, separated by commas; else directory names")
    parser.add_argument("--smooth", type=int, default=1, help="steps that a line is the mean over, up to its own")


def add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``p3o plot``."""
    add_run_arguments(parser, "plot.png", "picture, .png, .svg or .pdf")


def run_plot(args: argparse.Namespace) -> int:
    """Draws, and prints what is missing. 2: refused, with the reason on stderr."""
    try:
        said = draw_comparison(runs_of(args), args.output, args.smooth)
    except (ValueError, OSError, ImportError) as error:
        print(f"p3o plot: {error}", file=sys.stderr)
        return 2
    print("\n".join([*said, f"The picture is {args.output}."]))
    return 0


def runs_of(args: argparse.Namespace) -> list[Run]:
    """The runs that the flags name.

    Raises:
        ValueError: those of ``read_runs``.
    """
    return read_runs(args.runs, None if args.labels is None else args.labels.split(","))
