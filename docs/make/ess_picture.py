"""The role of e in one picture: ratios at three drifts, the cap that they lead to, and the gradient that is left."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from docs.make.style import BLUE, GREY, INK, ORANGE, RED, SETTINGS, SKY
from p3o_kernels import ESSContext, p3o_loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRIFTS = (0.1, 0.5, 1.0)
"""Standard deviations of the log-ratio. Its mean is -s^2 / 2, so that the mean ratio is 1, as between policies."""
TOKENS = 4096
LOWEST, HIGHEST = 0.1, 10.0


class Column(NamedTuple):
    """What ``p3o_loss`` gives at one drift."""

    drift: float
    ratios: Tensor
    """[TOKENS] float64."""
    ess: float
    grid: Tensor
    """[n] ratios at which the two curves are evaluated."""
    weight: Tensor
    """[n] min(rho, e), the factor of -A in the gradient."""
    pull: Tensor
    """[n] the gradient of a token whose advantage is 0."""

    @property
    def title(self) -> str:
        return f"drift {self.drift:g}:  e = {self.ess:.2f},  1 - e = {1 - self.ess:.2f}"


def columns() -> list[Column]:
    """The three columns; seeded."""
    return [_column(drift) for drift in DRIFTS]


def _column(drift: float) -> Column:
    noise = torch.randn(TOKENS, generator=torch.Generator().manual_seed(0))
    log_ratios = drift * noise - drift**2 / 2
    behavior = torch.full_like(log_ratios, -2.0)
    context = p3o_loss(behavior + log_ratios, behavior, torch.ones(TOKENS)).context
    grid = torch.logspace(math.log10(LOWEST), math.log10(HIGHEST), 201)
    pull = _gradients(grid, 0.0, context)
    return Column(
        drift, log_ratios.double().exp(), context.ess.item(), grid, pull - _gradients(grid, 1.0, context), pull
    )


def _gradients(ratios: Tensor, advantage: float, context: ESSContext) -> Tensor:
    behavior = torch.full_like(ratios, -2.0)
    log_probs = (behavior + ratios.log()).requires_grad_()
    p3o_loss(log_probs, behavior, torch.full_like(ratios, advantage), context=context, reduction="sum").loss.backward()
    assert log_probs.grad is not None
    return log_probs.grad


def draw() -> Figure:
    """Two rows of three panels."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(10.0, 5.6), layout="constrained")
        panels: Any = figure.subplots(2, 3, sharex=True, sharey="row")
        for place, column in enumerate(columns()):
            _histogram(panels[0, place], column)
            _curves(panels[1, place], column)
        panels[0, 0].set_ylabel("share of tokens")
        panels[1, 0].set_ylabel("part of the gradient")
        lines = [line for axes in panels[:, 0] for line in axes.get_lines() if not line.get_label().startswith("_")]
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
        return figure


def _histogram(axes: Any, column: Column) -> None:
    edges = torch.logspace(math.log10(LOWEST), math.log10(HIGHEST), 61)
    shares = torch.full((TOKENS,), 1.0 / TOKENS)
    inside = column.ratios.clamp(LOWEST, HIGHEST)
    axes.hist(inside.numpy(), bins=edges.numpy(), weights=shares.numpy(), color=SKY, edgecolor="none")
    axes.axvline(column.ess, color=RED, linewidth=2, label="the cap e")
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=":", label="ratio 1")
    axes.set_title(column.title)


def _curves(axes: Any, column: Column) -> None:
    ratios = column.grid.numpy()
    axes.plot(ratios, ratios, color=GREY, linewidth=1, linestyle="--", label="uncapped weight: rho")
    axes.plot(ratios, column.weight.numpy(), color=BLUE, linewidth=2, label="weight of -A: min(rho, e)")
    axes.plot(ratios, column.pull.numpy(), color=ORANGE, linewidth=2, label="pull: (1 - e)(1 - 1 / rho)")
    axes.axvline(column.ess, color=RED, linewidth=1)
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.axhline(0.0, color=INK, linewidth=0.6)
    axes.set(xscale="log", xlim=(LOWEST, HIGHEST), ylim=(-2.2, 1.4), xlabel="rho = probability now / when sampled")
    axes.set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    axes.minorticks_off()
