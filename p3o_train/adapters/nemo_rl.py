"""P3O as a loss function of NeMo-RL, in place of the one that grpo.setup makes:

    loss_fn = P3OLossFn()                                  # token level
    add_step_context(train_data)                           # in grpo_train, before policy.train(train_data, loss_fn)

With sequence packing NeMo-RL calls a loss once for every sequence, so e cannot come from the call. It comes from the
log-probs that the trainer has recomputed for the whole batch (prev_logprobs), and travels in the batch, as one number
for each sample: slices for workers and micro-batches take it along. The loss has no collective.

That fits one optimizer step for each rollout batch: later ones start from other weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from p3o_kernels import ESSContext, p3o_loss, ratio_stats
from p3o_train.adapters._common import LossSettings, check_same_shape, freeze

KEY = "p3o_context"
"""[B, 5] float64 in the batch, equal rows: e, cap, N, mean and standard deviation of the ratios."""
_FIELDS = ("ess", "cap", "num_tokens", "ratio_mean", "ratio_std")
_SUMMED = (
    "normalized_ess",
    "ratio_mean",
    "cap_fraction",
    "clip_fraction",
    "score_loss",
    "behavior_kl_proxy",
    "adaptive_kl_loss",
    "total_loss",
)


def add_step_context(data: Any, *, train_global_batch_size: int | None = None) -> ESSContext:
    """Puts the frozen e of the step into the batch, for ``P3OLossFn``. One host read.

    Args:
        data: the whole training batch, with prev_logprobs, generation_logprobs, token_mask [B, S], sample_mask [B].
        train_global_batch_size: policy.train_global_batch_size; where given, it is checked against B.

    Raises:
        ValueError: several optimizer steps for this batch, log-probs that were not recomputed, invalid data.
        RuntimeError: no valid token.
    """
    mask = _mask(data)
    if train_global_batch_size is not None and train_global_batch_size < mask.shape[0]:
        raise ValueError(
            f"the batch has {mask.shape[0]} samples and policy.train_global_batch_size is {train_global_batch_size}: "
            "it feeds several optimizer steps, but its log-probs are those of the weights before the first; set "
            "train_global_batch_size to num_prompts_per_step * num_generations_per_prompt"
        )
    previous, generation = data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:]
    check_same_shape(prev_logprobs=previous, generation_logprobs=generation, token_mask=mask)
    if mask.any() and not torch.where(mask, previous, 0.0).any():
        raise ValueError(
            "prev_logprobs are all 0, as NeMo-RL leaves them when it does not recompute them: set "
            "loss_fn.force_on_policy_ratio=false, so that the trainer computes them"
        )
    context = freeze(ratio_stats(previous, generation, mask))
    row = torch.stack([getattr(context, name) for name in _FIELDS])
    data[KEY] = row.repeat(mask.shape[0], 1)
    return context


class P3OLossFn:
    """NeMo-RL's protocol of loss functions: token level, from log-probs."""

    def __init__(self, *, kl_mode: str = "proxy_safe", clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        """Arguments as ``p3o_kernels.p3o_loss``; needs nemo_rl."""
        interfaces = importlib.import_module("nemo_rl.algorithms.loss.interfaces")
        self.loss_type = interfaces.LossType.TOKEN_LEVEL
        self.input_type = interfaces.LossInputType.LOGPROB
        self.settings = LossSettings(kl_mode, clip_low, clip_high)
        self.metric_normalizations = dict.fromkeys(
            ("loss", *map("p3o/{}".format, _SUMMED)), interfaces.MetricNormalizer.TOKENS
        )
        self.metric_normalizations["num_valid_samples"] = interfaces.MetricNormalizer.NONE

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        *,
        next_token_logprobs: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Loss of some samples, divided by ``global_valid_toks``, and metrics that add up over calls. One host read.

        Raises:
            ValueError: no e in the batch, shapes that differ, invalid data.
        """
        if KEY not in data:
            raise ValueError(
                "the batch has no e of the step: call p3o_train.adapters.nemo_rl.add_step_context(train_data) after "
                "prev_logprobs are computed and before policy.train"
            )
        mask = _mask(data)
        behavior, advantages = data["generation_logprobs"][:, 1:], data["advantages"][:, 1:]
        check_same_shape(
            next_token_logprobs=next_token_logprobs,
            generation_logprobs=behavior,
            advantages=advantages,
            token_mask=mask,
        )
        made = p3o_loss(
            next_token_logprobs,
            behavior,
            advantages,
            mask,
            context=_context(data[KEY], next_token_logprobs.device),
            reduction="sum",
            **self.settings.keywords(),
        )
        loss = made.loss / global_valid_toks
        means = made.metrics.means()
        share = means["valid_tokens"] / global_valid_toks
        values = torch.stack([loss.detach().double(), *(means[name] * share for name in _SUMMED)]).tolist()
        metrics: dict[str, Any] = dict(zip(self.metric_normalizations, values, strict=False))
        metrics["num_valid_samples"] = data["sample_mask"].sum().item()
        return loss, metrics


def _mask(data: Mapping[str, Any]) -> Tensor:
    """[B, S - 1] bool over the tokens that are predicted."""
    mask: Tensor = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)) > 0
    return mask


def _context(rows: Tensor, device: torch.device) -> ESSContext:
    return ESSContext(*rows[0].to(device, torch.float64).unbind())
