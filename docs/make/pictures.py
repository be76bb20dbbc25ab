"""Draws the pictures of the concept pages: ``python -m docs.make.pictures``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from docs.make.ess_picture import draw as draw_ess
from docs.make.packing_pictures import draw_passes, draw_zigzag
from docs.make.style import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES: dict[str, Callable[[], Figure]] = {
    "concept_ess.svg": draw_ess,
    "concept_zigzag.svg": draw_zigzag,
    "concept_passes.svg": draw_passes,
}


def main() -> None:
    for name, draw in PICTURES.items():
        print(save(draw(), name))


if __name__ == "__main__":
    main()
