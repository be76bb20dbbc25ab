"""Custom operators on rows of logits; like ``_ops``, the boundary that torch.compile, autograd and CUDA graphs see.

Gradients flow to ``logits`` alone. Operators whose name ends in an underscore write into their first argument.
"""

from typing import Any

import torch
from torch import Tensor

from p3o_kernels import _row_eager
from p3o_kernels._dense import dense, dense_or_none
from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._rows import PARTIAL_SIZE, RowBackend, RowGrads, Rows, RowValues

_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def implementation(backend: str) -> RowBackend:
    """The module that does the work: ``_row_launch``, or ``_row_eager`` for "eager" and "compiled"."""
    if backend == "triton":
        from p3o_kernels import _row_launch

        return _row_launch
    return _row_eager


def along_vocabulary(logits: Tensor) -> Tensor:
    """``logits``, copied only where its entries are not next to each other."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _storage_is_aligned(logits: Tensor) -> bool:
    return (logits.data_ptr() - logits.storage_offset() * logits.element_size()) % 16 == 0


def _readable(logits: Tensor, backend: str) -> Tensor:
    """Copied also where memory from outside PyTorch's allocators begins off a 16-byte boundary."""
    logits = along_vocabulary(logits)
    if _storage_is_aligned(logits):
        return logits
    return implementation(backend).empty_like_rows(logits).copy_(logits)


def _check_writable(logits: Tensor) -> None:
    if not _storage_is_aligned(logits):
        raise ValueError(
            "inplace_backward=True needs logits in memory that begins on a 16-byte boundary, as PyTorch allocates it; "
            "pass logits.clone() or leave it out"
        )


def make_rows(
    labels: Tensor,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float,
    vocab_start: int,
    entropy: bool,
) -> Rows:
    tensors = dense(labels), dense_or_none(mask), dense_or_none(row_temperature)
    return Rows(*tensors, temperature, softcap, vocab_start, entropy)


@torch.library.custom_op("p3o::row_partials", mutates_args=())
def row_partials(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float,
    vocab_start: int,
    entropy: bool,
    backend: str,
) -> Tensor:
    """[4, T] float32 of a part of the vocabulary, for ``row_values``."""
    rows = make_rows(labels, mask, row_temperature, temperature, softcap, vocab_start, entropy)
    return implementation(backend).row_partials(_readable(logits, backend), rows)


@row_partials.register_fake
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return logits.new_empty((PARTIAL_SIZE, logits.shape[0]), dtype=torch.float32)


@torch.library.custom_op("p3o::row_values", mutates_args=())
def row_values(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    partials: Tensor | None,
    temperature: float,
    softcap: float,
    vocab_start: int,
    entropy: bool,
    in_place: bool,
    backend: str,
) -> _Four:
    """lp, H ([0] when not wanted) and the normaliser in two pieces: the fields of ``RowValues``.

    ``partials`` [parts, 4, T] of the whole vocabulary take the place of reading ``logits`` now.
    """
    rows = make_rows(labels, mask, row_temperature, temperature, softcap, vocab_start, entropy)
    module = implementation(backend)
    if partials is None:
        values = module.row_values(_readable(logits, backend), rows)
    else:
        values = module.finish_partials(dense(partials), rows)
    return values.log_probs, values.entropy, values.normalizer, values.normalizer_low


def fake_values(like: Tensor, num_rows: int, entropy: bool) -> _Four:
    log_probs = like.new_empty(num_rows, dtype=torch.float32)
    with_entropy = like.new_empty(num_rows if entropy else 0, dtype=torch.float32)
    return log_probs, with_entropy, torch.empty_like(log_probs), torch.empty_like(log_probs, dtype=torch.float16)


@row_values.register_fake
def _(logits: Tensor, *arguments: Any) -> _Four:
    return fake_values(logits, logits.shape[0], arguments[7])


@torch.library.custom_op("p3o::row_grad", mutates_args=())
def row_grad(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    normalizer: Tensor,
    normalizer_low: Tensor,
    entropy: Tensor | None,
    log_probs_grad: Tensor,
    entropy_grad: Tensor | None,
    temperature: float,
    softcap: float,
    vocab_start: int,
    backend: str,
) -> Tensor:
    """dlogits [T, V]; ``entropy`` and its gradient come together or not at all."""
    logits, out = _readable(logits, backend), _empty_grad(logits, backend)
    rows = make_rows(labels, mask, row_temperature, temperature, softcap, vocab_start, entropy is not None)
    values = RowValues(normalizer, normalizer if entropy is None else entropy, normalizer, normalizer_low)
    implementation(backend).row_grad(logits, out, rows, values, RowGrads(log_probs_grad, entropy_grad))
    return out


@row_grad.register_fake
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return _empty_grad(logits, arguments[-1])


@torch.library.custom_op("p3o::row_grad_", mutates_args=("logits",))
def row_grad_(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    normalizer: Tensor,
    normalizer_low: Tensor,
    entropy: Tensor | None,
    log_probs_grad: Tensor,
    entropy_grad: Tensor | None,
    temperature: float,
    softcap: float,
    vocab_start: int,
    backend: str,
) -> None:
    """``row_grad`` into the memory of the logits."""
    _check_writable(logits)
    rows = make_rows(labels, mask, row_temperature, temperature, softcap, vocab_start, entropy is not None)
    values = RowValues(normalizer, normalizer if entropy is None else entropy, normalizer, normalizer_low)
    implementation(backend).row_grad(logits, logits, rows, values, RowGrads(log_probs_grad, entropy_grad))


def _empty_grad(logits: Tensor, backend: str) -> Tensor:
    return implementation(backend).empty_like_rows(along_vocabulary(logits))


@torch.library.custom_op("p3o::empty_grad", mutates_args=())
def empty_grad(logits: Tensor, backend: str) -> Tensor:
    """Room for dlogits, laid out as the backend wants it: an operator, because it looks at the storage."""
    return _empty_grad(logits, backend)


@empty_grad.register_fake
def _(logits: Tensor, backend: str) -> Tensor:
    return _empty_grad(logits, backend)


def arrived_gradients(
    like: Tensor, log_probs_grad: Tensor | None, entropy_grad: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """[T] gradients of lp, zeros when only H has one, and of H, None when H was not wanted."""
    if entropy_grad is not None and entropy_grad.shape != like.shape:
        entropy_grad = None
    if log_probs_grad is None:
        log_probs_grad = like.new_zeros(1).expand(like.shape)
    return log_probs_grad, entropy_grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Four) -> None:
    logits, labels, mask, row_temperature = inputs[:4]
    ctx.options = inputs[5:8]
    ctx.in_place, ctx.backend = inputs[9:]
    _, entropy, normalizer, normalizer_low = output
    ctx.save_for_backward(logits, labels, mask, row_temperature, normalizer, normalizer_low, entropy)
    ctx.mark_non_differentiable(normalizer, normalizer_low)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, log_probs_grad: Tensor | None, entropy_grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none: list[Tensor | None] = [None] * 11
    if log_probs_grad is None and entropy_grad is None:
        return tuple(none)
    logits, labels, mask, row_temperature, normalizer, normalizer_low, entropy = ctx.saved_tensors
    log_probs_grad, entropy_grad = arrived_gradients(normalizer, log_probs_grad, entropy_grad)
    arguments: tuple[Any, ...] = (labels, mask, row_temperature, normalizer, normalizer_low)
    arguments += (None if entropy_grad is None else entropy, log_probs_grad, entropy_grad)
    if ctx.in_place:
        # detached: the same memory and version counter, so that whoever saved the logits hears of it
        none[0] = logits.detach()
        row_grad_(none[0], *arguments, *ctx.options, ctx.backend)
    else:
        none[0] = row_grad(logits, *arguments, *ctx.options, ctx.backend)
    return tuple(none)


row_values.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("p3o::row_loss_", mutates_args=("out",))
def row_loss_(
    out: Tensor,
    logits: Tensor | None,
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
    backend: str,
) -> tuple[Tensor, Tensor]:
    """lp and H ([0] when not wanted) of ``logits`` (None: ``out`` holds them), and scale * dL/dlogits into ``out``."""
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
    if logits is None:
        _check_writable(out)
    logits = out if logits is None else _readable(logits, backend)
    return implementation(backend).row_loss(logits, out, rows, tokens, options, dense(scale))


@row_loss_.register_fake
def _(out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return fake_values(out, out.shape[0], arguments[12])[:2]


@torch.library.custom_op("p3o::scale_rows_", mutates_args=("grad",))
def scale_rows_(grad: Tensor, factor: Tensor, backend: str) -> None:
    """``grad`` *= ``factor``, [] or one for each row."""
    implementation(backend).scale_rows(grad, factor)


@torch.library.custom_op("p3o::attach", mutates_args=())
def attach(loss: Tensor, tensor: Tensor, grad: Tensor, backend: str) -> Tensor:
    """``loss``, whose gradient with respect to ``tensor`` is ``grad`` already, up to the factor that arrives backward.

    ``grad`` is given away: the backward pass scales it in place, and a second one is refused by autograd.
    """
    return loss.clone()


@attach.register_fake
def _(loss: Tensor, tensor: Tensor, grad: Tensor, backend: str) -> Tensor:
    return torch.empty_like(loss)


def _save_attached(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    loss, _, grad, ctx.backend = inputs
    ctx.save_for_backward(loss, grad)


def _backward_attached(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
    loss, grad = ctx.saved_tensors
    grad = grad.detach()  # the same memory and version counter: a second backward pass finds a changed tensor
    # a loss that is NaN for invalid data has a gradient that is NaN everywhere
    scale_rows_(grad, torch.where(loss.isfinite(), loss_grad, torch.nan), ctx.backend)
    return loss_grad, grad, None, None


attach.register_autograd(_backward_attached, setup_context=_save_attached)
