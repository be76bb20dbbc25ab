"""Context parallelism in a group of another size for one micro-batch, and back.

Short sequences need fewer context-parallel ranks than long ones. A batch whose layout has another ``cp_size`` than the
model's own runs in a sub-group of that size; statistics, loss and token count are sums over DP x CP and do not notice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed import ProcessGroup

from p3o_train.types import ContextLayout


@contextlib.contextmanager
def context_of(chunk: Any, layout: ContextLayout, groups: Mapping[int, ProcessGroup]) -> Iterator[None]:
    """While entered, ``chunk`` shares sequences as ``layout`` says; its own group is back afterwards, also on error.

    Enter it around the forward call alone: what a backward pass needs is bound there.

    Args:
        chunk: a Megatron-Core model, wrapped or not, whose modules find the group in ``pg_collection.cp``.
        groups: size -> sub-group of this rank, for example Megatron's hybrid data- and context-parallel groups.

    Raises:
        ValueError: a size that is neither the model's own nor in ``groups``, or another rank in the group than in the
            layout; nothing has changed then.
    """
    found: list[Any] = [getattr(module, "pg_collection", None) for module in chunk.modules()]
    collections = {id(collection): collection for collection in found if hasattr(collection, "cp")}
    own = {collection.cp.size() for collection in collections.values()}
    if own <= {layout.cp_size}:
        yield
        return
    group = groups.get(layout.cp_size)
    if group is None or (group.size(), group.rank()) != (layout.cp_size, layout.cp_rank):
        place = "there is none" if group is None else f"this rank is {group.rank()} of {group.size()} there"
        raise ValueError(
            f"a micro-batch is laid out for rank {layout.cp_rank} of {layout.cp_size} context-parallel ranks, the "
            f"model for {max(own)}, and in a sub-group of that size {place}; pack it with the layout of the model, or "
            "give the group"
        )
    replaced = [(collection, collection.cp) for collection in collections.values()]
    try:
        for collection, _ in replaced:
            collection.cp = group
        yield
    finally:
        for collection, original in replaced:
            collection.cp = original
