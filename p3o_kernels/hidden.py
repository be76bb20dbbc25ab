"""Log-probabilities and the P3O loss from hidden states, without ever holding [T, V] logits.

    z = X W^T + b      X hidden [T, H], W weight [V, H], b bias [V]

then as in ``logits``. The GEMMs are PyTorch's; logits exist one tile at a time.

The functions take tensors, not modules: under DDP or FSDP call them inside the wrapped module's forward, where its
parameters are gathered and its hooks see their gradients.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import _backend, _linear_ops, _row_ops, _vocabulary
from p3o_kernels._collectives import gather_partials, sum_gradient, vocab_start
from p3o_kernels._linear import Layer, forms_gradients_forward
from p3o_kernels._row_checks import check_layer, check_main_grad, check_valid_tokens, check_workspace
from p3o_kernels._vocabulary import RowArguments, TokenArguments
from p3o_kernels.ess import ESSContext
from p3o_kernels.loss import P3OOutput

WORKSPACE_BYTES = 512 * 2**20


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    process_group: ProcessGroup | None = None,
    return_entropy: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    valid_tokens: int | None = None,
    main_grad: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each label, and the entropy of each row, differentiable in hidden, weight and bias.

    Args:
        hidden: X, [T, H] float32, float16 or bfloat16. With ``process_group`` the same on every rank.
        weight: W, [V, H], same dtype. With ``process_group`` this rank's shard [V / ranks, H], entries
            rank * V / ranks onward. Frozen (requires_grad False): no work for its gradient is done.
        labels: [T] int64 or int32 ids over the whole vocabulary, already shifted.
        bias: b, [V] like the weight's rows.
        mask: [T] bool; rows with False get exact zeros. They are left out of the GEMMs where the number of valid rows
            is known on the host: on a CPU, or with ``valid_tokens``.
        temperature, softcap, return_entropy, backend: as in ``token_log_probs``.
        process_group: tensor-parallel group. One all_gather of 16 bytes a row forward; the gradient of ``hidden`` is
            summed over the group by one all_reduce backward, as Megatron's ColumnParallelLinear does, so the caller
            must not reduce it again (under sequence parallelism: gather hidden without a reduce-scatter backward).
        workspace_bytes: bound of what is held beside inputs and gradients: a tile of logits and, for half precision,
            the float32 sum of d(hidden).
        valid_tokens: the number of True entries of ``mask``, or an upper bound, when it is known on the host: GEMMs
            then run on that many rows without a wait for the GPU. A bound that is too small gives NaN.
        main_grad: float32 [V, H] that the backward pass adds the gradient of ``weight`` to, as Megatron keeps it;
            weight itself then gets none. Eager mode only.

    Returns:
        [T] float32 in nats, or two of them with ``return_entropy``.

    Raises:
        ValueError: shapes, devices or options that do not fit together.
        TypeError: a wrong dtype or type, or dtypes that differ: nothing is cast.

    Cost: one GEMM forward and three backward (two with a frozen weight), logits being recomputed by parts of the
    vocabulary: each part of d(weight) is summed in float32 and written once.
    """
    check_layer(hidden, weight, bias, labels, mask)
    _check_memory(hidden, weight, mask, workspace_bytes, valid_tokens, main_grad)
    rows = _vocabulary.row_arguments(hidden, labels, mask, temperature, softcap)
    resolved = _backend.resolve(backend, hidden)
    memory = (-1 if valid_tokens is None else valid_tokens, workspace_bytes, resolved)
    layer = Layer(hidden, weight, bias)
    log_probs, entropy = _linear_values(layer, rows, process_group, return_entropy, main_grad, memory)
    return (log_probs, entropy) if return_entropy else log_probs


def _check_memory(
    hidden: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    workspace_bytes: int,
    valid_tokens: int | None,
    main_grad: Tensor | None,
) -> None:
    check_workspace(workspace_bytes)
    check_valid_tokens(valid_tokens, mask, hidden.shape[0])
    check_main_grad(main_grad, weight)


def _linear_values(
    layer: Layer,
    rows: RowArguments,
    process_group: ProcessGroup | None,
    with_entropy: bool,
    main_grad: Tensor | None,
    memory: tuple[int, int, str],
) -> tuple[Tensor, Tensor]:
    vocab = layer.weight.shape[0]
    numbers = (rows.temperature, rows.softcap, vocab_start(vocab, process_group), with_entropy, *memory)
    tensors = (rows.labels, rows.mask, rows.row_temperature)
    partials = None
    if process_group is not None:
        detached = (None if tensor is None else tensor.detach() for tensor in layer)
        partial = _linear_ops.linear_partials(*detached, *tensors, *numbers)
        partials = gather_partials(partial, vocab, process_group)
        layer = layer._replace(hidden=sum_gradient(layer.hidden, process_group))
    log_probs, entropy, _, _ = _linear_ops.linear_values(*layer, *tensors, partials, main_grad, *numbers)
    return log_probs, entropy


def p3o_loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
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
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    process_group: ProcessGroup | None = None,
    return_entropy: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    valid_tokens: int | None = None,
    main_grad: Tensor | None = None,
    backend: str = "auto",
) -> P3OOutput:
    """P3O loss of a packed batch from hidden states, differentiable in hidden, weight and bias.

    The log-probabilities are those of ``linear_log_probs``, the loss that of ``p3o_loss``; arguments and errors are as
    described there, except:

    Args:
        hidden: [T, H].
        labels: [T]. Rows whose mask is False may carry any label.
        behavior_log_probs: [T].
        advantages: [T], or [B] with ``cu_seqlens``.
        context: with e given, gradients are formed while the loss is computed: 3 GEMMs in place of 4, none of them in
            the backward pass. That needs a reduction to one number, no ``process_group``, no ``main_grad``, and a
            d(weight) that can be summed exactly where it ends: a float32 weight, a frozen one, or all tokens in one
            tile of ``workspace_bytes``. Otherwise, and in micro-batch scope, logits are recomputed.
        ess_process_group: micro-batch scope: reduce S1, S2, N over these ranks (data and context parallel).
        entropy_coef: weight of the entropy bonus; the entropy is that of the logits, with its gradient.
        process_group: the tensor-parallel group that the vocabulary is cut over.
        return_entropy: compute the entropy also when its coefficient is 0, for ``metrics`` alone.

    Returns:
        ``P3OOutput(loss, num_tokens, context, metrics)``.

    Where gradients are formed with the loss, a second backward pass is refused.
    """
    check_layer(hidden, weight, bias, labels, mask)
    _check_memory(hidden, weight, mask, workspace_bytes, valid_tokens, main_grad)
    tokens = TokenArguments(
        behavior_log_probs, advantages, mask, cu_seqlens, context, reduction, num_tokens, kl_mode, clip_low, clip_high,
        ref_log_probs, ref_kl_coef, entropy_coef, validate, backend,
    )  # fmt: skip
    _vocabulary.check_count("hidden", hidden, tokens)
    _vocabulary.check(tokens, ess_process_group)
    rows = _vocabulary.row_arguments(hidden, labels, mask, temperature, softcap)
    memory = (-1 if valid_tokens is None else valid_tokens, workspace_bytes, _backend.resolve(backend, hidden))
    with_entropy = return_entropy or entropy_coef != 0
    layer = Layer(hidden, weight, bias)
    if process_group is None and main_grad is None and _forms_gradients(layer, tokens, valid_tokens, workspace_bytes):
        return _formed_with_the_loss(layer, rows, tokens, with_entropy, memory)
    log_probs, entropy = _linear_values(layer, rows, process_group, with_entropy, main_grad, memory)
    return _vocabulary.token_loss(tokens, log_probs, entropy if with_entropy else None, ess_process_group)


def _forms_gradients(layer: Layer, tokens: TokenArguments, valid_tokens: int | None, workspace_bytes: int) -> bool:
    if tokens.context is None or tokens.reduction == "none" or not torch.is_grad_enabled():
        return False
    if not any(tensor is not None and tensor.requires_grad for tensor in layer):
        return False
    count = layer.hidden.shape[0] if valid_tokens is None else valid_tokens
    return forms_gradients_forward(layer, count, layer.weight.requires_grad, workspace_bytes)


def _formed_with_the_loss(
    layer: Layer, rows: RowArguments, tokens: TokenArguments, with_entropy: bool, memory: tuple[int, int, str]
) -> P3OOutput:
    detached = [None if tensor is None else tensor.detach() for tensor in layer]
    needed = [tensor is not None and tensor.requires_grad for tensor in layer]
    backend = memory[-1]
    log_probs, entropy, *grads = _linear_ops.linear_loss(
        *detached,
        *rows[:3],
        *_vocabulary.loss_tensors(tokens),
        rows.temperature,
        rows.softcap,
        with_entropy,
        tokens.kl_mode,
        float(tokens.ref_kl_coef),
        float(tokens.entropy_coef),
        *memory[:2],
        needed,
        backend,
    )
    output = _vocabulary.token_loss(tokens, log_probs, entropy if with_entropy else None, None)
    loss = output.loss
    for tensor, grad, wanted in zip(layer, grads, needed, strict=True):
        if wanted:
            loss = _row_ops.attach(loss, tensor, grad, backend)
    return output._replace(loss=loss)
