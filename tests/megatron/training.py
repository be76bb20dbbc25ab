"""A few optimizer steps by Megatron-Core's own DDP, optimizer and clipping, as one rank takes them."""

import dataclasses
from typing import Any, NamedTuple

import torch

from p3o_train.device_shim import megatron_on_cpu
from p3o_train.model import build_model
from p3o_train.types import ContextLayout
from tests.megatron.topologies import CONFIG, Topology, forward_backward, groups

STEPS, LEARNING_RATE, MAX_NORM = 3, 0.01, 1.0


class Run(NamedTuple):
    """What is trained where; data parallelism repeats the batch on the ranks that are left."""

    sizes: Topology = Topology()
    dtype: torch.dtype = torch.float32
    distributed_optimizer: bool = False


def steps(run: Run) -> list[tuple[float, float]]:
    """(loss on this rank before the step, norm of all gradients) of every step."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with groups(run.sizes) as place:
        module: Any = build_model(dataclasses.replace(CONFIG, dtype=run.dtype, tie_embeddings=run.sizes.tied))
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=run.distributed_optimizer
        )
        model = DistributedDataParallel(module.config, ddp_config, module)
        optimizer_config = OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=0.0,
            clip_grad=MAX_NORM,
            bf16=run.dtype == torch.bfloat16,
            params_dtype=run.dtype,
            use_distributed_optimizer=run.distributed_optimizer,
        )
        optimizer = get_megatron_optimizer(optimizer_config, [model], use_gloo_process_groups=False)
        module.config.finalize_model_grads_func = finalize_model_grads
        history = []
        for _ in range(STEPS):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            _, losses = forward_backward(model, ContextLayout(cp_size=run.sizes.cp, cp_rank=place.cp))
            taken, norm, _ = optimizer.step()
            assert taken
            history.append((sum(losses), norm))
        return history


def every_run(rank: int, runs: tuple[Run, ...]) -> list[list[tuple[float, float]]]:
    with megatron_on_cpu():
        return [steps(run) for run in runs]
