"""One optimizer step: e before the first gradient in step scope, one verdict on the data, no step without tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from p3o_kernels import ESSContext, RatioStats, ratio_stats
from p3o_train.parallel import ParallelGroups, agree, reduce_counts, reduce_statistics, together
from p3o_train.types import PackedBatch

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

        Collectives: one over DP x CP on the last pipeline stage, one broadcast over the stages. Their result is read
        on the host.

        Raises:
            ValueError: invalid data on any rank, on all of them alike; the groups stay usable.
            RuntimeError: no valid token in the whole step, on all ranks alike.
        """
        stats = RatioStats.zeros(device) if self._sum is None else self._sum
        context = reduce_statistics(stats, groups).to_context(validate=True)
        if context.num_tokens == 0:
            raise RuntimeError(NO_TOKENS)
        return context


class VersionStatistics:
    """e of the tokens of each weight version for itself: how far the policy has moved from each of them."""

    def __init__(self, versions: Sequence[int]) -> None:
        """``versions``: those of the whole step, the same on every rank."""
        self._sums: dict[int, RatioStats | None] = dict.fromkeys(versions)

    def add(self, log_probs: Tensor, batch: PackedBatch) -> None:
        """The tokens of one micro-batch, with [T] log-probs of the current policy."""
        for version, before in self._sums.items():
            mask = batch.mask & (batch.weight_versions == version)
            stats = ratio_stats(log_probs, batch.behavior_log_probs, mask)
            self._sums[version] = stats if before is None else before + stats

    def ess(self, groups: ParallelGroups, device: Any) -> dict[int, float]:
        """Version -> e, the same on every rank; versions without a valid token are left out. One host read.

        Collectives: one over DP x CP on the last pipeline stage, one broadcast over the stages; none without versions.
        """
        if not self._sums:
            return {}
        sums = [RatioStats.zeros(device) if stats is None else stats for stats in self._sums.values()]
        rows = reduce_counts(torch.cat([stats.as_vector() for stats in sums]), groups).view(len(sums), -1)
        found = rows[:, 2].tolist()
        contexts = [RatioStats.from_vector(row).to_context(validate=False) for row in rows]
        values = torch.stack([context.ess for context in contexts]).tolist()
        return {version: e for version, e, tokens in zip(self._sums, values, found, strict=True) if tokens}


class CheckedFinalizer:
    """While entered, Megatron's ``config.finalize_model_grads_func`` refuses steps whose gradients mean nothing.

    Megatron divides by a count that it has raised to 1, so a step without tokens would run the optimizer, and its
    weight decay, on gradients of zero. With invalid data, which micro-batch scope cannot know before, they are NaN.
    The check comes before the original function and before anything moves. Two host reads.

    When this rank raises while others wait in that check, it joins them, and every rank raises the same error. First it
    has to enter the collectives that they meet before. That works between data-parallel replicas. A rank that leaves
    its tensor, context or pipeline group alone in the middle of a layer is missed there until the group's timeout.

    Args:
        config: Megatron's, of the model.
        device: of the tensors that the collectives carry.
        invalid_tokens: [] how many tokens of this rank were invalid, or None where no loss was computed; asked for
            when the backward passes are done.
        catch_up: enters the collectives of the data-parallel replicas that this rank has missed by raising, and tells
            whether it could; without it the rank raises alone.

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
        catch_up: Callable[[], bool] | None = None,
    ) -> None:
        self._config, self._groups, self._invalid_tokens = config, groups, invalid_tokens
        self._device, self._catch_up = device, catch_up
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
        if isinstance(error, Exception) and not self._reached and self._catch_up is not None and self._catch_up():
            agree(error, self._groups, self._device)

    def _finalize(self, model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if num_tokens is None:
            raise RuntimeError("no token count reached the gradient finalizer: set calculate_per_token_loss=True")
        self._reached = True
        try:
            self._check(num_tokens)
        except Exception:
            _wait_for_gradients(model)
            raise
        original: Any = self._original  # set: entering was refused without
        return original(model, num_tokens, *args, **kwargs)

    def _check(self, num_tokens: Tensor) -> None:
        invalid: Tensor | None = None
        with together(self._groups, self._device):
            invalid = self._invalid_tokens()
        counts = num_tokens.new_zeros(2, dtype=torch.float64)
        counts[0] = num_tokens.reshape(())
        if invalid is not None:
            counts[1] = invalid
        tokens, bad = reduce_counts(counts, self._groups).tolist()
        if bad:
            raise ValueError(
                f"invalid data on {bad:.0f} of {tokens:.0f} valid tokens of this optimizer step: log-ratios "
                "that are not finite or out of range; the optimizer has not moved. Mask such tokens, or find out why "
                "the engines disagree"
            )
        if tokens == 0:
            raise RuntimeError(NO_TOKENS)


def overlaps(chunk: Any) -> bool:
    """Whether Megatron's DDP sums gradients over replicas while the last backward pass still runs."""
    config = getattr(chunk, "ddp_config", None)
    return config is not None and bool(config.overlap_grad_reduce)


def _wait_for_gradients(model: Sequence[Any]) -> None:
    """For sums that are under way: Megatron refuses to begin the next ones before."""
    for chunk in model:
        if overlaps(chunk):
            chunk.finish_grad_sync()
