"""The curves of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from p3o_train.sinks import read_jsonl

if TYPE_CHECKING:  # drawing is optional: matplotlib is imported by the functions that draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS = {
    "p3o": ("P3O", "tab:blue"),
    "grpo": ("GRPO", "tab:orange"),
    "cispo": ("CISPO", "tab:green"),
    "pg": ("policy gradient", "tab:red"),
}
"""Name in train/<name>/ -> label, and colour of what belongs to the method as a whole."""
DPI = 120
_FEW_POINTS = 60
_Rows = Sequence[Mapping[str, float]]


class _Curve(NamedTuple):
    label: str
    color: str | None = None
    """None: that of the method."""


@dataclass(frozen=True)
class _Panel:
    label: str
    """Of the y axis."""
    curves: Mapping[str, _Curve]
    """By the name of the number without "train/"; {} stands for the method."""
    bottom: float | None = None
    top: float | None = None
    stacked: bool = False


PANELS = (
    _Panel("mean reward", {"reward_mean": _Curve("reward")}),
    _Panel("normalized ESS", {"{}/normalized_ess": _Curve("ESS")}, bottom=0.0, top=1.02),
    _Panel("mean |log ratio| of a token", {"{}/log_ratio_abs_mean": _Curve("log ratio")}, bottom=0.0),
    _Panel(
        "loss per token",
        {
            "{}/score_loss": _Curve("score", "tab:purple"),
            "{}/total_loss": _Curve("total"),
            # last, and so on top: it is small and smooth
            "{}/adaptive_kl_loss": _Curve("adaptive KL", "tab:gray"),
        },
    ),
    _Panel("gradient norm", {"grad_norm": _Curve("gradient norm")}, bottom=0.0),
    _Panel(
        "seconds of a step",
        {
            "time/rollout_s": _Curve("rollout", "tab:gray"),
            "time/prepass_s": _Curve("pre-pass", "tab:purple"),
            "time/train_s": _Curve("training"),
        },
        bottom=0.0,
        stacked=True,
    ),
)


def draw_curves(jsonl_path: str | os.PathLike[str], png_path: str | os.PathLike[str]) -> None:
    """Draws reward, ESS, log-ratios, losses, gradient norm and times over the steps of a run, as far as it has them.

    The same file gives the same picture, whatever style is set. No window is opened.

    Args:
        jsonl_path: what a ``JsonlSink`` has written; null leaves a gap in a curve.
        png_path: the picture, which is replaced if it exists.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a file without any number that is drawn, or with a broken line.
    """
    rows = read_jsonl(jsonl_path)
    try:
        import matplotlib.style
    except ImportError as error:
        raise ImportError("draw_curves needs a package that is not here: pip install matplotlib") from error
    if not _panels_of(rows):
        names = sorted(f"train/{name}" for panel in PANELS for name in panel.curves)
        raise ValueError(
            f"{os.fspath(jsonl_path)}: {len(rows)} steps and none of the numbers that are drawn; expected some of "
            f"{', '.join(names)}, where {{}} is one of {', '.join(METHODS)}"
        )
    with matplotlib.style.context("default"):
        _figure(rows).savefig(png_path, format="png", dpi=DPI)


def _figure(rows: _Rows) -> Figure:
    """One panel for each of ``PANELS`` that has a number, at most three in a row."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = _panels_of(rows)
    method, color = METHODS[_method(rows)]
    columns = len(panels) if len(panels) < 4 else math.ceil(len(panels) / 2)
    lines = math.ceil(len(panels) / columns)
    steps = [int(row["step"]) for row in rows]
    margin = max(0.5, 0.03 * (max(steps) - min(steps)))
    # without pyplot: no window, and nothing to close
    figure = Figure(figsize=(13 / 3 * columns, 3.7 * lines + 0.4), layout="constrained")
    for place, (panel, curves) in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, place)
        (_stack if panel.stacked else _plot)(axes, rows, curves, color)
        axes.set(xlabel="step", ylabel=panel.label, xlim=(min(steps) - margin, max(steps) + margin))
        _limit(axes, panel)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        if panel.stacked or len(curves) > 1:
            # above the panel, where it hides nothing
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 0.99), ncols=len(curves), frameon=False)
        if "train/p3o/normalized_ess" in curves:
            axes.set_title("the cap on the ratio is the ESS", fontsize="medium")
    figure.suptitle(f"{method}, steps {min(steps)} to {max(steps)}")
    return figure


def _limit(axes: Axes, panel: _Panel) -> None:
    """From the panel's bottom to its top, or to a little above the data."""
    if panel.bottom is not None:
        axes.update_datalim([(axes.dataLim.x0, panel.bottom)])
        axes.autoscale_view(scalex=False)
        axes.set_ylim(bottom=panel.bottom, top=panel.top)


def _method(rows: _Rows) -> str:
    """The method whose numbers the run has; P3O if it has none."""
    return next((name for name in METHODS if any(f"train/{name}/" in key for row in rows for key in row)), "p3o")


def _panels_of(rows: _Rows) -> list[tuple[_Panel, dict[str, _Curve]]]:
    """Panels with at least one curve, and those of their curves that have a number, by full name."""
    present = {name for row in rows for name, value in row.items() if not math.isnan(value)}
    method, found = _method(rows), []
    for panel in PANELS:
        named = {f"train/{name.format(method)}": curve for name, curve in panel.curves.items()}
        curves = {name: curve for name, curve in named.items() if name in present}
        if curves:
            found.append((panel, curves))
    return found


def _plot(axes: Axes, rows: _Rows, curves: Mapping[str, _Curve], color: str) -> None:
    # a single point, or one between two gaps, has no line
    marker = "." if len(rows) <= _FEW_POINTS else None
    for name, curve in curves.items():
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), color=curve.color or color, marker=marker, label=curve.label)


def _stack(axes: Axes, rows: _Rows, curves: Mapping[str, _Curve], color: str) -> None:
    """Filled steps on top of each other; a time that a step did not report counts as none."""
    measured = [row for row in rows if any(name in row for name in curves)]
    steps = [row["step"] for row in measured]
    halves = [(after - before) / 2 for before, after in itertools.pairwise(steps)] or [0.5]
    inner = [(before + after) / 2 for before, after in itertools.pairwise(steps)]
    edges = [steps[0] - halves[0], *inner, steps[-1] + halves[-1]]
    bottom = [0.0] * len(steps)
    for name, curve in curves.items():
        top = [base + row.get(name, 0.0) for base, row in zip(bottom, measured, strict=True)]
        axes.stairs(top, edges, baseline=bottom, fill=True, alpha=0.7, color=curve.color or color, label=curve.label)
        bottom = top
