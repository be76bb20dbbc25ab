"""The loss of slime, miles and Relax, whose custom loss functions have one signature and one kind of batch.

A batch holds lists with one entry a sample: loss masks over the whole response, and log-probs, behavior log-probs and
advantages over the response tokens that this context-parallel rank holds, in zigzag order.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import ESSContext, p3o_loss
from p3o_train.adapters._common import SLIME_NAMES, joined, metric_sums
from p3o_train.arguments import objective_from_arguments, validate_p3o_arguments
from p3o_train.layout import local_valid_mask
from p3o_train.objective import Objective
from p3o_train.types import ContextLayout


class Outputs(NamedTuple):
    """What a framework knows about one micro-batch on this rank."""

    log_probs: Sequence[Tensor]
    """Of every sample, float32, connected to the model."""
    entropy: Sequence[Tensor] | None
    layout: ContextLayout
    """Which response tokens this rank holds."""
    data_context: ProcessGroup | None
    """Ranks that the tokens of a micro-batch index add up over. None: this rank alone."""


class StepState(NamedTuple):
    """What is known of an optimizer step before its first gradient."""

    context: ESSContext | None
    """The frozen e of the step; None in micro-batch scope."""
    scale: Tensor | None
    """[] float64: the framework's token count of the step over the true one. None: not known."""


def checked_objective(args: Any) -> Objective:
    """The objective that ``args`` ask for, with this package's defaults where they say nothing.

    Names of ours that the framework's parser does not know (p3o_ess_scope, p3o_kl_mode, clip_low, clip_high) may come
    from its --custom-config-path.

    Raises:
        ValueError: arguments that P3O cannot be trained with, all of them together.
    """
    given = vars(args) | {"advantage_estimator": "p3o", "temperature_convention": "scaled"}
    # the loss takes the recorded log-probs whatever the flag says
    given["use_rollout_logprobs"] = True
    if given.get("p3o_ess_scope") == "step":
        given["p3o_context_source"] = "reuse"
    # kept tokens are recorded whenever top-p is not 1, and the framework's log-probs are over them
    given["record_kept_tokens"] = given.get("rollout_top_p", 1.0) != 1.0 and given.get("rollout_top_k", -1) == -1
    namespace = argparse.Namespace(**given)
    validate_p3o_arguments(namespace)
    return dataclasses.replace(objective_from_arguments(namespace), advantage_estimator="p3o")


def local_mask(batch: Mapping[str, Any], layout: ContextLayout) -> Tensor:
    """[T] bool over the response tokens of this rank; all False in a dummy.

    Raises:
        ValueError: lists of unequal length, a mask that does not fit its response.
    """
    padded = batch.get("padded_total_lengths")
    if padded is None and batch.get("max_seq_lens") is not None:
        padded = [layout.padded_length(length) for length in batch["max_seq_lens"]]
    mask = local_valid_mask(batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], layout, padded)
    return torch.zeros_like(mask) if batch.get("__is_dummy__", False) else mask


def check_no_phantoms(batch: Mapping[str, Any], repair: str) -> None:
    """That the framework counts no token for a sample without one. One host read.

    Raises:
        ValueError: a sample whose loss mask is empty.
    """
    masks = batch["loss_masks"]
    if batch.get("__is_dummy__", False) or not masks:
        return
    counts = torch.stack([mask.sum() for mask in masks])
    if empty := (counts == 0).nonzero().flatten().tolist():
        raise ValueError(
            f"the loss mask of sample {empty[0]} of this micro-batch is empty ({len(empty)} of {len(masks)} are), "
            "which is counted as one token in the divisor of the step, so every gradient of it would be too small; "
            + repair
        )


def micro_batch(
    args: Any, batch: Mapping[str, Any], outputs: Outputs, objective: Objective, state: StepState | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Token sum of the loss and of the metrics, on this rank, in units of the framework's token count.

    In micro-batch scope every rank of ``outputs.data_context`` enters one collective, dummies too, and invalid data
    raises on all of them. In step scope nothing is read back to the host.

    Raises:
        ValueError: missing or misfitting lists, invalid data.
    """
    mask = local_mask(batch, outputs.layout)
    named: dict[str, Sequence[Tensor] | None] = {
        "log_probs": outputs.log_probs,
        "rollout_log_probs": batch.get("rollout_log_probs"),
        "advantages": batch.get("advantages"),
    }
    if objective.ref_kl_coef:
        named["ref_log_probs"] = batch.get("ref_log_probs")
    if outputs.entropy is not None:
        named["entropy"] = outputs.entropy
    rows = joined(named, mask.numel())
    log_probs = rows["log_probs"]
    made = p3o_loss(
        log_probs,
        rows["rollout_log_probs"].to(log_probs.device),
        rows["advantages"].to(log_probs.device),
        mask.to(log_probs.device),
        context=None if state is None else state.context,
        process_group=outputs.data_context if objective.ess_scope == "micro-batch" else None,
        reduction="sum",
        kl_mode=objective.kl_mode,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        ref_log_probs=rows.get("ref_log_probs"),
        ref_kl_coef=objective.ref_kl_coef,
        entropy=rows.get("entropy"),
        entropy_coef=objective.entropy_coef,
        validate=objective.ess_scope == "micro-batch",
    )
    scale: Tensor | float = 1.0 if state is None or state.scale is None else state.scale
    loss = (made.loss.double() * scale).float() if isinstance(scale, Tensor) else made.loss
    metrics = {"loss": loss.detach()} | metric_sums(made.metrics, SLIME_NAMES, scale)
    if objective.ref_kl_coef:
        metrics["kl_loss"] = metrics["p3o/reference_kl"]
    return loss, metrics
