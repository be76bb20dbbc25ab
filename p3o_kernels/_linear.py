"""Log-probs and gradients from hidden states: GEMMs by PyTorch, vocabulary kernels on one bounded tile of logits.

    z = X W^T + b      dX = dz W      dW = dz^T X      db = sum dz

with X [T, H], W [V, H]. Two orders:

    gradients in the forward pass (3 GEMMs): a tile is some tokens x the whole vocabulary. Its rows are complete, so
        with e given they become dz at once. dX is finished with its tile; dW is a sum over tiles.
    recompute (4 GEMMs): a tile is all tokens x a part of the vocabulary, once forward and once backward. dW is
        finished with its tile, in its own dtype and written once; dX is a sum over tiles, in float32.

``workspace_bytes`` bounds the tile and the float32 sum of dX together.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from p3o_kernels._eager import token_advantages
from p3o_kernels._gemm import linear, product
from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._rows import RowBackend, RowGrads, Rows, RowValues
from p3o_kernels._tiles import ROW_MULTIPLE, RowIndex, Tiles, ranges, token_tiles, vocabulary_tiles


class Layer(NamedTuple):
    """A vocabulary projection: X [T, H], W [V, H], b [V] or None, one dtype."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class LayerGrads(NamedTuple):
    """Gradients of a ``Layer``; None where none was asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Workspace:
    """One buffer that every tile of a call is a view of."""

    def __init__(self, layer: Layer, tiles: Tiles) -> None:
        self._layer = layer
        columns = -(-tiles.columns // 8) * 8  # rows on 16-byte boundaries
        self._buffer = layer.hidden.new_empty(tiles.rows * columns)

    def logits(self, rows: slice | Tensor, columns: slice) -> Tensor:
        """z of these rows and entries; overwrites the tile before."""
        hidden, weight, bias = self._layer
        hidden = hidden[rows]
        width = columns.stop - columns.start
        stride = -(-width // 8) * 8
        tile = self._buffer[: hidden.shape[0] * stride].view(-1, stride)[:, :width]
        linear(tile, hidden, weight[columns], None if bias is None else bias[columns])
        return tile


def partials(layer: Layer, rows: Rows, workspace_bytes: int, module: RowBackend) -> Tensor:
    """[parts, 4, T]: the statistics of each part of the vocabulary."""
    tokens, vocab = layer.hidden.shape[0], layer.weight.shape[0]
    tiles = vocabulary_tiles(tokens, vocab, layer.hidden.element_size(), workspace_bytes)
    workspace = Workspace(layer, tiles)
    parts = []
    for columns in ranges(vocab, tiles.columns):
        shard = rows.shard(columns.start)
        made = [
            module.row_partials(workspace.logits(some, columns), shard.part(some))
            for some in ranges(tokens, tiles.rows)
        ]
        parts.append(made[0] if len(made) == 1 else torch.cat([layer.hidden.new_empty((4, 0)).float(), *made], 1))
    return torch.stack(parts)


def sum_dtype(weight: Tensor) -> torch.dtype:
    """In which sums over tiles are kept."""
    return torch.promote_types(weight.dtype, torch.float32)


def gradients(
    layer: Layer,
    rows: Rows,
    values: RowValues,
    grads: RowGrads,
    needed: tuple[bool, bool, bool],
    main_grad: Tensor | None,
    workspace_bytes: int,
    module: RowBackend,
) -> LayerGrads:
    """Recomputes the logits of each part of the vocabulary and turns them into gradients.

    ``main_grad`` [V, H] float32 takes dW, added to what it holds, in place of a tensor of its own.
    """
    hidden, weight, _ = layer
    tokens, vocab = hidden.shape[0], weight.shape[0]
    itemsize = hidden.element_size()
    if vocabulary_tiles(tokens, vocab, itemsize, workspace_bytes).columns < vocab and hidden.dtype != sum_dtype(weight):
        # the float32 sum of dX is part of the workspace, but never more than half of it
        workspace_bytes -= min(4 * hidden.numel() * needed[0], workspace_bytes // 2)
    tiles = vocabulary_tiles(tokens, vocab, itemsize, workspace_bytes)
    workspace = Workspace(layer, tiles)
    # dz is 0 in a masked row, but 0 times a NaN that is parked there is not
    clean = masked_rows(hidden, rows.mask) if needed[1] else hidden
    whole = tiles.columns == vocab
    hidden_sum = (
        hidden.new_empty(hidden.shape, dtype=hidden.dtype if whole else sum_dtype(weight)) if needed[0] else None
    )
    weight_grad = weight.new_empty(weight.shape) if needed[1] and main_grad is None else None
    bias_grad = weight.new_zeros(vocab, dtype=sum_dtype(weight)) if needed[2] else None
    for columns in ranges(vocab, tiles.columns):
        shard, row_slices = rows.shard(columns.start), list(ranges(tokens, tiles.rows))
        target = _weight_target(weight_grad, main_grad, columns, len(row_slices)) if needed[1] else None
        for some in row_slices:
            tile = workspace.logits(some, columns)
            module.row_grad(tile, tile, shard.part(some), values.part(some), grads.part(some))
            if hidden_sum is not None:
                product(hidden_sum[some], tile, weight[columns], accumulate=columns.start > 0)
            if target is not None:
                product(target, tile.t(), clean[some], accumulate=main_grad is not None or some.start > 0)
            if bias_grad is not None:
                bias_grad[columns] += tile.sum(0, dtype=bias_grad.dtype)
        if weight_grad is not None and target is not None and target.dtype != weight_grad.dtype:
            weight_grad[columns] = target.to(weight_grad.dtype)
    if weight_grad is not None and tokens == 0:
        weight_grad.zero_()
    del workspace, clean
    hidden_grad = None if hidden_sum is None else hidden_sum.to(hidden.dtype)
    return LayerGrads(hidden_grad, weight_grad, None if bias_grad is None else bias_grad.to(weight.dtype))


def masked_rows(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """``hidden`` with zeros in masked rows: a copy where there may be such rows."""
    return hidden if mask is None else hidden.masked_fill(~mask[:, None], 0.0)


def _weight_target(weight_grad: Tensor | None, main_grad: Tensor | None, columns: slice, row_tiles: int) -> Tensor:
    """Where this part of dW is summed: its final place, or float32 where several half-precision products meet."""
    place = weight_grad if main_grad is None else main_grad
    assert place is not None
    exact = row_tiles == 1 or place.dtype == sum_dtype(place)
    return place[columns] if exact else torch.empty_like(place[columns], dtype=sum_dtype(place))


def forms_gradients_forward(layer: Layer, tokens: int, weight_needed: bool, workspace_bytes: int) -> bool:
    """Whether the order with 3 GEMMs applies: dW must be a sum in its own dtype, or of one tile."""
    vocab, itemsize = layer.weight.shape[0], layer.hidden.element_size()
    rows = token_tiles(tokens, vocab, itemsize, workspace_bytes).rows
    exact = not weight_needed or layer.weight.dtype == sum_dtype(layer.weight) or rows >= tokens
    return exact and rows >= min(tokens, ROW_MULTIPLE)


def loss_gradients(
    layer: Layer,
    rows: Rows,
    index: RowIndex | None,
    tokens: TokenInputs,
    options: LossOptions,
    scale: Tensor,
    needed: tuple[bool, bool, bool],
    workspace_bytes: int,
    module: RowBackend,
) -> tuple[Tensor, Tensor, LayerGrads]:
    """lp, H ([0] when not wanted) and the gradients of the loss, with e given.

    Rows of lp and H that ``index`` leaves out stay as they are made here: NaN where they are valid, so that a count
    that was too small shows as invalid data.
    """
    hidden, weight, _ = layer
    num_rows, vocab = hidden.shape[0], weight.shape[0]
    count = num_rows if index is None else index.rows.numel()
    tiles = token_tiles(count, vocab, hidden.element_size(), workspace_bytes)
    workspace = Workspace(layer, tiles)
    log_probs, entropy = spread(rows, index, num_rows), spread(rows, index, num_rows * rows.entropy)
    # one row more takes what the padding of the index adds up to
    hidden_grad = hidden.new_empty((num_rows + (index is not None), hidden.shape[1])) if needed[0] else None
    if hidden_grad is not None and index is not None:
        hidden_grad.zero_()
    weight_grad = weight.new_empty(weight.shape) if needed[1] else None
    bias_grad = weight.new_zeros(vocab, dtype=sum_dtype(weight)) if needed[2] else None
    for done in ranges(count, tiles.rows):
        place, some, part = _place(rows, index, done, num_rows)
        tile = workspace.logits(some, slice(0, vocab))
        made = module.row_loss(tile, tile, part, _token_part(tokens, some), options, scale)
        log_probs[place], entropy_part = made[0], made[1]
        if rows.entropy:
            entropy[place] = entropy_part
        if hidden_grad is not None and index is None:
            product(hidden_grad[done], tile, weight, accumulate=False)
        elif hidden_grad is not None:
            hidden_grad[place] = tile @ weight
        if weight_grad is not None:
            product(weight_grad, tile.t(), masked_rows(hidden[some], part.mask), accumulate=done.start > 0)
        if bias_grad is not None:
            bias_grad += tile.sum(0, dtype=bias_grad.dtype)
    if weight_grad is not None and count == 0:
        weight_grad.zero_()
    grads = LayerGrads(
        None if hidden_grad is None else hidden_grad[:num_rows],
        weight_grad,
        None if bias_grad is None else bias_grad.to(weight.dtype),
    )
    return log_probs[:num_rows], entropy[: num_rows * rows.entropy], grads


def _place(
    rows: Rows, index: RowIndex | None, done: slice, num_rows: int
) -> tuple[slice | Tensor, slice | Tensor, Rows]:
    """Where results of these entries of the index go, where their inputs are, and what belongs to these rows."""
    if index is None:
        return done, done, rows.part(done)
    place = index.rows[done]
    some = place.clamp_max(num_rows - 1)  # the padding reads the last row, masked
    return place, some, rows.part(some, index.mask(place, num_rows))


def spread(rows: Rows, index: RowIndex | None, size: int) -> Tensor:
    """[size] float32 for values of all rows; with an index, one more for its padding, and NaN on valid rows."""
    if index is None or size == 0:
        return rows.labels.new_empty(size, dtype=torch.float32)
    assert rows.mask is not None
    filled = rows.labels.new_zeros(size + 1, dtype=torch.float32)
    filled[:size].masked_fill_(rows.mask, torch.nan)
    return filled


def _token_part(tokens: TokenInputs, some: slice | Tensor) -> TokenInputs:
    reference = tokens.reference_log_probs
    return replace(
        tokens,
        log_probs=tokens.log_probs[some],
        behavior_log_probs=tokens.behavior_log_probs[some],
        advantages=token_advantages(tokens, some),
        mask=None,
        cu_seqlens=None,
        reference_log_probs=None if reference is None else reference[some],
    )
