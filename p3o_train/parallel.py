"""The process groups of a run, and the collectives of a step outside Megatron's model.

Attention gathers keys and values itself (``packed_attention``), and what the host does is agreed upon in ``agreement``.

Statistics of a step are sums over tokens, so they add over data- and context-parallel ranks and over nothing else:
tensor-parallel ranks hold copies of them, and pipeline stages before the last one never see a log-prob.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

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
    sub_contexts: Mapping[int, ProcessGroup] = dataclasses.field(default_factory=dict)
    """Size -> group of this rank, for micro-batches that fewer (or more) context-parallel ranks share than usual."""

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
    """The sums of the whole step: see ``merge_rows``."""
    return RatioStats.from_vector(reduce_counts(stats.as_vector(), groups))


def reduce_counts(counts: Tensor, groups: ParallelGroups) -> Tensor:
    """[n] float64: sums over the whole step, as ``merge_rows`` does it; float64 counts tokens exactly up to 2^53."""
    return merge_rows(counts.detach().double(), groups, _summed)


def merge_rows(vector: Tensor, groups: ParallelGroups, merge: Callable[[Tensor], Tensor]) -> Tensor:
    """[n]: ``merge`` of [ranks, n], the vectors of DP x CP in the order of the ranks; the same bits on every rank.

    Every rank calls, with a vector of the same length; what stages before the last pass in is not used. Collectives:
    one over DP x CP on the last pipeline stage, one broadcast over the stages.
    """
    if groups.is_last_stage:
        vector = merge(vector[None] if groups.data_context is None else _rows(vector, groups.data_context))
    return copy_from_last_stage(vector, groups)


def copy_from_last_stage(tensor: Tensor, groups: ParallelGroups) -> Tensor:
    """What the last pipeline stage passes in, on every stage; shape and dtype must be the same on all of them.

    A broadcast, never a sum: several stages would count every token several times.
    """
    if groups.pipeline is None:
        return tensor
    tensor = tensor.contiguous() if groups.is_last_stage else torch.empty_like(tensor)
    source = dist.get_global_rank(groups.pipeline, groups.pipeline.size() - 1)
    dist.broadcast(tensor, src=source, group=groups.pipeline)
    return tensor


@contextlib.contextmanager
def together(groups: ParallelGroups, device: Any) -> Iterator[None]:
    """What the body raises on one rank, every rank raises on the way out. Every rank enters.

    The body may have collectives only where a rank that raises leaves nobody waiting in them.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # told to every rank, where all of them meet
        failure = error
    agree(failure, groups, device)


def agree(failure: Exception | None, groups: ParallelGroups, device: Any) -> None:
    """Every rank calls, with what went wrong on it; if anything did on any of them, every one raises the same error.

    Collectives: one number over DP x CP, the stages and the tensor-parallel ranks. One host read.

    Args:
        device: of the tensor that the collectives carry.

    Raises:
        ValueError, RuntimeError: as ``raise_together``.
        RuntimeError: on a rank with a failure, if the others could not be reached.
    """
    failed = torch.tensor([failure is not None], dtype=torch.int32, device=device)
    try:
        anywhere = bool(_largest_anywhere(failed, groups).item())
    except Exception as broken:
        if failure is None:
            raise
        raise RuntimeError(
            f"{_told(failure)[1]}; the other ranks were not there to be told of it: {broken}"
        ) from failure
    if anywhere:
        raise_together(failure, groups)


def raise_together(failure: Exception | None, groups: ParallelGroups) -> NoReturn:
    """Raises the same error on every rank, when every rank knows that some rank failed.

    Raises:
        ValueError: when that is what the first rank that failed has; its text is in this one's.
        RuntimeError: when it is anything else. From ``failure`` on a rank that has one.
    """
    told = None if failure is None else _told(failure)
    for group in (groups.data_context, groups.pipeline, groups.tensor):
        if group is not None:
            everyone: list[tuple[bool, str] | None] = [None] * group.size()
            dist.all_gather_object(everyone, told, group=group)
            told = next((one for one in everyone if one is not None), None)
    is_value_error, text = told or (False, "a rank failed")
    kind = ValueError if is_value_error else RuntimeError
    raise kind(f"this optimizer step was given up before anything moved: {text}") from failure


def _told(failure: Exception) -> tuple[bool, str]:
    return isinstance(failure, ValueError), f"rank {_global_rank()} raised {type(failure).__name__}: {failure}"


def check_equal_counts(count: int, groups: ParallelGroups, device: Any) -> None:
    """That every rank has the same number of micro-batches; otherwise schedules and collectives would wait forever.

    Raises:
        ValueError: on every rank, with the smallest and the largest number.
    """
    extremes = _largest_anywhere(torch.tensor([-count, count], dtype=torch.int64, device=device), groups).tolist()
    smallest, largest = -extremes[0], extremes[1]
    if smallest != largest:
        raise ValueError(
            f"every rank needs the same number of micro-batches, but one has {smallest} and another {largest}; fill up "
            "with dummy_batch, as plan_micro_batches and pack_step do"
        )


def _largest_anywhere(values: Tensor, groups: ParallelGroups) -> Tensor:
    """Elementwise over all ranks: these three groups together span them."""
    for group in (groups.data_context, groups.pipeline, groups.tensor):
        if group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values


def _global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _rows(vector: Tensor, group: ProcessGroup) -> Tensor:
    """[ranks, n]: added in the order of the ranks they give the same bits on every rank, run after run."""
    gathered = vector.new_empty(group.size(), vector.numel())
    dist.all_gather(list(gathered.unbind(0)), vector.contiguous(), group=group)
    return gathered


def _summed(rows: Tensor) -> Tensor:
    return rows.sum(0)
