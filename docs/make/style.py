"""What drawn pictures share: a white background, colours that the colour-blind can tell apart, bytes that repeat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parents[1] / "images"

# Okabe and Ito
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY, LIGHT, INK = "#999999", "#E8E8E8", "#222222"

SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "p3o",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def save(figure: Figure, name: str) -> Path:
    """``docs/images/<name>``, without the date; the same bytes each time with the same matplotlib."""
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / name
    figure.savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)
    return path
