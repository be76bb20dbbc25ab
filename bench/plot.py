"""The figure of ``bench.run``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # writes files, needs no display

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, NullLocator

PANELS = {"micro_batch": "ESS of the micro-batch", "given_context": "ESS given"}
STYLES = {"feynrl_style": "s--", "eager": "o-", "compiled": "^-", "triton": "D-"}
_ENGINEERING = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(number: float, _position: int | None = None) -> str:
    """1500000 -> 1.5M."""
    for unit, letter in _ENGINEERING:
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


def draw(points: Sequence[Any], title: str, path: Path) -> None:
    """Throughput over T, a panel per scope and a line per provider."""
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(11, 4.8), sharey=True, layout="constrained")
    for axis, (scope, heading) in zip(axes, PANELS.items(), strict=True):
        for provider, style in STYLES.items():
            line = [
                (point.tokens, point.info["tokens_per_second"])
                for point in points
                if (point.scope, point.provider) == (scope, provider)
            ]
            if line:
                axis.plot(*zip(*line, strict=True), style, label=provider)
        axis.set(title=heading, xlabel="T (tokens)", xscale="log", yscale="log")
        ticks = sorted({point.tokens for point in points})
        axis.set_xticks(ticks, [f"{tick >> 20}M" if tick >> 20 else f"{tick >> 10}k" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(short))
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("tokens per second")
    axes[0].legend()
    figure.suptitle(f"Token loss, forward and backward\n{title}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
