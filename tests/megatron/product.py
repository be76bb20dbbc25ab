"""What a training run puts together around the model on one rank: Megatron's DDP, optimizer and schedule."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from p3o_train.model import ModelConfig, build_model
from p3o_train.objective import Objective
from p3o_train.parallel import ParallelGroups
from p3o_train.passes import StepResult, step_gradients
from p3o_train.types import ContextLayout, PackedBatch

LEARNING_RATE = 1e-3


@dataclasses.dataclass
class Product:
    """One rank's part, and its place."""

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
        taken, _, _ = self.optimizer.step()
        assert taken
        self.scheduler.step(increment=1)


def build_product(config: ModelConfig, overlap: bool = False) -> Product:
    """Inside ``megatron_on_cpu()``, with parallel groups.

    ``overlap``: gradients are reduced between replicas while the last backward pass still runs.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    module: Any = build_model(config)
    module.config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    model: Any = DistributedDataParallel(module.config, ddp, module)
    if overlap:
        module.config.no_sync_func = model.no_sync
    adam = OptimizerConfig(lr=LEARNING_RATE, min_lr=0.0, weight_decay=0.0, clip_grad=1.0, params_dtype=config.dtype)
    optimizer = get_megatron_optimizer(adam, [model], use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LEARNING_RATE,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return Product(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        groups=ParallelGroups.from_megatron(),
        layout=ContextLayout(
            parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        ),
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
    )
