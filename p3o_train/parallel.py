"""The process groups of a run, and the only collectives of the training layer outside Megatron.

Statistics of a step are sums over tokens, so they add over data- and context-parallel ranks and over nothing else:
tensor-parallel ranks hold copies of them, and pipeline stages before the last one never see a log-prob.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import RatioStats


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of this rank. None: a group of this rank alone."""

    tensor: ProcessGroup | None = None
    """Ranks that share the vocabulary (and the hidden layers)."""
    context: ProcessGroup | None = None
    """Ranks that share the tokens of a micro-batch."""
    data_context: ProcessGroup | None = None
    """Ranks over which the tokens of a step add up: data parallel times context parallel."""
    pipeline: ProcessGroup | None = None
    """Stages of one model, first to last."""

    @classmethod
    def from_megatron(cls) -> ParallelGroups:
        """The groups that ``megatron.core.parallel_state`` has made.

        Raises:
            RuntimeError: Megatron's parallel state is not initialised.
        """
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError(
                "Megatron's parallel state is not initialised; call parallel_state.initialize_model_parallel first"
            )

        def group(made: Any) -> ProcessGroup | None:
            return None if made is None or made.size() == 1 else made

        return cls(
            tensor=group(parallel_state.get_tensor_model_parallel_group()),
            context=group(parallel_state.get_context_parallel_group()),
            data_context=group(parallel_state.get_data_parallel_group(with_context_parallel=True)),
            pipeline=group(parallel_state.get_pipeline_model_parallel_group()),
        )

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output layer."""
        return self.pipeline is None or self.pipeline.rank() == self.pipeline.size() - 1


def reduce_statistics(stats: RatioStats, groups: ParallelGroups) -> RatioStats:
    """The sums of the whole step, the same bits on every rank: a sum over DP x CP, then a copy to earlier stages.

    Every rank calls; what stages before the last pass in is not used.
    """
    vector = stats.as_vector()
    if groups.is_last_stage and groups.data_context is not None:
        vector = stats.all_reduce(groups.data_context).as_vector()
    return RatioStats.from_vector(_from_last_stage(vector, groups))


def reduce_counts(counts: Tensor, groups: ParallelGroups) -> Tensor:
    """[n] float64: counts of the whole step, by the same way; float64 counts tokens exactly up to 2^53."""
    total = counts.detach().double()
    if groups.is_last_stage and groups.data_context is not None:
        dist.all_reduce(total, group=groups.data_context)
    return _from_last_stage(total, groups)


def _from_last_stage(vector: Tensor, groups: ParallelGroups) -> Tensor:
    """Broadcast, never a sum: several stages would count every token several times."""
    if groups.pipeline is None:
        return vector
    vector = vector.contiguous() if groups.is_last_stage else torch.empty_like(vector)
    source = dist.get_global_rank(groups.pipeline, groups.pipeline.size() - 1)
    dist.broadcast(vector, src=source, group=groups.pipeline)
    return vector
