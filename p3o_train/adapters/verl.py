"""P3O as a policy loss of verl, in a module of yours that every worker imports:

    # my_p3o.py; actor_rollout_ref.model.external_lib=my_p3o actor_rollout_ref.actor.policy_loss.loss_mode=p3o
    import torch.distributed as dist
    from p3o_train.adapters.verl import register

    register(process_group=lambda: dist.group.WORLD)     # the data-parallel group; with Megatron that of parallel_state

verl gives a policy loss one other policy, old_log_prob. For P3O it must be the behavior policy, so in the trainer,
before the update: ``use_rollout_log_probs(batch)``, with actor_rollout_ref.rollout.calculate_log_probs=True. Not with
algorithm.rollout_correction.bypass_mode, which copies them too but selects a loss of its own.

Log-probs that context- or sequence-parallel ranks share are gathered before the loss sees them, so e is reduced over
data-parallel ranks only. Reference KL and entropy bonus are verl's own terms, added around this loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import ESSContext, p3o_loss
from p3o_train.adapters._common import VERL_NAMES, LossSettings, Slot, check_same_shape

_step = Slot("call p3o_train.adapters.verl.publish(context) in the worker before its update")


def publish(context: ESSContext) -> None:
    """The frozen e of the optimizer step that follows: the loss takes it instead of one for each micro-batch."""
    _step.publish(context)


def withdraw() -> None:
    """After the step: its e is not that of the next."""
    _step.withdraw()


def register(
    name: str = "p3o",
    *,
    process_group: Callable[[], ProcessGroup | None] | None = None,
    kl_mode: str = "proxy_safe",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """Registers the loss under ``name`` (actor.policy_loss.loss_mode) and returns it; needs verl.

    Args:
        process_group: called at every micro-batch, gives the data-parallel group that S1, S2, N are reduced over; it
            does not exist yet when modules are imported. None: only for one data-parallel rank or a published e.
        kl_mode, clip_low, clip_high: those of ``p3o_kernels.p3o_loss``.
    """
    algos = importlib.import_module("verl.trainer.ppo.core_algos")
    loss = policy_loss(LossSettings(kl_mode, clip_low, clip_high), process_group)
    registered: Callable[..., tuple[Tensor, dict[str, Any]]] = algos.register_policy_loss(name)(loss)
    return registered


def policy_loss(
    settings: LossSettings, process_group: Callable[[], ProcessGroup | None] | None
) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """A function with the signature of verl's policy losses.

    Its arguments: old_log_prob (of the behavior policy), log_prob, advantages, response_mask [B, R], loss_agg_mode,
    config with ``global_batch_info``, rollout_is_weights. Every data-parallel rank calls it for every micro-batch
    index, which verl's engines see to. It returns the loss, scaled as verl's token-mean is, and metrics of this
    micro-batch as numbers.

    It raises ValueError for invalid data (on every rank), shapes that differ, another aggregation, importance weights,
    or several data-parallel ranks without a group.
    """

    def p3o(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        shared = dict(getattr(config, "global_batch_info", None) or {})
        dp_size, num_tokens = _checked(shared, loss_agg_mode, rollout_is_weights)
        check_same_shape(
            old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask
        )
        context: ESSContext | None = _step.get()
        group = process_group() if process_group is not None and context is None else None
        if context is None and group is None and dp_size > 1:
            raise ValueError(
                f"{dp_size} data-parallel ranks, but no group to reduce e over, so every rank would have its own: "
                "register(process_group=...) with a function that returns verl's data-parallel group"
            )
        made = p3o_loss(
            log_prob,
            old_log_prob,
            advantages,
            response_mask.bool(),
            context=context,
            process_group=None if group is None or group.size() == 1 else group,
            reduction="sum",
            **settings.keywords(),
        )
        # verl averages gradients over data-parallel ranks
        loss = made.loss * dp_size / (made.num_tokens.clamp_min(1) if num_tokens is None else num_tokens)
        named = made.metrics.to_dict("")
        mirror = {theirs: named[ours] for ours, theirs in VERL_NAMES.items()}
        return loss, {f"actor/p3o/{name}": value for name, value in named.items()} | mirror

    return p3o


def use_rollout_log_probs(data: Any) -> None:
    """Makes the behavior policy verl's old policy: copies rollout_log_probs into old_log_probs of a batch.

    Args:
        data: a DataProto, or a mapping of [B, R] tensors. What the trainer had recomputed is replaced.

    Raises:
        ValueError: no rollout_log_probs, or of another shape than response_mask, or importance weights in the batch.
    """
    batch = getattr(data, "batch", data)
    if "rollout_log_probs" not in batch:
        raise ValueError(
            "the batch has no rollout_log_probs, and without them there is no behavior policy: set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if "rollout_is_weights" in batch:
        raise ValueError(f"the batch has rollout_is_weights: {_WEIGHTS}")
    rollout = batch["rollout_log_probs"]
    if "response_mask" in batch:
        check_same_shape(rollout_log_probs=rollout, response_mask=batch["response_mask"])
    batch["old_log_probs"] = rollout


_WEIGHTS = (
    "P3O weights every token by its capped ratio to the behavior policy already, and a second weight double-corrects; "
    "set algorithm.rollout_correction.rollout_is=null"
)


def _checked(
    shared: Mapping[str, Any], loss_agg_mode: str, rollout_is_weights: Tensor | None
) -> tuple[int, float | None]:
    """Data-parallel size and the token count of the optimizer step, None where verl has not set it."""
    if rollout_is_weights is not None:
        raise ValueError(f"rollout_is_weights must be None: {_WEIGHTS}")
    if loss_agg_mode != "token-mean":
        raise ValueError(
            f"loss_agg_mode must be token-mean, got {loss_agg_mode!r}: P3O is a mean over tokens, and another weight "
            "of long and short responses is another objective; set actor_rollout_ref.actor.loss_agg_mode=token-mean"
        )
    dp_size, num_tokens = shared.get("dp_size") or 1, shared.get("batch_num_tokens")
    if num_tokens is None and dp_size > 1:
        raise ValueError(
            "config.global_batch_info has no batch_num_tokens with several data-parallel ranks, so each would divide "
            "by a count of its own; use an engine that sets it"
        )
    return int(dp_size), num_tokens
