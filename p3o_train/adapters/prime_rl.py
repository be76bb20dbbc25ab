"""P3O as a custom loss of prime-rl.

    [trainer.loss]
    type = "custom"
    import_path = "p3o_train.adapters.prime_rl.p3o_loss_fn"

prime-rl calls it once for every sample, so e cannot come from the call: in the trainer, ``publish(context)`` before the
micro-batches of an optimizer step and ``withdraw()`` after it. The context is that of all its tokens over data- and
context-parallel ranks, as ``sum of ratio_stats(trainer_logprobs, inference_logprobs, loss_mask)``, ``all_reduce`` and
``to_context``, from a forward pass without gradients. The loss has no collective.

prime-rl divides the sum of all samples by its count of rl tokens in the step, and sums gradients over ranks.
"""

from __future__ import annotations

import importlib
from typing import Any

from p3o_kernels import ESSContext, p3o_loss
from p3o_train.adapters._common import LossSettings, Slot, check_same_shape

_step = Slot(
    "call p3o_train.adapters.prime_rl.publish(context) in the trainer before the micro-batches of the step: a call "
    "sees one sample, and an e of its own would be that of the sample"
)


def publish(context: ESSContext) -> None:
    """The frozen e of the optimizer step that follows."""
    _step.publish(context)


def withdraw() -> None:
    """After the step: its e is not that of the next."""
    _step.withdraw()


def p3o_loss_fn(inputs: Any, *, kl_mode: str = "proxy_safe", clip_low: float = 0.2, clip_high: float = 0.2) -> Any:
    """LossOutputs of one sample: the token sum of its loss and 0-d metrics. One host read.

    Args:
        inputs: LossInputs with trainer_logprobs, inference_logprobs, advantages, loss_mask, all [T].
        kl_mode, clip_low, clip_high: ``trainer.loss.kwargs``, as ``p3o_kernels.p3o_loss``.

    Raises:
        RuntimeError: no published e.
        ValueError: shapes that differ, weights of tokens, invalid data.
    """
    context = _step.require()
    mask = inputs.loss_mask.bool()
    check_same_shape(
        trainer_logprobs=inputs.trainer_logprobs,
        inference_logprobs=inputs.inference_logprobs,
        advantages=inputs.advantages,
        loss_mask=mask,
    )
    if inputs.loss_weights is not None and bool((inputs.loss_weights[mask] != 1).any()):
        raise ValueError(
            "loss_weights must be 1 where the loss is taken: P3O weights every token by its capped ratio, and another "
            "weight changes the objective but not e; use an algorithm that gives rl tokens the weight 1"
        )
    made = p3o_loss(
        inputs.trainer_logprobs,
        inputs.inference_logprobs,
        inputs.advantages,
        mask,
        context=context,
        reduction="sum",
        **LossSettings(kl_mode, clip_low, clip_high).keywords(),
    )
    outputs = importlib.import_module("prime_rl.trainer.rl.loss").LossOutputs
    metrics = {f"p3o/{name}": value.float() for name, value in made.metrics.means().items()}
    return outputs(loss=made.loss, metrics=metrics)
