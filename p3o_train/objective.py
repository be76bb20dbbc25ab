"""The objective of one micro-batch, in the form that Megatron's schedules ask of a loss function.

A micro-batch gives a token *sum*, the exact count of its valid tokens on this rank, and sums for the metrics. Megatron
adds the counts over micro-batches and DP x CP ranks and divides the gradients once (calculate_per_token_loss), so the
objective does not depend on how a step is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from p3o_kernels import (
    ESSContext,
    P3OMetrics,
    linear_log_probs,
    p3o_loss,
    p3o_loss_from_hidden,
    p3o_loss_from_logits,
    token_log_probs,
)
from p3o_train.baselines import BASELINES, baseline_loss
from p3o_train.kept import kept_log_probs
from p3o_train.parallel import ParallelGroups
from p3o_train.types import PackedBatch

ESTIMATORS = ("p3o", *BASELINES)
SCOPES = ("micro-batch", "step")
SOURCES = ("prepass", "reuse")
WITHOUT_PULL = "P3O without its pull is there for comparisons, and takes the frozen e of a step alone"


@dataclass(frozen=True)
class Objective:
    """What is optimised; most fields are those of ``p3o_kernels.p3o_loss_from_logits`` of the same names."""

    advantage_estimator: str = "p3o"
    """"p3o", or for comparison, on the same tokens and counts, "grpo", "cispo" or "pg" (``p3o_train.baselines``)."""
    ess_scope: str = "micro-batch"
    """"micro-batch": e from the tokens of each micro-batch index, over DP x CP. "step": one frozen e for the optimizer
    step. The other estimators have no e and ignore it."""
    context_source: str = "prepass"
    """Of a step's e. "prepass": a forward pass without gradients before the training pass. "reuse": the trainer's own
    log-prob pass, when it ran with these weights; no extra forward pass."""
    from_hidden: bool = False
    """The output layer is bypassed: log-probs and gradients come from hidden states and its weight, tile by tile, and
    [T, V] logits never exist."""
    kl_mode: str = "proxy_safe"
    """Of P3O; "off" leaves the pull towards the behavior policy out, and needs step scope."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """For GRPO and CISPO the clip range, otherwise margins of a metric. CISPO is published with clip_low 1, which is no
    lower bound."""
    entropy_coef: float = 0.0
    ref_kl_coef: float = 0.0
    temperature: float = 1.0
    """tau of the trainer: it divides the logits."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("advantage_estimator", ESTIMATORS),
            ("ess_scope", SCOPES),
            ("context_source", SOURCES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.advantage_estimator == "p3o" and self.kl_mode == "off" and self.ess_scope != "step":
            raise ValueError(f'kl_mode="off" needs ess_scope="step", got {self.ess_scope!r}: {WITHOUT_PULL}')

    @property
    def needs_context(self) -> bool:
        """Whether e must be known before the training pass."""
        return self.advantage_estimator == "p3o" and self.ess_scope == "step"


class LossSum(NamedTuple):
    """What one micro-batch contributes on this rank."""

    loss: Tensor
    """[] float32, a sum over tokens, connected to the model also without a valid token."""
    metrics: P3OMetrics
    log_probs: Tensor | None = None
    """[T] float32, detached; None where the loss makes them inside of a kernel."""


def micro_batch_log_probs(
    rows: Tensor,
    batch: PackedBatch,
    objective: Objective,
    groups: ParallelGroups,
    weight: Tensor | None = None,
    return_entropy: bool = False,
) -> Any:
    """[T] float32 log-probs of the labels, with ``return_entropy`` also [T] entropies; 0 where the mask is False.

    Args:
        rows: [T, V / tp] logits before the temperature; with ``weight``, [T, H] hidden states.
        weight: [V / tp, H] of the output layer.

    Where the batch records kept tokens, both are over these (``p3o_train.kept``).

    Raises:
        ValueError: kept tokens together with ``weight``.
    """
    if batch.kept_token_ids is not None:
        made = _kept_log_probs(rows, batch, objective, groups, weight)
        return made if return_entropy else made[0]
    options: dict[str, Any] = {
        "mask": batch.mask,
        "temperature": objective.temperature,
        "process_group": groups.tensor,
        "return_entropy": return_entropy,
    }
    if weight is None:
        return token_log_probs(rows, batch.labels, **options)
    return linear_log_probs(rows, weight, batch.labels, valid_tokens=batch.num_tokens, **options)


def micro_batch_loss(
    rows: Tensor,
    batch: PackedBatch,
    objective: Objective,
    groups: ParallelGroups,
    context: ESSContext | None = None,
    weight: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
) -> LossSum:
    """The token sum of the loss and the metrics of one micro-batch; a dummy adds exact zeros.

    Args:
        rows, weight: as in ``micro_batch_log_probs``.
        batch: the micro-batch; a dummy enters the collectives as well.
        context: the frozen e of the step; needed in step scope, refused in micro-batch scope and without P3O.
        ref_log_probs: [T] of a reference policy, needed for ``ref_kl_coef``.

    Raises:
        RuntimeError: step scope without a context: the pre-pass must run before.
        ValueError: a context that the objective has no use for.
    """
    if objective.needs_context and context is None:
        raise RuntimeError(
            'ess_scope="step" needs the frozen e of the step: the pre-pass must run before the training pass'
        )
    if not objective.needs_context and context is not None:
        raise ValueError('only P3O with ess_scope="step" takes a frozen e, but a context was given')
    if objective.advantage_estimator != "p3o" or objective.kl_mode == "off":
        return _baseline(rows, batch, objective, groups, context, weight, ref_log_probs)
    options: dict[str, Any] = {
        "cu_seqlens": batch.local_cu_seqlens,
        "context": context,
        "ess_process_group": groups.data_context if context is None else None,
        "reduction": "sum",
        "kl_mode": objective.kl_mode,
        "clip_low": objective.clip_low,
        "clip_high": objective.clip_high,
        "ref_log_probs": ref_log_probs,
        "ref_kl_coef": objective.ref_kl_coef,
        "entropy_coef": objective.entropy_coef,
        "validate": False,  # the step decides once, on every rank
    }
    if batch.kept_token_ids is not None:
        return _p3o_over_kept(rows, batch, objective, groups, weight, options)
    options |= {"temperature": objective.temperature, "process_group": groups.tensor}
    targets = (batch.labels, batch.behavior_log_probs, batch.advantages, batch.mask)
    if weight is None:
        made = p3o_loss_from_logits(rows, *targets, **options)
    else:
        made = p3o_loss_from_hidden(rows, weight, *targets, valid_tokens=batch.num_tokens, **options)
    return LossSum(made.loss, made.metrics)


def _kept_log_probs(
    rows: Tensor, batch: PackedBatch, objective: Objective, groups: ParallelGroups, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    if weight is not None or batch.kept_token_ids is None:
        raise ValueError(
            "from_hidden=True (--loss-from-hidden) normalises over the whole vocabulary, but these samples record the "
            "tokens that they were sampled among; set it to False, or sample without top-p, top-k and min-p"
        )
    return kept_log_probs(
        rows,
        batch.labels,
        batch.kept_token_ids,
        batch.mask,
        temperature=objective.temperature,
        process_group=groups.tensor,
    )


def _p3o_over_kept(
    rows: Tensor,
    batch: PackedBatch,
    objective: Objective,
    groups: ParallelGroups,
    weight: Tensor | None,
    options: dict[str, Any],
) -> LossSum:
    log_probs, entropy = _kept_log_probs(rows, batch, objective, groups, weight)
    options["process_group"] = options.pop("ess_process_group")
    options["entropy"] = entropy if objective.entropy_coef else entropy.detach()
    made = p3o_loss(log_probs, batch.behavior_log_probs, batch.advantages, batch.mask, **options)
    return LossSum(made.loss, made.metrics)


def _baseline(
    rows: Tensor,
    batch: PackedBatch,
    objective: Objective,
    groups: ParallelGroups,
    context: ESSContext | None,
    weight: Tensor | None,
    ref_log_probs: Tensor | None,
) -> LossSum:
    entropy = None
    made = micro_batch_log_probs(rows, batch, objective, groups, weight, bool(objective.entropy_coef))
    if objective.entropy_coef:
        made, entropy = made
    loss, metrics = baseline_loss(
        objective.advantage_estimator,
        made,
        batch,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        ess=None if context is None else context.ess,
        entropy=entropy,
        entropy_coef=objective.entropy_coef,
        ref_log_probs=ref_log_probs,
        ref_kl_coef=objective.ref_kl_coef,
    )
    return LossSum(loss, metrics, made.detach())
