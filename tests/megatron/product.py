"""What a training run puts together around the model on one rank: Megatron's DDP, optimizer and schedule."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

from p3o_train.model import ModelConfig
from p3o_train.objective import Objective
from p3o_train.parallel import ParallelGroups
from p3o_train.passes import StepResult, step_gradients
from p3o_train.runtime import OptimizerSettings, Trainee, build_trainee
from p3o_train.types import ContextLayout, PackedBatch

LEARNING_RATE = 1e-3


@dataclasses.dataclass
class Product:
    """One rank's part, and its place."""

    trainee: Trainee
    model: Any
    optimizer: Any
    scheduler: Any
    groups: ParallelGroups
    layout: ContextLayout
    dp_rank: int
    tp_rank: int

    def gradients(self, batches: Sequence[PackedBatch], objective: Objective, **more: Any) -> StepResult:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return step_gradients([self.model], batches, objective, self.groups, **more)

    def update(self) -> None:
        self.trainee.step()


def build_product(config: ModelConfig, overlap: bool = False) -> Product:
    """What the trainer builds, inside ``megatron_on_cpu()`` and with parallel groups.

    ``overlap``: gradients are reduced between replicas while the last backward pass still runs.
    """
    from megatron.core import distributed, parallel_state

    settings = OptimizerSettings(lr=LEARNING_RATE, total_steps=10, lr_decay_style="linear")
    ddp = functools.partial(distributed.DistributedDataParallelConfig, overlap_grad_reduce=overlap)
    with mock.patch.object(distributed, "DistributedDataParallelConfig", ddp):
        trainee = build_trainee(config, settings)
    (model,) = trainee.model
    if overlap:
        model.config.no_sync_func = model.no_sync
    return Product(
        trainee=trainee,
        model=model,
        optimizer=trainee.optimizer,
        scheduler=trainee.scheduler,
        groups=trainee.groups,
        layout=trainee.layout,
        dp_rank=trainee.dp_rank,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
    )
