"""The only module of p3o_kernels that knows processes."""

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
