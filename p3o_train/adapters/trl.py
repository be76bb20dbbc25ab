"""P3O in TRL: ``P3OConfig`` and ``P3OTrainer`` in the place of ``GRPOConfig`` and ``GRPOTrainer``.

    from p3o_train.adapters.trl import P3OConfig, P3OTrainer

Generation, rewards, advantages and logging stay TRL's; the loss is ``p3o_kernels.p3o_loss`` over the completion tokens
that TRL counts. Log-probs follow TRL's temperature convention: those of the sampling engine and of the trainer are both
of logits divided by ``temperature``, so fresh data has ratio 1.

An optimizer step is a *window*: ``gradient_accumulation_steps`` micro-batches on every process. The loss of a window is
its token sum over its exact count of tokens, whatever the window is cut into.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.distributed import ProcessGroup
from trl import GRPOConfig, GRPOTrainer

from p3o_kernels import ESSContext, P3OMetrics, RatioStats, p3o_loss, ratio_stats
from p3o_train.adapters.trl_settings import check_generation, check_settings, check_vllm_server

# of TRL's micro-batches; another one would be a term of the loss that P3O leaves out
_INPUTS = {
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "advantages",
    "num_items_in_batch",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "ref_per_token_logps",
}
_RECORDED = {"old_per_token_logps", "sampling_per_token_logps"}


@dataclass
class P3OConfig(GRPOConfig):
    """TRL's settings and those of P3O. Two defaults differ from TRL's: ``vllm_importance_sampling_correction`` and
    ``use_bias_correction_kl`` are False.

    ``beta`` is the weight of the k3 estimate of the KL to the reference model; ``entropy_coef`` that of the mean
    entropy of the step's tokens. ``epsilon`` and ``epsilon_high`` are margins of the metric p3o/clip_fraction alone.

    Raises:
        ValueError: settings that would train something else than P3O (see ``trl_settings``).
    """

    p3o_ess_scope: str = field(
        default="micro-batch",
        metadata={
            "help": "Tokens that e comes from. 'micro-batch': those of each micro-batch, over all processes; no extra "
            "work, but e depends on how a step is cut. 'step': those of the optimizer step, before its first gradient; "
            "stale data costs one more forward pass without gradients."
        },
    )
    p3o_kl_mode: str = field(
        default="proxy_safe",
        metadata={"help": "Pull towards the behavior policy: 'proxy_safe', 'proxy' or 'importance'."},
    )
    vllm_importance_sampling_correction: bool = field(
        default=False, metadata={"help": "Must stay False: the ratio of P3O corrects for vLLM's log-probs already."}
    )
    use_bias_correction_kl: bool = field(
        default=False, metadata={"help": "Must stay False with beta: P3O adds the plain k3 estimate."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)


@dataclass
class _Window:
    """What the micro-batches of an optimizer step share."""

    num_tokens: Tensor
    """[] divisor of the loss: tokens of the window over processes, which average their gradients."""
    context: ESSContext | None
    """The frozen e; None in micro-batch scope."""
    metrics: P3OMetrics
    """Sums so far, on this process."""


class P3OTrainer(GRPOTrainer):
    """TRL's ``GRPOTrainer`` with the loss of P3O; arguments as there, with a ``P3OConfig``.

    The behavior policy of a token: the log-probs that vLLM (or a ``rollout_func``, which must give those of the
    distribution it samples from) recorded; else the trainer's own at generation time; else, where TRL keeps none
    because the data is as new as the weights, the current ones, so that every ratio is 1.

    Metrics come under p3o/, once for each optimizer step, from sums over its tokens; ``entropy`` and ``kl`` are TRL's.

    Raises:
        TypeError: settings that are no ``P3OConfig``.
        ValueError: settings, a model or data that would train something else than P3O.
        RuntimeError: an optimizer step without valid tokens, or one that TRL cuts short.
    """

    _tag_names = ["trl", "p3o"]  # noqa: RUF012, as in the class above
    _name = "P3O"
    _paper = {  # noqa: RUF012
        "title": "Trust the Batch, On- or Off-Policy: Adaptive Policy Optimization for RL Post-Training",
        "id": "2605.12380",
    }
    _p3o_window: _Window

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: P3OConfig | None = None, *more: Any, **options: Any
    ) -> None:
        if not isinstance(args, P3OConfig):
            raise TypeError(
                f"args must be a P3OConfig, got {type(args).__name__}; it takes all of GRPOConfig's settings"
            )
        check_settings(args)  # again: settings can be changed after they are made
        super().__init__(model, reward_funcs, args, *more, **options)
        _check_model(self)

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """The loss of one micro-batch: a token sum over the count of its window."""
        unknown = sorted(set(inputs) - _INPUTS)
        if unknown:
            raise ValueError(
                f"the micro-batch holds {', '.join(unknown)}, which P3O does not know; images are not supported, and "
                "of a TRL newer than 1.16 these may belong to a setting that must be off"
            )
        if not self.model.training:  # every batch stands for itself
            tokens = inputs["num_items_in_batch"] / self.accelerator.num_processes
            loss, metrics = self._token_loss(model, inputs, _Window(tokens, None, P3OMetrics.zeros(tokens.device)))
            self._report("eval", metrics)
            return loss
        steps = self.args.gradient_accumulation_steps
        if self._step % steps == 0:
            self._p3o_window = self._open_window(model)
        loss, metrics = self._token_loss(model, inputs, self._p3o_window)
        self._p3o_window.metrics += metrics
        if self._step % steps == steps - 1:
            self._report("train", self._p3o_window.metrics)
        return loss

    def _token_loss(self, model: Any, inputs: Mapping[str, Any], window: _Window) -> tuple[Tensor, P3OMetrics]:
        log_probs, entropy = self._log_probs(model, inputs)
        advantages = inputs["advantages"]
        made = p3o_loss(
            log_probs,
            _behavior(inputs, log_probs),
            (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(log_probs),
            _mask(inputs),
            context=window.context,
            process_group=self._p3o_group if window.context is None else None,
            num_tokens=window.num_tokens,
            kl_mode=self.args.p3o_kl_mode,
            clip_low=self.epsilon_low,
            clip_high=self.epsilon_high,
            ref_log_probs=inputs["ref_per_token_logps"] if self.beta else None,
            ref_kl_coef=self.beta,
            entropy=entropy if self.entropy_coef else entropy.detach(),
            entropy_coef=self.entropy_coef,
            validate=False,  # _report decides once a step, on every process
        )
        return made.loss, made.metrics

    @property
    def _p3o_group(self) -> ProcessGroup | None:
        return torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None

    def _log_probs(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """[B, C] log-probs of the completion tokens, and entropies; 0 at padding."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        kept = inputs["completion_ids"].size(1)
        log_probs, entropy, _ = self._get_per_token_logps_and_entropies(
            model, ids, attended, kept, compute_entropy=True
        )
        return log_probs, entropy

    def _open_window(self, model: Any) -> _Window:
        """Count the tokens of the optimizer step that begins and, in step scope, freeze its e."""
        steps = self.args.gradient_accumulation_steps
        if self.current_gradient_accumulation_steps != steps:
            raise RuntimeError(
                f"this optimizer step has {self.current_gradient_accumulation_steps} micro-batches instead of "
                f"gradient_accumulation_steps={steps}, so its count of tokens is not known; let the prompts of an "
                "epoch be a multiple of those of a generation"
            )
        first = self._step % self.args.steps_per_generation
        micro_batches = self._buffered_inputs[first : first + steps]
        tokens = self.accelerator.reduce(
            torch.stack([_mask(each).sum() for each in micro_batches]).sum(), reduction="sum"
        )
        # current weights without recorded log-probs are the behavior policy: every ratio is 1 in both scopes
        frozen = self.args.p3o_ess_scope == "step" and not _RECORDED.isdisjoint(micro_batches[0])
        context = self._step_context(model, micro_batches) if frozen else None
        return _Window(tokens / self.accelerator.num_processes, context, P3OMetrics.zeros(tokens.device))

    @torch.no_grad()
    def _step_context(self, model: Any, micro_batches: Sequence[Mapping[str, Any]]) -> ESSContext:
        # right after a generation TRL's own pass, where it made one, has used these weights
        fresh = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        total = RatioStats.zeros(self.accelerator.device)
        for each in micro_batches:
            made = fresh and "old_per_token_logps" in each
            log_probs = each["old_per_token_logps"] if made else self._log_probs(model, each)[0]
            total = total + ratio_stats(log_probs, _behavior(each, log_probs), _mask(each))
        if self._p3o_group is not None:
            total = total.all_reduce(self._p3o_group)
        return total.to_context(validate=False)

    def _report(self, mode: str, metrics: P3OMetrics) -> None:
        """Append the numbers of a window to TRL's metrics, by one host read, or stop every process."""
        if self._p3o_group is not None:
            metrics = metrics.all_reduce(self._p3o_group)
        values = metrics.to_dict(prefix="")
        if values["invalid_tokens"] or not math.isfinite(values["total_loss"]):
            raise ValueError(
                f"{values['invalid_tokens']:.0f} of {values['valid_tokens']:.0f} tokens of this step have a log-prob, "
                "ratio, advantage or reference log-prob that is no finite number, so it has no loss; the weights "
                "are those before it. An engine that gives NaN or -inf for a token must mask that token"
            )
        if mode == "train" and not values["valid_tokens"]:
            raise RuntimeError(
                "an optimizer step without valid completion tokens would move the weights by the optimizer's state "
                "alone; raise max_completion_length, or set mask_truncated_completions=False"
            )
        logged = {f"p3o/{name}": value for name, value in values.items()} | {"entropy": values["entropy"]}
        logged |= {"kl": values["reference_kl"]} if self.beta else {}
        for name, value in logged.items():
            self._metrics[mode][name].append(value)


def _mask(inputs: Mapping[str, Any]) -> Tensor:
    """[B, C] bool: tokens that the policy sampled and that count."""
    mask: Tensor = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def _behavior(inputs: Mapping[str, Any], log_probs: Tensor) -> Tensor:
    """[B, C] log-probs under the policy that sampled: recorded ones or, where the data is fresh, the current ones."""
    behavior: Tensor = inputs.get("sampling_per_token_logps", inputs.get("old_per_token_logps", log_probs.detach()))
    return behavior


def _check_model(trainer: P3OTrainer) -> None:
    """Refuse what only the assembled trainer shows."""
    if trainer._is_vlm:
        raise ValueError("processing_class is a multimodal processor; P3O in TRL is for text, so pass a tokenizer")
    if trainer.aux_loss_enabled:
        raise ValueError(
            f"the load-balancing loss of this mixture of experts has the weight {trainer.router_aux_loss_coef}, and "
            "P3O leaves it out; set router_aux_loss_coef=0.0"
        )
    if not trainer.use_vllm:
        check_generation(trainer.model.generation_config.to_diff_dict(), trainer.generation_kwargs)
    elif trainer.vllm_mode == "server":
        mode = [None]
        if trainer.accelerator.is_main_process:  # it alone holds the client
            mode = [trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]]
        check_vllm_server(str(broadcast_object_list(mode)[0]))
    if trainer.args.p3o_ess_scope == "step":
        _check_dropout(trainer.model)


def _check_dropout(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        share = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if isinstance(share, float) and share > 0.0:
            raise ValueError(
                f'p3o_ess_scope="step" with dropout {share} in {name}: two forward passes over the same tokens draw '
                "different noise, so e would not belong to the log-probs that are trained on; set the dropout of the "
                'model or of the adapter to 0, or p3o_ess_scope="micro-batch"'
            )
