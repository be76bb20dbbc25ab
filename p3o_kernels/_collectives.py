"""The only module of p3o_kernels that knows processes."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_ranks(vector: Tensor, process_group: ProcessGroup) -> Tensor:
    """[ranks, n]: ``vector`` of every rank of ``process_group``, in rank order.

    Reducing the result locally fixes the order of the sum, so every rank gets the same bits, run
    after run, whatever algorithm the communicator picks for an all_reduce.
    """
    ranks = torch.distributed.get_world_size(process_group)
    gathered = vector.new_empty((ranks, vector.numel()))
    torch.distributed.all_gather(list(gathered.unbind(0)), vector.contiguous(), group=process_group)
    return gathered


def vocab_start(vocab: int, process_group: ProcessGroup | None) -> int:
    """The first entry of this rank's shard of ``vocab`` entries."""
    return 0 if process_group is None else torch.distributed.get_rank(process_group) * vocab


def gather_partials(partial: Tensor, vocab: int, process_group: ProcessGroup) -> Tensor:
    """[ranks, 4, T]: the row statistics of every shard, by one all_gather. NaN if the shards differ in size.

    The size travels along, because shards of different sizes would make every rank count labels differently.
    """
    size = partial.new_full((1,), float(vocab))
    gathered = gather_ranks(torch.cat([partial.flatten(), size]), process_group)
    equal = (gathered[:, -1] == float(vocab)).all()
    partials = gathered[:, :-1].reshape(-1, *partial.shape)
    return torch.where(equal, partials, torch.nan)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, process_group: ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.process_group)
        return grad, None


def sum_gradient(tensor: Tensor, process_group: ProcessGroup) -> Tensor:
    """``tensor``, whose gradient is summed over the group: each rank holds the part of d(hidden) of its own shard."""
    return _SumGradient.apply(tensor, process_group)  # type: ignore[no-any-return, no-untyped-call]
