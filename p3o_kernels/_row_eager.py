"""Vocabulary operations in PyTorch, a few rows at a time; the counterpart of ``_row_launch``.

    x_v = softcap(z_v) / tau      m = max x      d = sum exp(x_v - m)      w = sum exp(x_v - m) (x_v - m)
    lp = (x_y - m) - ln d         H = ln d - w / d         normaliser = m + ln d, in float32 and a float16 rest

Everything of size V is float32 and lives in one scratch of a few rows, small enough for the cache of a CPU.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from p3o_kernels import _eager
from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._rows import PARTIAL_SIZE, RowGrads, Rows, RowValues

CPU_SCRATCH = 1 << 18  # elements: 1 MiB
CUDA_SCRATCH = 1 << 26
TINY = -700.0  # exp of it is 0 in float32, and 0 * this is 0 where 0 * -inf would be NaN
LOWEST = torch.finfo(torch.float32).min


def _chunks(logits: Tensor, mask: Tensor | None) -> Iterator[slice | Tensor]:
    """Rows that fit the scratch, as slices; on a CPU, where it costs no wait, indices of the valid rows alone."""
    size = max((CUDA_SCRATCH if logits.is_cuda else CPU_SCRATCH) // max(logits.shape[1], 1), 1)
    if mask is None or mask.is_cuda or bool(mask.all()):
        for start in range(0, logits.shape[0], size):
            yield slice(start, min(start + size, logits.shape[0]))
    elif mask.any():
        yield from torch.split(mask.nonzero()[:, 0], size)


def _scaled(logits: Tensor, rows: Rows, reuse: bool = False) -> tuple[Tensor, Tensor | None]:
    """x as a float32 scratch, or in the memory of ``logits``, and d softcap / dz where there is a softcap."""
    x = logits if reuse else logits.to(torch.float32, copy=True)
    slope = None
    if rows.softcap:
        excluded = x == -math.inf
        curve = torch.tanh(x / rows.softcap)
        x = torch.where(excluded, x, curve * rows.softcap)
        slope = torch.where(excluded, 0.0, 1.0 - curve * curve)
    if rows.row_temperature is not None:
        x /= rows.row_temperature[:, None]
    elif rows.temperature != 1.0:
        x /= rows.temperature
    return x, slope


def _labels(rows: Rows, columns: int) -> tuple[Tensor, Tensor]:
    """[T, 1]: the column of each label, 0 where this part of the vocabulary does not hold it; and whether it does."""
    column = rows.labels[:, None] - rows.vocab_start
    owned = (column >= 0) & (column < columns)
    return torch.where(owned, column, 0), owned


def row_partials(logits: Tensor, rows: Rows) -> Tensor:
    """[4, T] float32: m, d, x_y (-inf where another part holds the label) and w."""
    return _partials(logits, rows, keep_powers=False)


def _partials(logits: Tensor, rows: Rows, keep_powers: bool) -> Tensor:
    """``keep_powers``: float32 logits become exp(x - m) in place; w is left out then."""
    partial = logits.new_zeros((PARTIAL_SIZE, logits.shape[0]), dtype=torch.float32)
    if rows.mask is not None:
        partial[0].masked_fill_(~rows.mask, LOWEST)
    for chunk in _chunks(logits, rows.mask):
        part = rows.part(chunk)
        x, _ = _scaled(logits[chunk], part, reuse=keep_powers and isinstance(chunk, slice))
        shift = x.amax(1, keepdim=True).clamp_min_(LOWEST)  # finite: a row of -inf gives d = 0, not NaN
        column, owned = _labels(part, x.shape[1])
        partial[2, chunk] = torch.where(owned, x.gather(1, column), -math.inf)[:, 0]
        partial[0, chunk] = shift[:, 0]
        x -= shift
        if rows.entropy and not keep_powers:
            power = x.exp()
            partial[3, chunk] = x.clamp_min_(TINY).mul_(power).sum(1)
        else:
            power = x.exp_()
        partial[1, chunk] = power.sum(1)
        if keep_powers and not isinstance(chunk, slice):
            logits[chunk] = power
    if rows.mask is not None:  # rows of a CUDA tensor are computed, then dropped
        partial[0].masked_fill_(~rows.mask, LOWEST)
        partial[1:].masked_fill_(~rows.mask, 0.0)
    return partial


def merge_partials(partials: Tensor, rows: Rows) -> Tensor:
    """[4, T] from [parts, 4, T], joined in order."""
    shift, total, label, weighted = partials.unbind(1)
    top = shift.amax(0)
    drop = (shift - top).clamp_min_(TINY)
    power = drop.exp()
    sums = [(total * power).sum(0), label.amax(0), ((weighted + drop * total) * power).sum(0)]
    return torch.stack([top, *sums])


def finish_partials(partials: Tensor, rows: Rows) -> RowValues:
    """Values from the partials [parts, 4, T] of the whole vocabulary."""
    merged = merge_partials(partials, rows) if partials.shape[0] > 1 else partials[0]
    shift, total, label, weighted = merged.double().unbind(0)
    log_total = total.log()
    normalizer = shift + log_total
    high = normalizer.float()
    values = [label - shift - log_total, log_total - weighted / total, high, normalizer - high]
    if rows.mask is not None:
        values = [torch.where(rows.mask, value, 0.0) for value in values]
    log_probs, entropy, high, low = values
    entropy = entropy if rows.entropy else entropy[:0]
    return RowValues(log_probs.float(), entropy.float(), high.float(), low.half())


def row_values(logits: Tensor, rows: Rows) -> RowValues:
    """Values of rows that hold the whole vocabulary."""
    return finish_partials(row_partials(logits, rows)[None], rows)


def row_grad(logits: Tensor, out: Tensor, rows: Rows, values: RowValues, grads: RowGrads) -> None:
    """dlogits into ``out``, which may be ``logits``; exact zeros for a row without any gradient."""
    reuse = out is logits and logits.dtype == torch.float32
    for chunk in _chunks(logits, rows.mask):
        part, value, grad = rows.part(chunk), values.part(chunk), grads.part(chunk)
        in_place = reuse and isinstance(chunk, slice)
        x, slope = _scaled(logits[chunk], part, in_place and not rows.softcap)
        inverse = 1.0 / (part.temperature if part.row_temperature is None else part.row_temperature)
        onehot = grad.log_probs * inverse
        # the rest of the normaliser goes into the row's factor: one pass over [T, V] less
        power = (-value.normalizer_low.float()).exp()
        x -= value.normalizer[:, None]
        softmax = -onehot * power
        if grad.entropy is not None:
            entropy_slope = -grad.entropy * inverse * power
            softmax = softmax + entropy_slope * (value.entropy - value.normalizer_low.float())
            factor = (x.clamp(min=TINY) * entropy_slope[:, None]).add_(softmax[:, None])
            x.exp_().mul_(factor)
        else:
            x.exp_().mul_(softmax[:, None])
        _add_labels(x, part, onehot)
        if slope is not None:
            x *= slope
        if x.data_ptr() != out[chunk].data_ptr():
            out[chunk] = x.to(out.dtype)
    _clear_idle(out, rows.mask, grads)


def _add_labels(x: Tensor, rows: Rows, onehot: Tensor) -> None:
    column, owned = _labels(rows, x.shape[1])
    x.scatter_add_(1, column, torch.where(owned[:, 0], onehot, 0.0)[:, None])


def _clear_idle(out: Tensor, mask: Tensor | None, grads: RowGrads) -> None:
    """Zeros in rows that are masked or have no gradient. Selected, not multiplied: what they hold may be NaN."""
    idle = grads.log_probs == 0
    if grads.entropy is not None:
        idle = idle & (grads.entropy == 0)
    if mask is not None:
        idle = idle | ~mask
    if out.is_cuda or bool(idle.any()):
        out.masked_fill_(idle[:, None], 0.0)


def row_loss(
    logits: Tensor, out: Tensor, rows: Rows, tokens: TokenInputs, options: LossOptions, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """lp and H ([0] when not wanted), and scale * dL/dlogits into ``out``, which may be ``logits``."""
    # the exponentials that d needs are those of the gradient, up to a factor for each row
    once = out is logits and logits.dtype == torch.float32 and not rows.entropy and not rows.softcap
    partial = _partials(logits, rows, keep_powers=once)
    values = finish_partials(partial[None], rows)
    entropy = values.entropy if rows.entropy else None
    inputs = TokenInputs(
        values.log_probs,
        tokens.behavior_log_probs,
        tokens.advantages,
        rows.mask,
        tokens.cu_seqlens,
        tokens.ess,
        tokens.reference_log_probs,
        entropy,
        None,
    )
    log_probs_grad = _eager.token_loss(inputs, options).token_grad * scale.float()
    entropy_grad = None if entropy is None else (-options.entropy_coef * scale.float()).expand(log_probs_grad.shape)
    grads = RowGrads(log_probs_grad, entropy_grad)
    if once:
        inverse = 1.0 / (rows.temperature if rows.row_temperature is None else rows.row_temperature)
        onehot = log_probs_grad * inverse
        out.mul_((-onehot / partial[1])[:, None])
        _add_labels(out, rows, onehot)
        _clear_idle(out, rows.mask, grads)
    else:
        row_grad(logits, out, rows, values, grads)
    return values.log_probs, values.entropy


def scale_rows(grad: Tensor, factor: Tensor) -> None:
    """``grad`` *= ``factor`` ([] or one for each row) in place."""
    if factor.dim() == 0 and not grad.is_cuda and factor.item() == 1.0:
        return  # reading a CPU scalar waits for nothing
    grad.mul_(factor if factor.dim() == 0 else factor.reshape(-1, *[1] * (grad.dim() - 1)))


def empty_like_rows(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
