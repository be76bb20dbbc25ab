"""A packed micro-batch cut over two ranks, and the passes of a step: what ``pack`` returns, drawn as boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from docs.make.style import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, PURPLE, RED, SETTINGS, SKY
from p3o_train.packing import pack
from p3o_train.types import ContextLayout, PackedBatch, Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEQUENCES = (("a", 11, 7), ("b", 5, 2))
"""Name, tokens, response tokens."""
RANKS = 2
_PAD = -1


def batches() -> list[PackedBatch]:
    """The two sequences as each context-parallel rank holds them; token ids count a0 = 0, ..., b0 = 100, ..."""
    samples = []
    for place, (name, length, response) in enumerate(SEQUENCES):
        ids = torch.arange(length) + 100 * place
        mask = torch.ones(response, dtype=torch.bool)
        samples.append(Sample(name, ids, response, torch.full((response,), -1.0), mask))
    layouts = [ContextLayout(cp_size=RANKS, cp_rank=rank) for rank in range(RANKS)]
    return [pack(samples, [0.0] * len(samples), layout, pad_token_id=_PAD) for layout in layouts]


def token_name(token_id: int) -> str:
    """a0, b3, or a dot for padding."""
    return "\u00b7" if token_id == _PAD else f"{SEQUENCES[token_id // 100][0]}{token_id % 100}"


def draw_zigzag() -> Figure:
    """Whole sequences in chunks above, the rows that each rank holds below."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(10.0, 4.8))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set(xlim=(-3.4, 20.6), ylim=(-9.8, 2.2))
        axes.axis("off")
        made = batches()
        _whole(axes, made)
        for rank, batch in enumerate(made):
            _rank(axes, batch, -3.6 - 3.9 * rank)
        return figure


def _whole(axes: Any, made: Sequence[PackedBatch]) -> None:
    colors = (SKY, ORANGE)
    offsets = made[0].cu_seqlens.tolist()
    for begin, end, (name, length, _) in zip(offsets, offsets[1:], SEQUENCES, strict=False):
        chunk = (end - begin) // (2 * RANKS)
        for index in range(2 * RANKS):
            owner = min(index, 2 * RANKS - 1 - index)
            first = begin + index * chunk
            _text(axes, first + chunk / 2, 0.62, f"chunk {index}", 8)
            for place in range(first, first + chunk):
                text = f"{name}{place - begin}" if place - begin < length else "\u00b7"
                _box(axes, place, -0.4, text, colors[owner])
    for offset in offsets:
        axes.plot([offset, offset], [-0.75, 0.95], color=INK, linewidth=1.4)
        _text(axes, offset, -1.05, str(offset), 8)
    _text(axes, -0.4, 0.0, "whole, padded", 9, align="right")
    _text(axes, -0.4, -1.05, "cu_seqlens", 9, align="right")
    _text(axes, 0.0, 1.6, "rank 0 holds the blue chunks (0 and 3), rank 1 the orange ones (1 and 2)", 10, align="left")


def _rank(axes: Any, batch: PackedBatch, top: float) -> None:
    tokens, labels, mask = (values.tolist() for values in (batch.tokens, batch.labels, batch.mask))
    color = (SKY, ORANGE)[batch.layout.cp_rank]
    heading = f"rank {batch.layout.cp_rank}: {len(tokens)} rows, num_tokens {batch.num_tokens}"
    _text(axes, 0.0, top + 1.25, heading, 10, align="left")
    for row, name in enumerate(("tokens", "labels", "mask")):
        _text(axes, -0.4, top + 0.4 - row, name, 9, align="right")
    for place, (token, label, valid) in enumerate(zip(tokens, labels, mask, strict=True)):
        _box(axes, place, top, token_name(token), color)
        _box(axes, place, top - 1, token_name(label), LIGHT)
        _box(axes, place, top - 2, "yes" if valid else "", GREEN if valid else "white", "white")
    for offset in batch.local_cu_seqlens.tolist():
        axes.plot([offset, offset], [top - 2.1, top + 0.95], color=INK, linewidth=1.4)
    local = ", ".join(map(str, batch.local_cu_seqlens.tolist()))
    _text(axes, len(tokens) + 0.5, top + 0.4, f"local_cu_seqlens [{local}]", 9, align="left")


def _box(axes: Any, x: float, y: float, text: str, color: str, ink: str = INK, width: float = 1.0) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x + 0.03, y), width - 0.06, 0.8, facecolor=color, edgecolor=GREY, linewidth=0.6))
    _text(axes, x + width / 2, y + 0.4, text, 8, color=ink)


def _text(axes: Any, x: float, y: float, text: str, size: float, align: str = "center", color: str = INK) -> None:
    axes.text(x, y, text, fontsize=size, ha=align, va="center", color=color)


def draw_passes() -> Figure:
    """Two stages and two micro-batches, from left to right."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(10.0, 4.1))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set(xlim=(-2.6, 24.2), ylim=(-3.7, 4.5))
        axes.axis("off")
        for y, name in ((1.6, "first stage"), (0.0, "last stage")):
            _text(axes, -0.2, y + 0.4, name, 9, align="right")
        _forward_only(axes)
        _frozen(axes)
        _training(axes)
        _end(axes)
        return figure


def _bracket(axes: Any, first: float, last: float, text: str, y: float = 3.2) -> None:
    axes.plot([first, first, last, last], [y - 0.15, y, y, y - 0.15], color=INK, linewidth=1)
    _text(axes, (first + last) / 2, y + 0.55, text, 9)


def _forward_only(axes: Any) -> None:
    _bracket(axes, 0, 4.4, "1. pre-pass: forward only,\nno gradients")
    for index in range(2):
        _box(axes, 1.4 * index, 1.6, f"F{index}", SKY, width=1.4)
        _box(axes, 1.4 * (index + 1), 0.0, f"F{index}", SKY, width=1.4)
    _text(axes, 2.1, -0.75, "per row: all_gather, TP\nper micro-batch: S1, S2, N\nadded on the device", 8)


def _frozen(axes: Any) -> None:
    _bracket(axes, 4.9, 8.3, "e is frozen")
    _box(axes, 4.9, 0.0, "all_gather", PURPLE, width=1.9)
    _box(axes, 6.9, 0.0, "e", RED, "white", 1.3)
    _box(axes, 6.9, 1.6, "e", RED, "white", 1.3)
    axes.annotate("", (7.55, 1.6), (7.55, 0.8), arrowprops={"arrowstyle": "->", "color": INK})
    _text(axes, 6.6, -0.9, "[S1, S2, N, invalid]\nover DP x CP, last stage;\nbroadcast over PP;\nread on the host", 8)


def _training(axes: Any) -> None:
    _bracket(axes, 8.9, 17.3, "2. training pass: the same micro-batches,\nthe loss with the frozen e")
    order = {0.0: (("F0", 10.3), ("B0", 11.7), ("F1", 13.1), ("B1", 14.5)),
             1.6: (("F0", 8.9), ("F1", 10.3), ("B0", 13.1), ("B1", 15.9))}  # fmt: skip
    for y, places in order.items():
        for name, x in places:
            forward = name.startswith("F")
            _box(axes, x, y, name, SKY if forward else BLUE, INK if forward else "white", 1.4)
    first = "per row: all_gather, TP\nloss: a token sum, an exact count, metric sums;"
    second = "no collective over DP x CP (micro-batch scope:\none for each micro-batch, here)"
    _text(axes, 13.1, -0.9, f"{first}\n{second}", 8)


def _end(axes: Any) -> None:
    _bracket(axes, 17.9, 23.9, "3. the end of the step")
    for y in (0.0, 1.6):
        _box(axes, 17.9, y, "check", PURPLE, width=1.6)
        _box(axes, 19.6, y, "finalize", GREEN, "white", 2.0)
        _box(axes, 21.7, y, "optimizer", GREY, width=2.2)
    check = "check: tokens and invalid tokens,\nDP x CP, then broadcast over PP;\nreplay check of the tokens"
    last = "finalize: Megatron sums gradients\nover DP x CP and divides once\nby the token count"
    _text(axes, 20.9, -1.35, f"{check}\n{last}", 8)
    legend = "F forward, B backward, 0 and 1 micro-batches. Layers exchange as always: TP inside a layer, "
    _text(axes, -2.4, -3.3, legend + "CP in attention, PP between stages.", 8, align="left")
