"""What the losses from logits and from hidden states share: arguments as operators take them, and the scale of g."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import _backend, _checks
from p3o_kernels._row_checks import check_row_options
from p3o_kernels.ess import ESSContext
from p3o_kernels.loss import P3OOutput, p3o_loss


class RowArguments(NamedTuple):
    """The arguments that describe rows, in the order of the operators."""

    labels: Tensor
    mask: Tensor | None
    row_temperature: Tensor | None
    temperature: float
    softcap: float


class TokenArguments(NamedTuple):
    """The arguments that ``p3o_loss`` and the losses of this package have in common."""

    behavior_log_probs: Tensor
    advantages: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    context: ESSContext | None
    reduction: str
    num_tokens: int | Tensor | None
    kl_mode: str
    clip_low: float
    clip_high: float
    ref_log_probs: Tensor | None
    ref_kl_coef: float
    entropy_coef: float
    validate: bool
    backend: str


def row_arguments(
    matrix: Tensor, labels: Tensor, mask: Tensor | None, temperature: float | Tensor, softcap: float | None
) -> RowArguments:
    check_row_options(matrix, temperature, softcap)
    per_row = temperature.detach().float() if isinstance(temperature, Tensor) else None
    number = 1.0 if isinstance(temperature, Tensor) else float(temperature)
    return RowArguments(labels.long(), mask, per_row, number, float(softcap or 0.0))


def check(tokens: TokenArguments, ess_process_group: ProcessGroup | None) -> None:
    """Everything ``p3o_loss`` would refuse, before any work on the vocabulary."""
    behavior = tokens.behavior_log_probs
    _checks.check_tokens(
        {"behavior_log_probs": behavior, "ref_log_probs": tokens.ref_log_probs},
        tokens.advantages,
        tokens.mask,
        tokens.cu_seqlens,
    )
    numbers = {
        "clip_low": tokens.clip_low,
        "clip_high": tokens.clip_high,
        "ref_kl_coef": tokens.ref_kl_coef,
        "entropy_coef": tokens.entropy_coef,
    }
    _checks.check_options(tokens.reduction, tokens.kl_mode, numbers, tokens.num_tokens)
    _checks.check_terms(tokens.ref_log_probs, tokens.ref_kl_coef, tokens.behavior_log_probs, tokens.entropy_coef)
    _checks.check_scope(behavior, tokens.context, ess_process_group, "ess_process_group")
    _backend.resolve(tokens.backend, behavior)


def check_count(name: str, matrix: Tensor, tokens: TokenArguments) -> None:
    behavior = tokens.behavior_log_probs
    if isinstance(behavior, Tensor) and behavior.shape != matrix.shape[:1]:
        raise ValueError(
            f"behavior_log_probs must be [T] = [{matrix.shape[0]}], one for each row of {name}; got "
            f"{tuple(behavior.shape)}"
        )


def token_loss(
    tokens: TokenArguments, log_probs: Tensor, entropy: Tensor | None, ess_process_group: ProcessGroup | None
) -> P3OOutput:
    """``p3o_loss`` of these log-probs; H has a gradient only where its coefficient is not 0."""
    if entropy is not None and tokens.entropy_coef == 0:
        entropy = entropy.detach()
    behavior, advantages, mask, *_ = tokens
    options: dict[str, Any] = tokens._asdict()
    for name in ("behavior_log_probs", "advantages", "mask"):
        del options[name]
    return p3o_loss(log_probs, behavior, advantages, mask, entropy=entropy, process_group=ess_process_group, **options)


def gradient_scale(tokens: TokenArguments) -> Tensor:
    """[] float64: d loss / d (sum of L), known before the loss is; whatever it is, masked rows get zeros."""
    mask, behavior, num_tokens = tokens.mask, tokens.behavior_log_probs, tokens.num_tokens
    if tokens.reduction != "mean":
        return behavior.new_ones((), dtype=torch.float64)
    if isinstance(num_tokens, Tensor):
        return num_tokens.detach().reshape(()).to(behavior.device, torch.float64).reciprocal()
    if num_tokens is None and mask is not None:
        return mask.sum().clamp_min(1).double().reciprocal()
    count = behavior.numel() if num_tokens is None else num_tokens
    return behavior.new_full((), 1.0 / max(count, 1), dtype=torch.float64)


def loss_tensors(tokens: TokenArguments) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor]:
    """blp, A, cu_seqlens (only with A per sequence), e, ref and the scale of g, as operators take them."""
    if tokens.context is None:
        raise ValueError("the gradient can be formed with the loss only when e is given")
    cu_seqlens, advantages = tokens.cu_seqlens, tokens.advantages
    per_sequence = cu_seqlens is not None and advantages.shape == (cu_seqlens.numel() - 1,)
    reference = tokens.ref_log_probs
    return (
        tokens.behavior_log_probs.detach().float(),
        advantages.detach().float(),
        cu_seqlens if per_sequence else None,
        tokens.context.ess,
        None if reference is None else reference.detach().float(),
        gradient_scale(tokens),
    )
