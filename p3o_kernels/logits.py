"""Log-probabilities and the P3O loss from logits, whole or cut over the vocabulary.

    x_tv = softcap(z_tv) / tau_t           softcap(z) = c tanh(z / c)
    lp_t = x_t,y_t - log sum_v exp(x_tv)    H_t = - sum_v p_tv log p_tv    p = softmax(x)

    d lp_t / d x_tv = [v = y_t] - p_tv      d H_t / d x_tv = - p_tv (log p_tv + H_t)

y are the labels. All of it is float32 or wider, whatever the logits are; the gradient is rounded once.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import _backend, _row_ops, _vocabulary
from p3o_kernels._collectives import gather_partials, vocab_start
from p3o_kernels._row_checks import check_in_place, check_logits
from p3o_kernels._vocabulary import RowArguments, TokenArguments
from p3o_kernels.ess import ESSContext
from p3o_kernels.loss import P3OOutput


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    process_group: ProcessGroup | None = None,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each label, and the entropy of each row, differentiable in ``logits``.

    Args:
        logits: z, [T, V] float32, float16 or bfloat16; any row stride. -inf excludes an entry. With ``process_group``
            this rank's shard [T, V / ranks], entries rank * V / ranks onward.
        labels: y, [T] int64 or int32 ids over the whole vocabulary, already shifted: label t is predicted by row t. An
            id outside the vocabulary has probability 0, log-probability -inf.
        mask: [T] bool; rows with False are not read: log-probability, entropy and gradient are exact zeros, whatever
            the row and its label hold. None: every row.
        temperature: tau > 0, a number or [T]; divides logits. Treated as a constant.
        softcap: c > 0 for c tanh(z / c) before the temperature. None: no cap.
        process_group: tensor-parallel group. Every rank must call; one all_gather of 16 bytes a row, joined in rank
            order, so every rank gets the same bits. The gradient is that of this rank's shard and needs no reduction.
        return_entropy: also return H.
        inplace_backward: write the gradient into the memory of ``logits``. Autograd then refuses a second backward
            pass, and every other use of the logits that it has recorded. Eager mode only.
        backend: "auto" (triton on CUDA tensors or under its interpreter, else eager), "triton", "eager" or "compiled"
            (the same as eager here).

    Returns:
        [T] float32 in nats, or two of them with ``return_entropy``.

    Raises:
        ValueError: shapes, devices or options that do not fit together.
        TypeError: a wrong dtype or type.

    Memory: a gradient like ``logits``, unless in place, and 6 bytes a row between forward and backward (10 with H).
    Rows of -inf give NaN, as log_softmax does. Logits times log2(e) / tau must stay within float32.
    """
    check_logits(logits, labels, mask)
    check_in_place(logits, inplace_backward)
    rows = _vocabulary.row_arguments(logits, labels, mask, temperature, softcap)
    resolved = _backend.resolve(backend, logits)
    log_probs, entropy = _row_values(logits, rows, process_group, return_entropy, inplace_backward, resolved)
    return (log_probs, entropy) if return_entropy else log_probs


def _row_values(
    logits: Tensor,
    rows: RowArguments,
    process_group: ProcessGroup | None,
    with_entropy: bool,
    in_place: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    vocab = logits.shape[1]
    numbers = (rows.temperature, rows.softcap, vocab_start(vocab, process_group), with_entropy)
    tensors = (rows.labels, rows.mask, rows.row_temperature)
    partials = None
    if process_group is not None:
        partial = _row_ops.row_partials(logits.detach(), *tensors, *numbers, backend)
        partials = gather_partials(partial, vocab, process_group)
    log_probs, entropy, _, _ = _row_ops.row_values(logits, *tensors, partials, *numbers, in_place, backend)
    return log_probs, entropy


def p3o_loss_from_logits(
    logits: Tensor,
    labels: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    context: ESSContext | None = None,
    ess_process_group: ProcessGroup | None = None,
    reduction: str = "mean",
    num_tokens: int | Tensor | None = None,
    kl_mode: str = "proxy_safe",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ref_log_probs: Tensor | None = None,
    ref_kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    validate: bool = True,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    process_group: ProcessGroup | None = None,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
) -> P3OOutput:
    """P3O loss of a packed batch from its logits, differentiable in ``logits``.

    The log-probabilities are those of ``token_log_probs``, the loss that of ``p3o_loss``; arguments and errors are as
    described there, except:

    Args:
        logits: [T, V].
        labels: [T]. Rows whose mask is False may carry any label, and are neither read nor computed.
        behavior_log_probs: [T].
        advantages: [T], or [B] with ``cu_seqlens``.
        mask: [T] bool.
        context: with e given, kernels form the gradient while the loss is computed: the logits are read once from
            memory and not again in the backward pass. That needs "triton" and no ``process_group``; otherwise, and
            in micro-batch scope, the backward pass reads them once more.
        ess_process_group: micro-batch scope: reduce S1, S2, N over these ranks (data and context parallel), as
            ``process_group`` of ``p3o_loss``.
        entropy_coef: weight of the entropy bonus; the entropy is that of the logits, with its gradient.
        process_group: the tensor-parallel group that the vocabulary is cut over.
        return_entropy: compute the entropy also when its coefficient is 0, for ``metrics`` alone.
        inplace_backward: write the gradient into the memory of ``logits``: during this call where the gradient is
            formed with the loss, so that the logits are gone when it returns, else in the backward pass.

    Returns:
        ``P3OOutput(loss, num_tokens, context, metrics)``.

    Where the gradient is formed with the loss, a factor other than 1 that arrives in the backward pass is multiplied
    onto it afterwards (one more pass, one more rounding), and a second backward pass is refused: give the divisor as
    ``num_tokens``.
    """
    check_logits(logits, labels, mask)
    check_in_place(logits, inplace_backward)
    tokens = TokenArguments(
        behavior_log_probs, advantages, mask, cu_seqlens, context, reduction, num_tokens, kl_mode, clip_low, clip_high,
        ref_log_probs, ref_kl_coef, entropy_coef, validate, backend,
    )  # fmt: skip
    _vocabulary.check_count("logits", logits, tokens)
    _vocabulary.check(tokens, ess_process_group)
    rows = _vocabulary.row_arguments(logits, labels, mask, temperature, softcap)
    resolved = _backend.resolve(backend, logits)
    with_entropy = return_entropy or entropy_coef != 0
    differentiated = torch.is_grad_enabled() and logits.requires_grad
    if differentiated and context is not None and process_group is None and resolved == "triton":
        return _formed_with_the_loss(logits, rows, tokens, with_entropy, inplace_backward)
    log_probs, entropy = _row_values(logits, rows, process_group, with_entropy, inplace_backward, resolved)
    return _vocabulary.token_loss(tokens, log_probs, entropy if with_entropy else None, ess_process_group)


def _formed_with_the_loss(
    logits: Tensor, rows: RowArguments, tokens: TokenArguments, with_entropy: bool, in_place: bool
) -> P3OOutput:
    """Kernel K1K3, then K2 on its log-probs."""
    source = None if in_place else logits.detach()
    out = logits.detach() if in_place else _row_ops.empty_grad(logits.detach(), "triton")
    log_probs, entropy = _row_ops.row_loss_(
        out,
        source,
        *rows[:3],
        *_vocabulary.loss_tensors(tokens),
        rows.temperature,
        rows.softcap,
        with_entropy,
        tokens.kl_mode,
        float(tokens.ref_kl_coef),
        float(tokens.entropy_coef),
        "triton",
    )
    output = _vocabulary.token_loss(tokens, log_probs, entropy if with_entropy else None, None)
    return output._replace(loss=_row_ops.attach(output.loss, logits, out, "triton"))
