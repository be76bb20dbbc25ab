"""One optimizer step: e before the first gradient in step scope, one verdict on the data, no step without tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from p3o_kernels import ESSContext, RatioStats
from p3o_train.parallel import ParallelGroups, raise_together, reduce_counts, reduce_statistics

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

    def freeze(self, groups: ParallelGroups, device: Any, failure: Exception | None = None) -> ESSContext:
        """e of the whole step, the same on every rank. Every rank calls, whether it has added anything or not.

        Collectives: one over DP x CP on the last pipeline stage, one broadcast over the stages. Their result is read
        on the host.

        Args:
            failure: what this rank's pre-pass raised; then every rank raises it.

        Raises:
            ValueError: invalid data on any rank, on all of them alike; the groups stay usable.
            RuntimeError: no valid token in the whole step, or a failed rank, on all ranks alike.
        """
        stats = RatioStats.zeros(device) if self._sum is None else self._sum
        stats = reduce_statistics(stats, groups, failure)
        context = stats.to_context(validate=True)
        if context.num_tokens == 0:
            raise RuntimeError(NO_TOKENS)
        return context


class CheckedFinalizer:
    """While entered, Megatron's ``config.finalize_model_grads_func`` refuses steps whose gradients mean nothing.

    Megatron divides by a count that it has raised to 1, so a step without tokens would run the optimizer, and its
    weight decay, on gradients of zero. With invalid data, which micro-batch scope cannot know before, they are NaN.
    The check comes before the original function and before anything moves. One host read.

    When this rank raises while others wait in that check, it joins them, and every rank raises the same error. That
    works where the check is the first collective that the others meet: in step scope, between data-parallel replicas.
    A rank that leaves its tensor, context or pipeline group alone in the middle of a layer can only be missed there
    until the timeout of the process group.

    Args:
        config: Megatron's, of the model.
        device: of the tensors that the collectives carry.
        invalid_tokens: [] how many tokens of this rank were invalid, or None where no loss was computed; asked for
            when the backward passes are done.
        joins: whether this is the first collective of the data-parallel replicas.

    Raises:
        RuntimeError: on entry, when the function is not set; inside, on every rank, when the step has no valid token or
            a rank failed.
        ValueError: inside, on every rank, when a rank had invalid data.
    """

    def __init__(
        self,
        config: Any,
        groups: ParallelGroups,
        invalid_tokens: Callable[[], Tensor | None],
        device: Any = "cpu",
        joins: bool = False,
    ) -> None:
        self._config, self._groups, self._invalid_tokens = config, groups, invalid_tokens
        self._device, self._joins = device, joins
        self._original: Callable[..., Any] | None = getattr(config, "finalize_model_grads_func", None)
        self._reached = False

    def __enter__(self) -> None:
        if self._original is None:
            raise RuntimeError(
                "config.finalize_model_grads_func is not set: without Megatron's gradient finalizer the loss is never "
                "divided by the token count; set it to megatron.core.distributed.finalize_model_grads"
            )
        self._config.finalize_model_grads_func = self._finalize

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._config.finalize_model_grads_func = self._original
        if self._joins and not self._reached and isinstance(error, Exception):
            reduce_counts(torch.tensor([0.0, 0.0, 1.0], device=self._device), self._groups)
            raise_together(error, self._groups)

    def _finalize(self, model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if num_tokens is None:
            raise RuntimeError("no token count reached the gradient finalizer: set calculate_per_token_loss=True")
        self._reached = True
        failure: Exception | None = None
        invalid: Tensor | None = None
        try:
            invalid = self._invalid_tokens()
        except Exception as error:  # told to every rank below, where all of them meet
            failure = error
        count = num_tokens.double().reshape(())
        counts = count.new_tensor([0.0, 0.0, float(failure is not None)])
        counts[0] = count
        if invalid is not None:
            counts[1] = invalid
        tokens, bad, failed = reduce_counts(counts, self._groups).tolist()
        if failed:
            raise_together(failure, self._groups)
        if bad:
            raise ValueError(
                f"invalid data on {bad:.0f} of {tokens:.0f} valid tokens of this optimizer step: log-ratios "
                "that are not finite or out of range; the optimizer has not moved. Mask such tokens, or find out why "
                "the engines disagree"
            )
        if tokens == 0:
            raise RuntimeError(NO_TOKENS)
        original: Any = self._original  # set: entering was refused without
        return original(model, num_tokens, *args, **kwargs)
