"""Whole logits, losses and gradients from what the ranks of one topology returned."""

from typing import NamedTuple

import torch

from p3o_train.layout import offsets, owned_positions
from p3o_train.model import join_shards
from p3o_train.types import ContextLayout
from tests.megatron.topologies import MICRO_BATCHES, Outcome, Topology


class Whole(NamedTuple):
    """What a single process would have found."""

    logits: list[torch.Tensor]
    """[sum of lengths, V] of every micro-batch, without padding."""
    loss: float
    gradients: dict[str, torch.Tensor]


def whole(outcomes: list[Outcome], sizes: Topology) -> Whole:
    # with data parallelism several ranks stand at one place and hold the same
    at = {outcome.place: outcome for outcome in outcomes}
    last = sizes.pp - 1
    loss = sum(sum(at[Topology(0, last, cp)].losses) for cp in range(sizes.cp))
    logits = [_logits(at, sizes, index) for index in range(len(MICRO_BATCHES))]
    return Whole(logits, loss, _gradients(at, sizes))


def _logits(at: dict[Topology, Outcome], sizes: Topology, index: int) -> torch.Tensor:
    layouts = [ContextLayout(cp_size=sizes.cp, cp_rank=cp) for cp in range(sizes.cp)]
    lengths = MICRO_BATCHES[index]
    padded = [layouts[0].padded_length(length) for length in lengths]
    columns = []
    for tp in range(sizes.tp):
        shards = [at[Topology(tp, sizes.pp - 1, cp)].logits[index] for cp in range(sizes.cp)]
        column = shards[0].new_empty(sum(padded), shards[0].shape[1])
        for layout, shard in zip(layouts, shards, strict=True):
            column[owned_positions(padded, layout)] = shard
        columns.append(column)
    begins = offsets(padded).tolist()
    real = [torch.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=False)]
    return torch.cat(columns, 1)[torch.cat(real)]


def _gradients(at: dict[Topology, Outcome], sizes: Topology) -> dict[str, torch.Tensor]:
    """Summed over context parallelism, and over the two copies of a tied embedding."""
    total: dict[str, torch.Tensor] = {}
    for pp in range(sizes.pp):
        for cp in range(sizes.cp):
            shards = [at[Topology(tp, pp, cp)].gradients for tp in range(sizes.tp)]
            for name, (gradient, dim) in shards[0].items():
                full = gradient if dim is None else join_shards([shard[name][0] for shard in shards], name, dim)
                total[name] = total[name] + full if name in total else full
    return total
