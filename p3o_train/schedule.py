"""One pass of Megatron-Core's own pipeline schedule over the micro-batches of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_train.dynamic_context import context_of
from p3o_train.forward import build_rl_forward_kwargs, bypassed_output_layers, output_weight, packed_rows
from p3o_train.replay import MicroBatches
from p3o_train.types import PackedBatch

LossFunction = Callable[[Tensor, PackedBatch, "Tensor | None"], "tuple[Tensor, dict[str, Tensor]]"]
"""(rows, batch, weight) -> (token sum, report): rows are [T, V / tp] logits and weight is None, or rows are [T, H]
hidden states and weight is [V / tp, H]."""


def run_schedule(
    model: Sequence[Any],
    iterator: MicroBatches,
    loss_function: LossFunction,
    record: Callable[[PackedBatch], None] | None = None,
    *,
    from_hidden: bool = False,
    training: bool = False,
    context_groups: Mapping[int, ProcessGroup] | None = None,
) -> None:
    """Every micro-batch forward, with ``training`` also backward and into Megatron's gradient finalizer.

    Args:
        model: the chunks of this rank, as Megatron's schedules take them.
        iterator: at its start.
        loss_function: called on the last stage, for each micro-batch in order.
        record: sees every micro-batch on every stage before the model does.
        from_hidden: the output layer is bypassed.
        context_groups: for batches whose layout has another context-parallel size than the model: see ``context_of``.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Iterator[PackedBatch], chunk: Any) -> Any:
        batch = next(iterator)
        if record is not None:
            record(batch)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            weight = output_weight(chunk) if from_hidden else None
            made, report = loss_function(packed_rows(output, batch), batch, weight)
            # an integer: Megatron adds it to an integer
            return made, torch.tensor(batch.num_tokens, dtype=torch.int, device=output.device), report

        with context_of(chunk, batch.layout, context_groups or {}):
            return chunk(**build_rl_forward_kwargs(batch)), loss

    with bypassed_output_layers(model) if from_hidden else contextlib.nullcontext():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterator if len(model) == 1 else [iterator] * len(model),
            model=list(model),
            num_microbatches=len(iterator.batches),
            seq_length=1,  # micro-batches differ in length, and stages tell each other (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=not training,
        )
