"""Custom operators from hidden states; gradients flow to ``hidden``, ``weight`` and ``bias``.

An absent gradient is a tensor of no element, because operators return tensors. ``valid_tokens`` is -1 when not given.
"""

from typing import Any

import torch
from torch import Tensor

from p3o_kernels import _linear
from p3o_kernels._dense import dense, dense_or_none
from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._linear import Layer, LayerGrads
from p3o_kernels._row_ops import arrived_gradients, fake_values, implementation, make_rows
from p3o_kernels._rows import PARTIAL_SIZE, RowGrads, Rows, RowValues
from p3o_kernels._tiles import RowIndex, valid_rows

_Three = tuple[Tensor, Tensor, Tensor]


def _index(rows: Rows, valid_tokens: int) -> RowIndex | None:
    return valid_rows(rows.mask, None if valid_tokens < 0 else valid_tokens)


def _compact(layer: Layer, rows: Rows, index: RowIndex | None) -> tuple[Layer, Rows]:
    """Only the rows of ``index``; its padding repeats the last row, masked."""
    if index is None:
        return layer, rows
    num_rows = layer.hidden.shape[0]
    some = index.rows.clamp_max(num_rows - 1)
    return layer._replace(hidden=layer.hidden[some]), rows.part(some, index.mask(index.rows, num_rows))


def _partials(layer: Layer, rows: Rows, index: RowIndex | None, workspace_bytes: int, backend: str) -> Tensor:
    """[parts, 4, T], neutral where the index leaves a row out, NaN if that row is valid."""
    num_rows = layer.hidden.shape[0]
    compact, some = _compact(layer, rows, index)
    made = _linear.partials(compact, some, workspace_bytes, implementation(backend))
    if index is None:
        return made
    spread = made.new_zeros((made.shape[0], PARTIAL_SIZE, num_rows + 1))
    if rows.mask is not None:
        spread[:, :, :num_rows].masked_fill_(rows.mask, torch.nan)
    spread[:, :, index.rows] = made
    return spread[:, :, :num_rows].contiguous()


@torch.library.custom_op("p3o::linear_partials", mutates_args=())
def linear_partials(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float,
    vocab_start: int,
    entropy: bool,
    valid_tokens: int,
    workspace_bytes: int,
    backend: str,
) -> Tensor:
    """[4, T] float32 of this shard of the vocabulary, for ``linear_values``."""
    rows = make_rows(labels, mask, row_temperature, temperature, softcap, vocab_start, entropy)
    index = _index(rows, valid_tokens)
    partials = _partials(Layer(hidden, weight, bias), rows, index, workspace_bytes, backend)
    return implementation(backend).merge_partials(partials, rows)


@linear_partials.register_fake
def _(hidden: Tensor, *arguments: Any) -> Tensor:
    return hidden.new_empty((PARTIAL_SIZE, hidden.shape[0]), dtype=torch.float32)


@torch.library.custom_op("p3o::linear_values", mutates_args=())
def linear_values(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    partials: Tensor | None,
    main_grad: Tensor | None,
    temperature: float,
    softcap: float,
    vocab_start: int,
    entropy: bool,
    valid_tokens: int,
    workspace_bytes: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lp, H ([0] when not wanted) and the normaliser in two pieces.

    ``partials`` [parts, 4, T] of the whole vocabulary take the place of computing logits now. ``main_grad`` is for the
    backward pass alone, which adds dW to it and leaves the weight without a gradient of its own.
    """
    rows = make_rows(labels, mask, row_temperature, temperature, softcap, vocab_start, entropy)
    if partials is None:
        index = _index(rows, valid_tokens)
        partials = _partials(Layer(hidden, weight, bias), rows, index, workspace_bytes, backend)
    values = implementation(backend).finish_partials(dense(partials), rows)
    return values.log_probs, values.entropy, values.normalizer, values.normalizer_low


@linear_values.register_fake
def _(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_values(hidden, hidden.shape[0], arguments[10])


def compute_gradients(
    layer: Layer,
    rows: Rows,
    values: RowValues,
    grads: RowGrads,
    needed: tuple[bool, bool, bool],
    main_grad: Tensor | None,
    valid_tokens: int,
    workspace_bytes: int,
    backend: str,
) -> LayerGrads:
    """Gradients over the valid rows; the others get zeros."""
    index, num_rows = _index(rows, valid_tokens), layer.hidden.shape[0]
    if index is not None:
        some = index.rows.clamp_max(num_rows - 1)
        values, grads = values.part(some), grads.part(some)
    compact, rows = _compact(layer, rows, index)
    made = _linear.gradients(compact, rows, values, grads, needed, main_grad, workspace_bytes, implementation(backend))
    if index is None or made.hidden is None:
        return made
    spread = made.hidden.new_zeros((num_rows + 1, made.hidden.shape[1]))
    spread[index.rows] = made.hidden
    return made._replace(hidden=spread[:num_rows])


@torch.library.custom_op("p3o::linear_grad", mutates_args=("main_grad",))
def linear_grad(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    normalizer: Tensor,
    normalizer_low: Tensor,
    entropy: Tensor | None,
    log_probs_grad: Tensor,
    entropy_grad: Tensor | None,
    main_grad: Tensor | None,
    temperature: float,
    softcap: float,
    vocab_start: int,
    valid_tokens: int,
    workspace_bytes: int,
    needed: list[bool],
    backend: str,
) -> _Three:
    """dX, dW, db; dW goes into ``main_grad`` where it is given."""
    rows = make_rows(labels, mask, row_temperature, temperature, softcap, vocab_start, entropy is not None)
    values = RowValues(normalizer, normalizer if entropy is None else entropy, normalizer, normalizer_low)
    grads = RowGrads(log_probs_grad, entropy_grad)
    hidden_needed, weight_needed, bias_needed = needed
    made = compute_gradients(
        Layer(hidden, weight, bias),
        rows,
        values,
        grads,
        (hidden_needed, weight_needed, bias_needed),
        main_grad,
        valid_tokens,
        workspace_bytes,
        backend,
    )
    return _as_tensors(made, hidden)


def _as_tensors(grads: LayerGrads, like: Tensor) -> _Three:
    hidden, weight, bias = (like.new_empty(0) if grad is None else grad for grad in grads)
    return hidden, weight, bias


def _fake_grads(hidden: Tensor, weight: Tensor, needed: list[bool]) -> _Three:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    made = [hidden.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, needed, strict=True)]
    return made[0], made[1], made[2]


@linear_grad.register_fake
def _(hidden: Tensor, weight: Tensor, *arguments: Any) -> _Three:
    hidden_needed, weight_needed, bias_needed = arguments[15]
    return _fake_grads(hidden, weight, [hidden_needed, weight_needed and arguments[9] is None, bias_needed])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, mask, row_temperature, _, ctx.main_grad = inputs[:8]
    ctx.options = inputs[8:11]
    ctx.valid_tokens, ctx.workspace_bytes, ctx.backend = inputs[12:]
    _, entropy, *normalizer = output
    # not main_grad: several micro-batches add to it, and a saved tensor must not change
    ctx.save_for_backward(hidden, weight, bias, labels, mask, row_temperature, *normalizer, entropy)
    ctx.mark_non_differentiable(*normalizer)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, log_probs_grad: Tensor | None, entropy_grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none: list[Tensor | None] = [None] * 15
    if log_probs_grad is None and entropy_grad is None:
        return tuple(none)
    *inputs, normalizer, normalizer_low, entropy = ctx.saved_tensors
    log_probs_grad, entropy_grad = arrived_gradients(normalizer, log_probs_grad, entropy_grad)
    needed = list(ctx.needs_input_grad[:3])
    made = linear_grad(
        *inputs,
        normalizer,
        normalizer_low,
        None if entropy_grad is None else entropy,
        log_probs_grad,
        entropy_grad,
        ctx.main_grad,
        *ctx.options,
        ctx.valid_tokens,
        ctx.workspace_bytes,
        needed,
        ctx.backend,
    )
    for place, grad in enumerate(made):
        present = needed[place] and not (place == 1 and ctx.main_grad is not None)
        none[place] = grad if present else None
    return tuple(none)


linear_values.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("p3o::linear_loss", mutates_args=())
def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor | None,
    ess: Tensor,
    reference_log_probs: Tensor | None,
    scale: Tensor,
    temperature: float,
    softcap: float,
    entropy: bool,
    kl_mode: str,
    reference_coef: float,
    entropy_coef: float,
    valid_tokens: int,
    workspace_bytes: int,
    needed: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """lp, H ([0] when not wanted), and dX, dW, db of the summed loss times ``scale``, with e given."""
    rows = make_rows(labels, mask, row_temperature, temperature, softcap, 0, entropy)
    tokens = TokenInputs(
        behavior_log_probs,  # stands in for the log-probs that are to come
        dense(behavior_log_probs),
        dense(advantages),
        None,
        dense_or_none(cu_seqlens),
        ess,
        dense_or_none(reference_log_probs),
        None,
        None,
    )
    options = LossOptions(0, "sum", kl_mode, 0.0, 0.0, reference_coef, entropy_coef)
    hidden_needed, weight_needed, bias_needed = needed
    log_probs, with_entropy, grads = _linear.loss_gradients(
        Layer(hidden, weight, bias),
        rows,
        _index(rows, valid_tokens),
        tokens,
        options,
        dense(scale),
        (hidden_needed, weight_needed, bias_needed),
        workspace_bytes,
        implementation(backend),
    )
    return log_probs, with_entropy, *_as_tensors(grads, hidden)


@linear_loss.register_fake
def _(hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    log_probs, entropy, _, _ = fake_values(hidden, hidden.shape[0], arguments[12])
    return log_probs, entropy, *_fake_grads(hidden, weight, arguments[18])
