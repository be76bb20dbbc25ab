"""The P3O objective of one micro-batch, in the form that Megatron's schedules ask of a loss function.

A micro-batch gives a token *sum*, the exact count of its valid tokens on this rank, and sums for the metrics. Megatron
adds the counts over micro-batches and DP x CP ranks and divides the gradients once (calculate_per_token_loss), so the
objective does not depend on how a step is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from p3o_kernels import ESSContext, P3OOutput, RatioStats, p3o_loss_from_logits, ratio_stats, token_log_probs
from p3o_train.parallel import ParallelGroups
from p3o_train.types import PackedBatch

SCOPES = ("micro-batch", "step")


@dataclass(frozen=True)
class Objective:
    """What is optimised; the fields are those of ``p3o_kernels.p3o_loss_from_logits`` of the same names."""

    ess_scope: str = "micro-batch"
    """"micro-batch": e from the tokens of each micro-batch index, over DP x CP. "step": one frozen e for the optimizer
    step, from a pass without gradients."""
    kl_mode: str = "proxy_safe"
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coef: float = 0.0
    ref_kl_coef: float = 0.0
    temperature: float = 1.0
    """tau of the trainer: it divides the logits."""

    def __post_init__(self) -> None:
        if self.ess_scope not in SCOPES:
            raise ValueError(f"ess_scope must be one of {', '.join(SCOPES)}; got {self.ess_scope!r}")


def packed_logits(output: Tensor, batch: PackedBatch) -> Tensor:
    """[T, V / tp]: a model's output [1, T, V / tp], or [T, 1, V / tp] as the hidden layers order it.

    Raises:
        ValueError: another shape, naming both.
    """
    tokens, shape = batch.tokens.numel(), tuple(output.shape)
    if output.dim() == 3 and output.shape[0] == 1:
        output = output[0]
    elif output.dim() == 3 and output.shape[1] == 1:
        output = output[:, 0]
    if output.dim() != 2 or output.shape[0] != tokens:
        raise ValueError(
            f"the model's output must be [1, T, V] or [T, 1, V] with T = {tokens} tokens of the micro-batch, got "
            f"{shape}"
        )
    return output


@torch.no_grad()
def micro_batch_statistics(
    logits: Tensor, batch: PackedBatch, objective: Objective, groups: ParallelGroups
) -> RatioStats:
    """S1, S2, N and the invalid count of this rank's tokens, for a step's e; nothing is read back."""
    log_probs = token_log_probs(
        logits, batch.labels, mask=batch.mask, temperature=objective.temperature, process_group=groups.tensor
    )
    if isinstance(log_probs, tuple):
        raise TypeError("token_log_probs returned an entropy that was not asked for")
    return ratio_stats(log_probs, batch.behavior_log_probs, batch.mask)


def micro_batch_loss(
    logits: Tensor,
    batch: PackedBatch,
    objective: Objective,
    groups: ParallelGroups,
    context: ESSContext | None = None,
    ref_log_probs: Tensor | None = None,
) -> P3OOutput:
    """Token sum of the loss, connected to ``logits`` also without a valid token, with the exact count and metrics.

    Args:
        logits: [T, V / tp], before the temperature.
        batch: the micro-batch; a dummy enters the collectives and adds exact zeros.
        context: the frozen e of the step; needed in step scope, refused in micro-batch scope.
        ref_log_probs: [T] of a reference policy, needed for ``ref_kl_coef``.

    Raises:
        RuntimeError: step scope without a context: the pre-pass must run before.
        ValueError: micro-batch scope with a context.
    """
    if objective.ess_scope == "step" and context is None:
        raise RuntimeError(
            'ess_scope="step" needs the frozen e of the step: the pre-pass must run before the training pass'
        )
    if objective.ess_scope == "micro-batch" and context is not None:
        raise ValueError('ess_scope="micro-batch" takes e from each micro-batch, but a context was given')
    return p3o_loss_from_logits(
        logits,
        batch.labels,
        batch.behavior_log_probs,
        batch.advantages,
        batch.mask,
        cu_seqlens=batch.local_cu_seqlens,
        context=context,
        ess_process_group=groups.data_context if context is None else None,
        reduction="sum",
        kl_mode=objective.kl_mode,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        ref_log_probs=ref_log_probs,
        ref_kl_coef=objective.ref_kl_coef,
        entropy_coef=objective.entropy_coef,
        validate=False,  # the step decides once, on every rank
        temperature=objective.temperature,
        process_group=groups.tensor,
    )
