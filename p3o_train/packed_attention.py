"""Attention over packed sequences with zigzag context parallelism: a core attention for Megatron-Core in plain torch.

For token i of a sequence, over the real tokens j <= i of the same sequence:

    o_i = sum_j softmax_j(scale q_i . k_j) v_j                                                             (1)

Heads: query head h reads key and value head h // (heads / kv_heads). Rotary embedding was applied before. Each rank
attends from its own tokens to all keys of the sequence: keys and values are gathered over the context-parallel group,
and the gradient of the gather sums their gradients in the order of the ranks.

Padding is taken out rather than masked: rows of it neither attend nor are attended to, their output is 0, and what
they hold, NaN included, reaches nobody.

Used where transformer-engine is not. Sequences of one length attend in one batch; their offsets are read on the host.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from p3o_train.layout import owned_positions
from p3o_train.types import ContextLayout, PackedBatch


def packed_seq_params(batch: PackedBatch) -> Any:
    """Megatron-Core's description of a packed micro-batch: whole sequences, with and without their padding.

    Raises:
        ValueError: a layout that is not zigzag, the only one that Megatron-Core's rotary embedding knows.
    """
    if batch.layout.cp_size > 1 and batch.layout.order != "zigzag":
        raise ValueError(f'the layout of a batch for the model must be "zigzag", got {batch.layout.order!r}')
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens_unpadded,
        cu_seqlens_kv=batch.cu_seqlens_unpadded,
        cu_seqlens_q_padded=batch.cu_seqlens,
        cu_seqlens_kv_padded=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def packed_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    padded_lengths: Sequence[int],
    lengths: Sequence[int],
    cp_rank: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Equation (1) for the tokens of one context-parallel rank.

    Args:
        query: [T, heads, dim], this rank's zigzag tokens.
        keys, values: [T, kv_heads, dim] of every rank, in the order of the ranks.
        padded_lengths, lengths: of every whole sequence, with padding and without.
        scale: of the scores; None is 1 / sqrt(dim).

    Returns:
        [T, heads, dim], 0 at padding.

    Raises:
        ValueError: a padded length that the ranks cannot share evenly.
    """
    layouts = [ContextLayout(cp_size=len(keys), cp_rank=rank) for rank in range(len(keys))]
    owned = [owned_positions(padded_lengths, layout) for layout in layouts]
    in_order = torch.cat(owned).argsort().to(query.device)
    key, value = (torch.cat(tuple(shards)).index_select(0, in_order) for shards in (keys, values))
    # a rank with nothing but padding still takes part in the backward pass of the gather
    outputs, places = [query[:0] + key[:0].sum() + value[:0].sum()], [torch.zeros(0, dtype=torch.int64)]
    for same in _alike(padded_lengths, lengths, len(keys)):
        begins = torch.tensor([begin for begin, _ in same.begins])
        rows = owned[cp_rank][same.begins[0][1] :][: same.padded // len(keys)] - begins[0]
        rows = rows[rows < same.length]  # zigzag rows ascend, so the real ones come first
        if not len(rows):
            continue
        own = torch.tensor([first for _, first in same.begins])[:, None] + torch.arange(len(rows))
        whole = (begins[:, None] + torch.arange(same.length)).to(query.device)
        made = _causal(query[own.to(query.device)], key[whole], value[whole], rows.to(query.device), scale)
        outputs.append(made.flatten(0, 1))
        places.append(own.flatten())
    return torch.zeros_like(query).index_copy(0, torch.cat(places).to(query.device), torch.cat(outputs))


class _Alike(NamedTuple):
    """Sequences of one length and one padded length: they attend in one batch."""

    padded: int
    length: int
    begins: list[tuple[int, int]]
    """Where each begins: among all tokens, and among those of one rank."""


def _alike(padded_lengths: Sequence[int], lengths: Sequence[int], ranks: int) -> list[_Alike]:
    found: dict[tuple[int, int], _Alike] = {}
    begin = 0
    for padded, length in zip(padded_lengths, lengths, strict=True):
        found.setdefault((padded, length), _Alike(padded, length, [])).begins.append((begin, begin // ranks))
        begin += padded
    return list(found.values())


def _causal(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float | None) -> Tensor:
    """Attention [n, r, heads, dim] of the tokens at ``rows`` to n whole sequences [n, L, kv_heads, dim]."""
    mask = rows[:, None] >= torch.arange(key.shape[1], device=rows.device)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)


class _Gather(torch.autograd.Function):
    """[ranks x T, ...] from every rank's [T, ...]; gradients are added in the order of the ranks.

    torch.distributed.nn.functional.all_gather takes ranks of the group for global ones in its backward pass over Gloo.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = shard.new_empty(group.size() * len(shard), *shard.shape[1:])
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, gradient.contiguous(), group=ctx.group)
        return received.view(ctx.group.size(), -1, *gradient.shape[1:]).sum(0), None


class PackedAttention(torch.nn.Module):
    """``packed_attention`` with the constructor and the call that Megatron-Core's attention layer expects."""

    def __init__(
        self,
        *,
        config: Any,
        pg_collection: Any,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if config.attention_dropout or config.window_size is not None or config.softmax_type != "vanilla":
            raise ValueError(
                "PackedAttention has neither dropout nor windows nor softmax offsets, got attention_dropout="
                f"{config.attention_dropout}, window_size={config.window_size}, softmax_type={config.softmax_type!r}"
            )
        # not the group itself: a micro-batch may run in another one
        self.pg_collection = pg_collection
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[T, heads, dim] and twice [T, kv_heads, dim] to [T, heads x dim].

        Raises:
            ValueError: a batch that is not packed; a mask or bias beside the causal order.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("PackedAttention needs a packed batch: pass packed_seq_params(batch) to the model")
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("PackedAttention is causal inside each sequence; attention_mask and bias must be None")
        group: dist.ProcessGroup = self.pg_collection.cp
        offsets = packed_seq_params.cu_seqlens_q
        padded = packed_seq_params.cu_seqlens_q_padded
        output = packed_attention(
            query,
            _gathered(key, group),
            _gathered(value, group),
            (offsets if padded is None else padded).diff().tolist(),
            offsets.diff().tolist(),
            group.rank(),
            self.scale,
        )
        return output.flatten(1)


def _gathered(shard: Tensor, group: dist.ProcessGroup) -> Sequence[Tensor]:
    if group.size() == 1:
        return [shard]
    gathered: Tensor = _Gather.apply(shard, group)  # type: ignore[no-untyped-call]
    return gathered.chunk(group.size())
