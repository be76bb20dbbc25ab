"""The passes over the micro-batches of an optimizer step, by Megatron-Core's own pipeline schedule.

    step scope, prepass     1. forward only, without gradients: S1, S2, N of every micro-batch; one reduction freezes e
                            2. forward and backward with that e, over the same micro-batches
    step scope, reuse       1. no pass: S1, S2, N from the log-probs of ``policy_log_probs``, run with these weights
    micro-batch scope       2. alone: every micro-batch reduces its own e
    GRPO, CISPO, PG         2. alone

Gradients are left as Megatron leaves them: summed over tokens, divided once by the token count of the whole step.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import ESSContext, P3OMetrics, RatioStats, ratio_stats
from p3o_train.histogram import RatioHistogram
from p3o_train.objective import Objective, micro_batch_log_probs, micro_batch_loss
from p3o_train.parallel import ParallelGroups, check_equal_counts, together
from p3o_train.replay import MicroBatches, ReplayCheck, replayed
from p3o_train.schedule import LossFunction, run_schedule
from p3o_train.step import CheckedFinalizer, StepStatistics, VersionStatistics, overlaps
from p3o_train.types import PackedBatch


class PolicyLogProbs(NamedTuple):
    """The trainer's own log-probs of some micro-batches."""

    values: tuple[Tensor, ...]
    """[T] float32 for each micro-batch, 0 where its mask is False; empty on pipeline stages before the last one."""
    seen: tuple[Tensor, ...]
    """What ``ReplayCheck`` noted of each micro-batch."""
    weight_version: int
    """Of the weights that the pass ran with, as the caller counts them."""


class StepResult(NamedTuple):
    """What a step leaves besides gradients."""

    context: ESSContext | None
    """The frozen e of step scope."""
    metrics: P3OMetrics | None
    """Sums over this rank's micro-batches; None on pipeline stages before the last one."""
    prepass_seconds: float
    """What e took, up to its arrival on the host; 0 where there is none to be known before."""
    version_ess: dict[int, float]
    """Weight version -> e of the tokens that it sampled; empty unless asked for, and without step scope."""
    histogram: Tensor | None
    """[``NUM_BINS``] int64: this rank's valid tokens by log-ratio (``p3o_train.histogram``). None where no log-probs
    leave the loss: in P3O's micro-batch scope, and on pipeline stages before the last one."""


def policy_log_probs(
    model: Sequence[Any],
    batches: Sequence[PackedBatch],
    objective: Objective,
    groups: ParallelGroups,
    weight_version: int = 0,
) -> PolicyLogProbs:
    """A forward pass without gradients: log-probs of every micro-batch under the current weights.

    The arguments are those of ``step_gradients``, and so are the errors that concern them. Dropout, if the model has
    it, is active or not as the model is in training mode or not.
    """
    values: list[Tensor] = []
    check, device = ReplayCheck(), _device(model)

    def collect(rows: Tensor, batch: PackedBatch, weight: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        values.append(micro_batch_log_probs(rows, batch, objective, groups, weight))
        return rows.new_zeros(()), {}

    with together(groups, device):
        _check_batches(batches)
    check_equal_counts(len(batches), groups, device)
    with together(groups, device):
        _forward_pass(model, MicroBatches(batches), objective, groups, collect, check)
    return PolicyLogProbs(tuple(values), check.first, weight_version)


def step_gradients(
    model: Sequence[Any],
    batches: Sequence[PackedBatch],
    objective: Objective,
    groups: ParallelGroups,
    *,
    log_probs: PolicyLogProbs | None = None,
    ref_log_probs: Sequence[Tensor] | None = None,
    weight_version: int = 0,
    sampled_by: Sequence[int] = (),
) -> StepResult:
    """Gradients of one optimizer step in the parameters of ``model``.

    Args:
        model: the chunks of this rank, as Megatron's schedules take them. Their config needs
            ``calculate_per_token_loss`` and ``finalize_model_grads_func``.
        batches: this rank's micro-batches; every rank has the same number of them, dummies included.
        objective: what is optimised.
        groups: as ``ParallelGroups.from_megatron`` gives them.
        log_probs: of the same micro-batches, needed for ``context_source="reuse"``.
        ref_log_probs: [T] of the reference policy for each micro-batch, needed for ``ref_kl_coef`` on the last stage.
        weight_version: of the current weights; ``log_probs`` of other ones are refused.
        sampled_by: weight versions in all micro-batches of all ranks that step scope reports e of, one by one.

    Every rank raises the same error, and nothing has moved then but gradients: weights, optimizer and random streams
    are as before, and the groups stay usable. Two kinds of failure leave other ranks waiting until the timeout of their
    process group: in the middle of a layer, those that share the layer or the pipeline with the rank; and, where
    replicas have collectives before the last backward pass ends (the loss itself of micro-batch scope, gradients that
    are summed meanwhile: ``overlap_grad_reduce``), the replicas.

    Raises:
        ValueError: invalid data; different numbers of micro-batches, or none; an argument that is missing, or log-probs
            of other weights.
        RuntimeError: no valid token in the whole step; a rank that failed in one of its passes; a configuration that
            would not divide by the token count; passes that saw different tokens.
    """
    from megatron.core.utils import get_model_config

    config, device = get_model_config(model[0]), _device(model)
    with together(groups, device):
        _check_batches(batches)
        if not config.calculate_per_token_loss:
            raise RuntimeError(
                "calculate_per_token_loss must be True: otherwise every micro-batch is divided by its own token count "
                "and the objective depends on how the step is cut"
            )
        reused = _checked_source(objective, log_probs, weight_version, len(batches), groups)
        references = _references(ref_log_probs, batches, objective, groups)
    check_equal_counts(len(batches), groups, device)
    iterator, check = MicroBatches(batches), ReplayCheck(() if reused is None else reused.seen)
    context: ESSContext | None = None
    prepass_seconds = 0.0
    versions = VersionStatistics(sampled_by if objective.needs_context else ())
    histogram = RatioHistogram()
    with _undone_on_error(iterator):
        if objective.needs_context:
            begin = time.perf_counter()
            context = _frozen_context(model, iterator, objective, groups, check, reused, versions, histogram)
            prepass_seconds = time.perf_counter() - begin
        metrics = _training_pass(model, config, iterator, objective, groups, check, context, references, histogram)
    return StepResult(context, metrics, prepass_seconds, versions.ess(groups, device), histogram.counts)


def _device(model: Sequence[Any]) -> torch.device:
    device: torch.device = next(model[0].parameters()).device
    return device


def _check_batches(batches: Sequence[PackedBatch]) -> None:
    if not batches:
        raise ValueError("batches is empty, but a step needs a micro-batch on every rank; give it a dummy_batch")


def _references(
    ref_log_probs: Sequence[Tensor] | None, batches: Sequence[PackedBatch], objective: Objective, groups: ParallelGroups
) -> Iterator[Tensor | None]:
    """One for each micro-batch, None where the objective needs none."""
    if not objective.ref_kl_coef or not groups.is_last_stage:
        return itertools.repeat(None)
    found = None if ref_log_probs is None else len(ref_log_probs)
    if ref_log_probs is None or found != len(batches):
        raise ValueError(
            f"ref_kl_coef={objective.ref_kl_coef} needs ref_log_probs, one [T] for each of {len(batches)} "
            f"micro-batches; got {found}"
        )
    return iter(ref_log_probs)


def _checked_source(
    objective: Objective, log_probs: PolicyLogProbs | None, weight_version: int, count: int, groups: ParallelGroups
) -> PolicyLogProbs | None:
    """The log-probs to take statistics from; None where a pre-pass makes them."""
    if not objective.needs_context or objective.context_source == "prepass":
        return None
    if log_probs is None:
        raise ValueError(
            'context_source="reuse" needs log_probs, the result of policy_log_probs for these micro-batches; got None. '
            'Run it first, or set context_source="prepass"'
        )
    if log_probs.weight_version != weight_version:
        raise ValueError(
            f"log_probs were made by weights of version {log_probs.weight_version}, but these are version "
            f"{weight_version}: their e would belong to an older policy. Run policy_log_probs again, or set "
            'context_source="prepass"'
        )
    if groups.is_last_stage and len(log_probs.values) != count:
        raise ValueError(
            f"log_probs are of {len(log_probs.values)} micro-batches, but the step has {count}; run policy_log_probs "
            "on these micro-batches"
        )
    return log_probs


def _frozen_context(
    model: Sequence[Any],
    iterator: MicroBatches,
    objective: Objective,
    groups: ParallelGroups,
    check: ReplayCheck,
    reused: PolicyLogProbs | None,
    versions: VersionStatistics,
    histogram: RatioHistogram,
) -> ESSContext:
    statistics = StepStatistics()
    device = _device(model)

    def add(log_probs: Tensor, batch: PackedBatch) -> None:
        statistics.add(ratio_stats(log_probs, batch.behavior_log_probs, batch.mask))
        versions.add(log_probs, batch)
        histogram.add(log_probs, batch)

    def collect(rows: Tensor, batch: PackedBatch, weight: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        add(micro_batch_log_probs(rows, batch, objective, groups, weight), batch)
        return rows.new_zeros(()), {}

    with together(groups, device):
        if reused is None:
            _forward_pass(model, iterator, objective, groups, collect, check)
        elif groups.is_last_stage:
            for values, batch in zip(reused.values, iterator.batches, strict=True):
                add(values, batch)
    return statistics.freeze(groups, device)


def _forward_pass(
    model: Sequence[Any],
    iterator: MicroBatches,
    objective: Objective,
    groups: ParallelGroups,
    collect: LossFunction,
    check: ReplayCheck,
) -> None:
    """Without gradients and without a trace in iterator and random streams."""
    failures: list[Exception] = []
    with replayed(iterator), torch.no_grad():
        run_schedule(
            model,
            iterator,
            _to_the_end(collect, failures),
            check.record_first,
            from_hidden=objective.from_hidden,
            context_groups=groups.sub_contexts,
        )
    if failures:
        raise failures[0]


def _training_pass(
    model: Sequence[Any],
    config: Any,
    iterator: MicroBatches,
    objective: Objective,
    groups: ParallelGroups,
    check: ReplayCheck,
    context: ESSContext | None,
    references: Iterator[Tensor | None],
    histogram: RatioHistogram,
) -> P3OMetrics | None:
    metrics, begun, failures = list[Tensor](), list[PackedBatch](), list[Exception]()
    device, meeting = _device(model), _meeting(objective, groups)

    def loss(rows: Tensor, batch: PackedBatch, weight: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        begun.append(batch)
        made = micro_batch_loss(rows, batch, objective, groups, context, weight, next(references))
        metrics.append(made.metrics.vector)
        if made.log_probs is not None and context is None:  # with a context its pass has counted already
            histogram.add(made.log_probs, batch)
        return made.loss, {"loss_sum": made.loss.detach()}

    def invalid_tokens() -> Tensor | None:
        if failures:
            raise failures[0]
        if objective.needs_context:
            check.verify()
        total = _summed(metrics)
        return None if total is None else total.means()["invalid_tokens"]

    def catch_up() -> bool:
        # a loss that raised may have met the replicas or not
        if any(map(overlaps, model)) or (meeting is not None and len(begun) != len(metrics)):
            return False
        if meeting is not None and groups.is_last_stage:
            for _ in iterator.batches[len(metrics) :]:
                RatioStats.zeros(device).all_reduce(meeting)
        return True

    with CheckedFinalizer(config, groups, invalid_tokens, device, catch_up):
        run_schedule(
            model,
            iterator,
            _to_the_end(loss, failures) if meeting is None else loss,
            check.record_second,
            from_hidden=objective.from_hidden,
            training=True,
            context_groups=groups.sub_contexts,
        )
    return _summed(metrics)


def _meeting(objective: Objective, groups: ParallelGroups) -> ProcessGroup | None:
    """Where the replicas meet in the loss: for the e of micro-batch scope."""
    return groups.data_context if objective.advantage_estimator == "p3o" and not objective.needs_context else None


def _to_the_end(loss_function: LossFunction, failures: list[Exception]) -> LossFunction:
    """Keeps what ``loss_function`` raises in ``failures`` and gives zeros from then on.

    Other stages and ranks wait for this one in the micro-batches that are left; afterwards they can be told.
    """

    def call(rows: Tensor, batch: PackedBatch, weight: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        if not failures:
            try:
                return loss_function(rows, batch, weight)
            except Exception as error:  # the caller raises it after the pass
                failures.append(error)
        nothing = rows[:0].float().sum()  # connected, so that the backward pass runs
        return nothing if weight is None else nothing + weight[:0].float().sum(), {}

    return call


@contextlib.contextmanager
def _undone_on_error(iterator: MicroBatches) -> Iterator[None]:
    """Iterator and random streams are as before if the body raises; otherwise they stay where it left them."""
    with contextlib.ExitStack() as before:
        before.enter_context(replayed(iterator))
        yield
        with replayed(iterator):  # what the body left comes back after what was before
            before.close()


def _summed(vectors: Sequence[Tensor]) -> P3OMetrics | None:
    if not vectors:
        return None
    total = P3OMetrics(vectors[0])
    for vector in vectors[1:]:
        total = total + P3OMetrics(vector)
    return total
