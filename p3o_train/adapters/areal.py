"""P3O as the loss of an AReaL training step:

    context = step_context(batch, config, group)                    # group: data parallel (with Megatron x context)
    engine.train_batch(
        batch, loss_fn=functools.partial(p3o_loss_fn, context=context), loss_weight_fn=loss_weight
    )

AReaL does not call a loss for micro-batches without tokens, so a collective inside it would wait forever: e comes from
outside, from the log-probs that the trainer has recomputed (prox_logp) and those of the engine (logprobs). That needs
use_decoupled_loss and recompute_logprob, without which AReaL overwrites one of them by the other, and one optimizer
step for each batch (ppo_n_minibatches 1).

A loss is a mean over its micro-batch; AReaL weighs it by ``loss_weight`` over the sum of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from p3o_kernels import ESSContext, p3o_loss, ratio_stats
from p3o_train.adapters._common import LossSettings, check_same_shape, freeze


def step_context(batch: Mapping[str, Any], config: Any, process_group: ProcessGroup | None = None) -> ESSContext:
    """The frozen e of the optimizer step, after compute_advantages. Every rank of the group calls; one host read.

    Ranks that hold the same samples may be in the group: e does not change when every token is counted as often.

    Args:
        batch: logprobs, prox_logp, loss_mask [B, S] of this rank, as compute_advantages leaves them.
        config: PPOActorConfig.

    Raises:
        ValueError: settings under which the batch does not hold both log-probs, invalid data.
        RuntimeError: no valid token.
    """
    for name, wanted, why in (
        ("use_decoupled_loss", True, "AReaL overwrites logprobs, those of the engine, by prox_logp or the other way"),
        ("recompute_logprob", True, "prox_logp are not those of the weights that the step starts from"),
        ("ppo_n_minibatches", 1, "later optimizer steps start from other weights than the log-probs are of"),
    ):
        if getattr(config, name) != wanted:
            raise ValueError(
                f"actor.{name} is {getattr(config, name)!r}, and so {why}; set actor.{name}={str(wanted).lower()}"
            )
    if batch.get("prox_logp") is None:
        raise ValueError("the batch has no prox_logp: call actor.compute_logp and compute_advantages before")
    mask = batch["loss_mask"].bool()
    check_same_shape(logprobs=batch["logprobs"], prox_logp=batch["prox_logp"], loss_mask=mask)
    stats = ratio_stats(batch["prox_logp"], batch["logprobs"], mask)
    return freeze(stats if process_group is None else stats.all_reduce(process_group))


def loss_weight(input_data: Mapping[str, Any]) -> Tensor:
    """[] int64, the valid tokens of a micro-batch."""
    return input_data["loss_mask"].bool().sum()  # type: ignore[no-any-return]


def p3o_loss_fn(
    logprobs: Tensor,
    entropy: Tensor,
    input_data: Mapping[str, Any],
    *,
    context: ESSContext,
    entropy_coef: float = 0.0,
    kl_mode: str = "proxy_safe",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **vocabulary_stats: Any,
) -> Tensor:
    """The mean loss of one micro-batch, differentiable in ``logprobs``. One host read, no collective.

    Args:
        logprobs, entropy: of the trainer.
        input_data: logprobs of the engine, advantages, loss_mask, in the shape of ``logprobs``.
        context: from ``step_context``.
        entropy_coef, kl_mode, clip_low, clip_high: as ``p3o_kernels.p3o_loss``.
        vocabulary_stats: what AReaL passes for its own metrics; not used.

    Raises:
        ValueError: shapes that differ, invalid data.
    """
    mask = input_data["loss_mask"].bool()
    behavior, advantages = input_data["logprobs"], input_data["advantages"]
    check_same_shape(logprobs=logprobs, behavior_logprobs=behavior, advantages=advantages, loss_mask=mask)
    return p3o_loss(
        logprobs,
        behavior,
        advantages,
        mask,
        context=context,
        entropy=entropy if entropy_coef else None,
        entropy_coef=entropy_coef,
        **LossSettings(kl_mode, clip_low, clip_high).keywords(),
    ).loss
