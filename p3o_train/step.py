"""One optimizer step: e before the first gradient in step scope, one verdict on the data, no step without tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from p3o_kernels import ESSContext, RatioStats
from p3o_train.parallel import ParallelGroups, reduce_counts, reduce_statistics

NO_TOKENS = (
    "no valid response tokens globally: every loss mask of this optimizer step is empty, on every rank; the optimizer "
    "and the scheduler have not moved. Drop such a step from the data, or find out why all responses are masked"
)


class StepStatistics:
    """Collects the statistics of a step's micro-batches on the device, then freezes e for the training pass."""

    def __init__(self) -> None:
        self._sum: RatioStats | None = None

    def add(self, stats: RatioStats) -> None:
        """Of one micro-batch; a dummy's are zeros."""
        self._sum = stats if self._sum is None else self._sum + stats

    def freeze(self, groups: ParallelGroups, device: Any) -> ESSContext:
        """e of the whole step, the same on every rank. Every rank calls, whether it has added anything or not.

        Collectives: one over DP x CP on the last pipeline stage, one broadcast over the stages. One host read.

        Raises:
            ValueError: invalid data on any rank, on all of them alike; the groups stay usable.
            RuntimeError: no valid token in the whole step, on all ranks alike.
        """
        stats = reduce_statistics(RatioStats.zeros(device) if self._sum is None else self._sum, groups)
        context = stats.to_context(validate=True)
        if context.num_tokens == 0:
            raise RuntimeError(NO_TOKENS)
        return context


@contextlib.contextmanager
def checked_finalizer(
    config: Any, groups: ParallelGroups, invalid_tokens: Callable[[], Tensor | None]
) -> Iterator[None]:
    """While entered, Megatron's ``config.finalize_model_grads_func`` refuses steps whose gradients mean nothing.

    Megatron divides by a count that it has raised to 1, so a step without tokens would run the optimizer, and its
    weight decay, on gradients of zero. With invalid data, which micro-batch scope cannot know before, they are NaN.
    The check comes before the original function and before anything moves. One host read.

    Args:
        invalid_tokens: [] how many tokens of this rank were invalid, or None where no loss was computed; asked for
            when the backward passes are done.

    Raises:
        RuntimeError: on entry, when the function is not set; inside, on every rank, when the step has no valid token.
        ValueError: inside, on every rank, when a rank had invalid data.
    """
    original: Callable[..., Any] | None = getattr(config, "finalize_model_grads_func", None)
    if original is None:
        raise RuntimeError(
            "config.finalize_model_grads_func is not set: without Megatron's gradient finalizer the loss is never "
            "divided by the token count; set it to megatron.core.distributed.finalize_model_grads"
        )

    def finalize(model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if num_tokens is None:
            raise RuntimeError("no token count reached the gradient finalizer: set calculate_per_token_loss=True")
        invalid = invalid_tokens()
        count = num_tokens.double().reshape(())
        counts = torch.stack([count, torch.zeros_like(count) if invalid is None else invalid.double()])
        tokens, bad = reduce_counts(counts, groups).tolist()
        if bad:
            raise ValueError(
                f"invalid data on {bad:.0f} of {tokens:.0f} valid tokens of this optimizer step: log-ratios that are "
                "not finite or out of range; the optimizer has not moved. Mask such tokens, or find out why the "
                "engines disagree"
            )
        if tokens == 0:
            raise RuntimeError(NO_TOKENS)
        return original(model, num_tokens, *args, **kwargs)

    config.finalize_model_grads_func = finalize
    try:
        yield
    finally:
        config.finalize_model_grads_func = original
