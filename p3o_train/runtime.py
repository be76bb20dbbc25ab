"""From processes to a model with optimizer and learning-rate schedule, by Megatron-Core's own parts.

Without CUDA the same runs over Gloo inside the CPU shim. Started by ``torchrun``, every process is a rank; started
alone, the process is a group of one.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from p3o_train.device_shim import megatron_on_cpu
from p3o_train.hf_weights import load_hf_weights
from p3o_train.model import ModelConfig, build_model
from p3o_train.parallel import ParallelGroups
from p3o_train.types import ContextLayout


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the model-parallel groups; the ranks that are left repeat the model (data parallelism)."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def data_size(self, ranks: int) -> int:
        """Replicas among ``ranks`` processes.

        Raises:
            ValueError: a size below 1, or sizes that do not divide the number of processes.
        """
        model = self.tensor * self.pipeline * self.context
        if min(self.tensor, self.pipeline, self.context) < 1 or ranks % model:
            raise ValueError(
                f"tensor x pipeline x context parallel size must divide the number of processes, got "
                f"{self.tensor} x {self.pipeline} x {self.context} and {ranks} process(es); start more with "
                f"torchrun --nproc-per-node {model}, or lower a size"
            )
        return ranks // model


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam with decoupled weight decay, and its learning rate over the optimizer steps of a run."""

    lr: float
    total_steps: int
    """Optimizer steps of the whole run, over which the rate decays."""
    min_lr: float = 0.0
    lr_decay_style: str = "constant"
    lr_warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    clip_grad: float = 1.0
    """Largest norm of all gradients; 0 does not clip."""
    use_distributed_optimizer: bool = False
    """Optimizer states are cut over the data-parallel ranks."""


@dataclass(frozen=True, eq=False)
class Trainee:
    """What this rank trains."""

    model: list[Any]
    """Megatron DDP around this rank's part, as the schedules take it."""
    optimizer: Any
    scheduler: Any
    groups: ParallelGroups
    layout: ContextLayout
    dp_rank: int
    dp_size: int
    device: torch.device

    def step(self) -> float:
        """One optimizer step from the gradients that are there; the norm of all gradients before clipping.

        Raises:
            RuntimeError: a gradient is not finite, on every rank alike; nothing has moved.
        """
        self.optimizer.prepare_grads()
        # before Megatron's own step, which in float32 and bfloat16 would scale a NaN and go on
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise RuntimeError(
                f"the norm of the gradients is {norm} although all log-ratios are finite; the optimizer has not moved. "
                "Look for an overflow in the model"
            )
        self.optimizer.step()
        self.scheduler.step(increment=1)
        return norm

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()


@contextlib.contextmanager
def megatron_run(parallelism: Parallelism, timeout_minutes: float = 10.0) -> Iterator[None]:
    """Process group and Megatron's parallel state for the length of a run; both are gone afterwards.

    A process group that exists already is used and stays.

    Raises:
        ValueError: sizes that do not fit the number of processes.
    """
    from megatron.core import parallel_state

    with contextlib.ExitStack() as stack:
        if dist.is_initialized():
            ranks = dist.get_world_size()
        else:
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            stack.enter_context(_process_group(parallelism, ranks, timeout_minutes))
        parallelism.data_size(ranks)
        stack.enter_context(megatron_on_cpu())
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallelism.tensor,
            pipeline_model_parallel_size=parallelism.pipeline,
            context_parallel_size=parallelism.context,
            # every group is Gloo already without CUDA, and nothing here needs a second one with it
            create_gloo_process_groups=False,
            distributed_timeout_minutes=timeout_minutes,  # otherwise its groups wait for half an hour
        )
        stack.callback(parallel_state.destroy_model_parallel)
        yield


@contextlib.contextmanager
def _process_group(parallelism: Parallelism, ranks: int, timeout_minutes: float) -> Iterator[None]:
    parallelism.data_size(ranks)  # before anybody waits for anybody
    options: dict[str, Any] = {"timeout": datetime.timedelta(minutes=timeout_minutes)}
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo", **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_trainee(
    config: ModelConfig, settings: OptimizerSettings, weights: Mapping[str, Tensor] | None = None
) -> Trainee:
    """Model, optimizer and schedule of this rank; inside ``megatron_run``.

    Args:
        weights: full ones by their Hugging Face names, to start from. None: drawn from the seed.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    module: Any = build_model(config)
    if weights is not None:  # before the optimizer copies them
        load_hf_weights([module], weights)
    module.config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=settings.use_distributed_optimizer
    )
    model = [DistributedDataParallel(module.config, ddp, module)]
    optimizer, scheduler = _optimizer(model, config, settings)
    return Trainee(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        groups=ParallelGroups.from_megatron(),
        layout=ContextLayout(
            cp_size=parallel_state.get_context_parallel_world_size(), cp_rank=parallel_state.get_context_parallel_rank()
        ),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"),
    )


def _optimizer(model: list[Any], config: ModelConfig, settings: OptimizerSettings) -> tuple[Any, Any]:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer_config = OptimizerConfig(
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        clip_grad=settings.clip_grad,
        bf16=config.dtype == torch.bfloat16,
        params_dtype=config.dtype,
        use_distributed_optimizer=settings.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizer_config, model, use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_steps,
        lr_decay_steps=max(settings.total_steps, settings.lr_warmup_steps + 1),
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
