"""One picture for each setting of a study: reward, e, limited tokens and KL over the optimizer steps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from p3o_train.study.design import METHODS
from p3o_train.study.results import CurvePoint

if TYPE_CHECKING:  # imported where it draws
    from matplotlib.axes import Axes

DPI, COLOURS = 90, 256
# colours of Okabe and Ito, which the colour-blind tell apart, and a line style for each group of methods
STYLES = {
    "p3o": ("#0072B2", "-"),
    "p3o_importance": ("#56B4E9", (0, (5, 1))),
    "p3o_kl_off": ("#009E73", (0, (1, 1))),
    "grpo_0p2": ("#E69F00", "-"),
    "grpo_0p4": ("#D55E00", (0, (5, 1))),
    "grpo_0p6": ("#B07D00", (0, (1, 1))),
    "cispo": ("#CC79A7", "-."),
    "pg": ("#000000", "--"),
    "p3o_micro_batch": ("#7F7F7F", "-"),
}
_PANELS = (
    ("reward", "mean reward of rollouts", (-0.02, 1.02)),
    ("ess", "normalized ESS e", (-0.02, 1.02)),
    ("limited", "tokens that cap or clip changes", (-0.02, 1.02)),
    ("kl", "KL to the behavior policy (nats)", None),
)


def draw_setting(path: Path, title: str, points: Sequence[CurvePoint]) -> None:
    """Lines are means over the seeds, bands one standard deviation to each side; a PNG file, replaced if it exists.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
        from PIL import Image  # of matplotlib's own dependencies
    except ImportError as error:
        raise ImportError("the pictures need a package that is not here: pip install matplotlib") from error
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(11, 7), layout="constrained", facecolor="white")
        for place, (name, label, limits) in enumerate(_PANELS, 1):
            axes = figure.add_subplot(2, 2, place)
            _lines(axes, points, name)
            axes.set(xlabel="optimizer step", ylabel=label)
            if limits:
                axes.set_ylim(*limits)
            else:
                axes.set_yscale("symlog", linthresh=1e-3)
                axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        figure.suptitle(title)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=DPI)
    # few colours: a third of the bytes
    Image.open(drawn).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, format="PNG", optimize=True
    )


def _lines(axes: Axes, points: Sequence[CurvePoint], name: str) -> None:
    for method, (color, style) in STYLES.items():
        mine = [point for point in points if point.method == method]
        if not mine:
            continue
        steps = [point.step for point in mine]
        values = [getattr(point, name) for point in mine]
        spreads = [getattr(point, f"{name}_spread") for point in mine]
        low = [max(0.0, value - spread) for value, spread in zip(values, spreads, strict=True)]
        high = [value + spread for value, spread in zip(values, spreads, strict=True)]
        axes.fill_between(steps, low, high, color=color, alpha=0.07, linewidth=0)
        axes.plot(steps, values, color=color, linestyle=style, linewidth=1.6, label=METHODS[method].label)
