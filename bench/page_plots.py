"""Pictures of the performance page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # writes files, needs no display

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, NullLocator

from bench import cpu_times, scaling
from bench.page_tables import VOCABULARY_NAMES, Row, distinct, in_order, pick, plural, seconds_of
from bench.step_phases import PHASES
from bench.vocabulary_workload import GEMMS, MIB
from bench.workload import BASELINE

# Okabe and Ito's palette, which readers with any colour vision tell apart
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
PHASE_COLOURS = dict(zip(PHASES, (YELLOW, PURPLE, ORANGE, BLUE, SKY, GREEN, RED), strict=True))
TOKEN_LINES = {
    "compiled": ('p3o_loss, "compiled"', BLUE, "o-"),
    "eager": ('p3o_loss, "eager"', RED, "s-"),
    cpu_times.PLAIN_COMPILED: ("shortest eager loss, torch.compile", GREEN, "^--"),
    cpu_times.PLAIN: ("shortest eager loss", ORANGE, "v--"),
}
SOURCE_LINES = {"prepass": (BLUE, "o-"), "micro-batch": (RED, "s--"), "reuse": (GREEN, "^-.")}


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=100, facecolor="white")
    pyplot.close(figure)


def token_loss(rows: Sequence[Row], path: Path) -> None:
    """How many times faster than the published loss, over T."""
    found = pick(rows, table="token")
    threads = distinct(found, "threads")
    figure, axes = pyplot.subplots(1, len(threads), figsize=(9, 3.8), sharey=True, squeeze=False, layout="constrained")
    for axis, count in zip(axes[0], threads, strict=True):
        here = pick(found, threads=count)
        for provider, (label, colour, style) in TOKEN_LINES.items():
            line = [
                (row["tokens"], seconds_of(here, BASELINE, tokens=row["tokens"]) / row["seconds"])
                for row in pick(here, provider=provider)
            ]
            if line:
                axis.plot(*zip(*line, strict=True), style, color=colour, label=label)
        sizes = distinct(here, "tokens")
        axis.axhline(1.0, color=BLACK, linewidth=1)
        axis.set(title=plural(count, "thread"), xlabel="T (tokens)", xscale="log", yscale="log")
        axis.set_xticks(sizes, [f"{size >> 20}M" if size >> 20 else f"{size >> 10}k" for size in sizes])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}x" if value in (0.5, 2, 5) else ""))
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].set_ylabel("times faster than the published loss")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    _save(figure, path)


def from_hidden(rows: Sequence[Row], path: Path) -> None:
    """Time over the bare GEMMs, and memory, at the largest T with one thread."""
    found = pick(rows, table="from_hidden", threads=distinct(rows, "threads")[0])
    found = pick(found, tokens=max(distinct(found, "tokens")))
    gemms = seconds_of(found, GEMMS)
    shown = [row for row in in_order(found) if row["provider"] != GEMMS][::-1]
    names = [
        VOCABULARY_NAMES[row["provider"], row["scope"]].format(call="p3o_loss_from_hidden").replace("`", "")
        for row in shown
    ]
    colours = [BLUE if row["provider"] == "p3o" else ORANGE for row in shown]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 0.8 + 0.42 * len(shown)), sharey=True, layout="constrained")
    values = ([row["seconds"] / gemms for row in shown], [row["peak_bytes"] / MIB for row in shown])
    for axis, numbers, form in zip(axes, values, ("{:.2f}x", "{:,.0f}"), strict=True):
        bars = axis.barh(names, numbers, color=colours)
        axis.bar_label(bars, [form.format(number) for number in numbers], padding=3, fontsize=9)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].axvline(1.0, color=BLACK, linewidth=1)
    axes[0].set_xlabel("time over the three bare GEMMs")
    axes[1].set_xlabel("peak extra memory, MiB")
    _save(figure, path)


def step(rows: Sequence[Row], path: Path) -> None:
    """One bar for each candidate, cut into phases."""
    names = [row["candidate"] for row in rows][::-1]
    figure, axis = pyplot.subplots(figsize=(9, 3.4), layout="constrained")
    left = [0.0] * len(names)
    for phase in PHASES:
        width = [1e3 * row["seconds"][phase] for row in rows][::-1]
        hatch = "//" if phase == "log-prob pass" else None
        axis.barh(names, width, left=left, color=PHASE_COLOURS[phase], label=phase, hatch=hatch, edgecolor="white")
        left = [begin + more for begin, more in zip(left, width, strict=True)]
    for place, total in enumerate(left):
        axis.text(total, place, f" {total:,.0f} ms", va="center", fontsize=9)
    axis.margins(x=0.12)
    axis.set_xlabel("ms of one optimizer step")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(PHASES), fontsize=8, columnspacing=1.0)
    _save(figure, path)


def scaling_overhead(found: Mapping[str, Sequence[scaling.Cluster]], path: Path) -> None:
    """Extra time over GRPO in percent, against the number of GPUs."""
    figure, axes = pyplot.subplots(1, len(found), figsize=(9, 3.8), sharey=True, layout="constrained")
    for axis, (model, clusters) in zip(axes, found.items(), strict=True):
        gpus = [cluster.layout.gpus for cluster in clusters]
        for source, (colour, style) in SOURCE_LINES.items():
            shares = [100 * scaling.overhead(cluster, source) for cluster in clusters]
            axis.plot(gpus, shares, style, color=colour, label=source)
        axis.set(title=f"{model} model", xlabel="GPUs", xscale="log", yscale="log")
        axis.set_xticks(gpus, [f"{count:,}" for count in gpus], fontsize=8)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
        axis.grid(True, alpha=0.3)
    axes[0].set_ylabel("extra time over a GRPO step")
    axes[0].legend(title="source of e", fontsize=8, title_fontsize=8)
    _save(figure, path)
