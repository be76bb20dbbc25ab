"""The passes over the micro-batches of an optimizer step, by Megatron-Core's own pipeline schedule.

    step scope          1. forward only, without gradients: S1, S2, N of every micro-batch; one reduction; e is frozen
                        2. forward and backward with that e, over the same micro-batches
    micro-batch scope   2. alone: every micro-batch reduces its own e

Gradients are left as Megatron leaves them: summed over tokens, divided once by the token count of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from p3o_kernels import ESSContext, P3OMetrics
from p3o_train.objective import Objective, micro_batch_loss, micro_batch_statistics, packed_logits
from p3o_train.packed_attention import packed_seq_params
from p3o_train.parallel import ParallelGroups
from p3o_train.replay import MicroBatches, ReplayCheck, replayed
from p3o_train.step import StepStatistics, checked_finalizer
from p3o_train.types import PackedBatch


class StepResult(NamedTuple):
    """What a step leaves besides gradients."""

    context: ESSContext | None
    """The frozen e; None in micro-batch scope."""
    metrics: P3OMetrics | None
    """Sums over this rank's micro-batches; None on pipeline stages before the last one."""


class _Pass:
    """One pass of the schedule: the forward step that Megatron calls, and what comes out of it."""

    def __init__(self, objective: Objective, groups: ParallelGroups, check: ReplayCheck) -> None:
        self.objective, self.groups, self.check = objective, groups, check
        self.statistics = StepStatistics()
        self.context: ESSContext | None = None
        self.metrics: list[Tensor] = []

    def invalid_tokens(self) -> Tensor | None:
        """[] over the micro-batches so far; None on stages without a loss."""
        total = _summed(self.metrics)
        return None if total is None else total.means()["invalid_tokens"]

    def statistics_step(self, iterator: Iterator[PackedBatch], model: Any) -> Any:
        batch = next(iterator)
        self.check.record(batch, second_pass=False)

        def collect(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logits = packed_logits(output, batch)
            self.statistics.add(micro_batch_statistics(logits, batch, self.objective, self.groups))
            return output.new_zeros(()), _count(batch, output), {}

        return _run(model, batch), collect

    def training_step(self, iterator: Iterator[PackedBatch], model: Any) -> Any:
        batch = next(iterator)
        self.check.record(batch, second_pass=True)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logits = packed_logits(output, batch)
            made = micro_batch_loss(logits, batch, self.objective, self.groups, self.context)
            self.metrics.append(made.metrics.vector)
            return made.loss, _count(batch, output), {"loss_sum": made.loss.detach()}

        return _run(model, batch), loss


def _run(model: Any, batch: PackedBatch) -> Any:
    return model(batch.tokens[None], batch.position_ids[None], None, packed_seq_params=packed_seq_params(batch))


def _count(batch: PackedBatch, like: Tensor) -> Tensor:
    """The exact count of this rank, an integer: Megatron adds it to an integer."""
    return torch.tensor(batch.num_tokens, dtype=torch.int, device=like.device)


def step_gradients(
    model: Sequence[Any], batches: Sequence[PackedBatch], objective: Objective, groups: ParallelGroups
) -> StepResult:
    """Gradients of one optimizer step in the parameters of ``model``.

    Args:
        model: the chunks of this rank, as Megatron's schedules take them. Their config needs
            ``calculate_per_token_loss`` and ``finalize_model_grads_func``.
        batches: this rank's micro-batches; every data-parallel rank has the same number of them, dummies included.
        objective: what is optimised.
        groups: as ``ParallelGroups.from_megatron`` gives them.

    Raises:
        ValueError: invalid data on any rank, on all of them alike.
        RuntimeError: no valid token in the whole step, a configuration that would not divide by the token count, or
            passes that saw different tokens.
    """
    from megatron.core.utils import get_model_config

    config = get_model_config(model[0])
    if not config.calculate_per_token_loss:
        raise RuntimeError(
            "calculate_per_token_loss must be True: otherwise every micro-batch is divided by its own token count and "
            "the objective depends on how the step is cut"
        )
    iterator, check = MicroBatches(batches), ReplayCheck()
    run = _Pass(objective, groups, check)
    if objective.ess_scope == "step":
        with replayed(iterator), torch.no_grad():
            _schedule(run.statistics_step, iterator, model, forward_only=True)
        run.context = run.statistics.freeze(groups, batches[0].tokens.device)
    with checked_finalizer(config, groups, run.invalid_tokens):
        _schedule(run.training_step, iterator, model, forward_only=False)
    if objective.ess_scope == "step":
        check.verify()
    return StepResult(run.context, _summed(run.metrics))


def _schedule(step: Any, iterator: MicroBatches, model: Sequence[Any], forward_only: bool) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterator if len(model) == 1 else [iterator] * len(model),
        model=list(model),
        num_microbatches=len(iterator),
        seq_length=1,  # micro-batches differ in length, and stages tell each other (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _summed(vectors: Sequence[Tensor]) -> P3OMetrics | None:
    if not vectors:
        return None
    total = P3OMetrics(vectors[0])
    for vector in vectors[1:]:
        total = total + P3OMetrics(vector)
    return total
