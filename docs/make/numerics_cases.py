"""The operators on small seeded inputs: their errors against float64, and those of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import p3o_kernels
from p3o_kernels import reference

TOKENS = 5000
"""More than one block of the token kernels, with a tail."""
ROWS, VOCAB, HIDDEN = 24, 600, 32
Values = dict[str, Tensor]


class Row(NamedTuple):
    """One line of the table; errors are the largest of a tensor, divided by its largest value."""

    operator: str
    case: str
    quantity: str
    pytorch: float
    """Of ``p3o_kernels.reference`` in the dtype of the inputs."""
    ours: float
    allowed: float
    """1.5 times ``pytorch``, or float32 rounding."""


class Case(NamedTuple):
    """One operator on one input."""

    operator: str
    case: str
    inputs: Values
    run: Callable[[Any, Values], Values]
    """(p3o_kernels or its reference, inputs) -> quantities by name."""


def measure() -> list[Row]:
    """All rows, on the backend that "auto" chooses in this process."""
    rows = []
    for operator, case, inputs, run in cases():
        truth = run(reference, {name: _wide(tensor) for name, tensor in inputs.items()})
        plain, ours = run(reference, inputs), run(p3o_kernels, inputs)
        for name, exact in truth.items():
            scale = exact.abs().max().item()
            errors = [((made[name].double() - exact).abs().max() / scale).item() for made in (plain, ours)]
            allowed = max(1.5 * errors[0], 1e-6 + 2.0**-22 / scale)
            rows.append(Row(operator, case, name, *errors, allowed))
    return rows


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def cases() -> Iterator[Case]:
    for spread in (1e-3, 0.3, 2.0):
        yield Case("ratio_stats", f"std of l {spread:g}", _tokens(spread), _statistics)
    for mode in ("proxy_safe", "proxy", "importance"):
        for spread in (1e-3, 0.3, 2.0):
            yield Case("p3o_loss", f"{mode}, std of l {spread:g}", _tokens(spread), _token_loss(mode))
    yield Case("p3o_loss_per_sequence", "std of l 0.3", _tokens(0.3), _sequence_loss)
    yield Case("p4o_loss", "std of l 0.3", _tokens(0.3), _two_anchor_loss)
    for name, dtype, offset in (("float32", torch.float32, 0.0), ("float32, logits + 1e4", torch.float32, 1e4),
                                ("bfloat16", torch.bfloat16, 0.0)):  # fmt: skip
        yield Case("token_log_probs", name, _logits(dtype, offset), _row_values)
        yield Case("p3o_loss_from_logits", name, _logits(dtype, offset), _logit_loss)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield Case("linear_log_probs", name, _layer(dtype), _linear_values)
        yield Case("p3o_loss_from_hidden", name, _layer(dtype), _hidden_loss)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tokens(spread: float) -> Values:
    log_probs = -_normal(TOKENS, seed=1).abs()
    offsets = torch.arange(0, TOKENS + 1, TOKENS // 10, dtype=torch.int32)
    made = {"log_probs": log_probs, "behavior": log_probs + spread * _normal(TOKENS, seed=2)}
    return made | {
        "proximal": log_probs + 0.1 * _normal(TOKENS, seed=3),
        "advantages": _normal(TOKENS, seed=4),
        "cu_seqlens": offsets,
    }


def _targets(rows: int) -> Values:
    labels = torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(5))
    return {"labels": labels, "behavior": -6.0 - _normal(rows, seed=6).abs(), "advantages": _normal(rows, seed=7)}


def _logits(dtype: torch.dtype, offset: float) -> Values:
    return _targets(ROWS) | {"logits": (3.0 * _normal(ROWS, VOCAB, seed=8) + offset).to(dtype)}


def _layer(dtype: torch.dtype) -> Values:
    hidden, weight = _normal(ROWS, HIDDEN, seed=9), 0.3 * _normal(VOCAB, HIDDEN, seed=10)
    return _targets(ROWS) | {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}


def _leaf(values: Values, name: str) -> Tensor:
    return values[name].detach().clone().requires_grad_()


def _gradients(loss: Tensor, **leaves: Tensor) -> Values:
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


def _statistics(library: Any, values: Values) -> Values:
    stats = library.ratio_stats(values["log_probs"], values["behavior"])
    made = {"S1": stats.sum_ratio, "S2": stats.sum_ratio_sq}
    context = stats.to_context() if library is p3o_kernels else reference.to_context(stats)
    return made | {"e": context.ess}


def _token_loss(mode: str) -> Callable[[Any, Values], Values]:
    def run(library: Any, values: Values) -> Values:
        leaf = _leaf(values, "log_probs")
        made = library.p3o_loss(leaf, values["behavior"], values["advantages"], kl_mode=mode, reduction="sum")
        return {"loss": made.loss.detach()} | _gradients(made.loss, gradient=leaf)

    return run


def _sequence_loss(library: Any, values: Values) -> Values:
    leaf, offsets = _leaf(values, "log_probs"), values["cu_seqlens"]
    made = library.p3o_loss_per_sequence(leaf, values["behavior"], values["advantages"], cu_seqlens=offsets)
    return {"loss": made.loss.detach()} | _gradients(made.loss, gradient=leaf)


def _two_anchor_loss(library: Any, values: Values) -> Values:
    leaf = _leaf(values, "log_probs")
    made = library.p4o_loss(leaf, values["behavior"], values["proximal"], values["advantages"])
    return {"loss": made.loss.detach()} | _gradients(made.loss, gradient=leaf)


def _row_values(library: Any, values: Values) -> Values:
    leaf = _leaf(values, "logits")
    log_probs, entropy = library.token_log_probs(leaf, values["labels"], return_entropy=True)
    made = {"log-probs": log_probs.detach(), "entropy": entropy.detach()}
    return made | _gradients((log_probs + entropy).sum(), d_logits=leaf)


def _logit_loss(library: Any, values: Values) -> Values:
    leaf = _leaf(values, "logits")
    given = (values["labels"], values["behavior"], values["advantages"])
    made = library.p3o_loss_from_logits(leaf, *given, entropy_coef=0.01)
    return {"loss": made.loss.detach()} | _gradients(made.loss, d_logits=leaf)


def _linear_values(library: Any, values: Values) -> Values:
    hidden, weight = _leaf(values, "hidden"), _leaf(values, "weight")
    log_probs = library.linear_log_probs(hidden, weight, values["labels"])
    return {"log-probs": log_probs.detach()} | _gradients(log_probs.sum(), d_hidden=hidden, d_weight=weight)


def _hidden_loss(library: Any, values: Values) -> Values:
    hidden, weight = _leaf(values, "hidden"), _leaf(values, "weight")
    given = (values["labels"], values["behavior"], values["advantages"])
    made = library.p3o_loss_from_hidden(hidden, weight, *given, entropy_coef=0.01)
    return {"loss": made.loss.detach()} | _gradients(made.loss, d_hidden=hidden, d_weight=weight)
