"""Which arguments cannot be trained with, as a table: one small rule for each reason.

Accepted on purpose: the deterministic modes of a framework, on or off, since statistics are float64 sums in a fixed
order; true_on_policy_mode; a vision-language model (is_vl_model) that is fed text; everything of step scope's rules in
micro-batch scope, where the loss and e come from one and the same pass.
"""

from __future__ import annotations

import math
from typing import Any

from p3o_train.objective import SCOPES, SOURCES, WITHOUT_PULL
from p3o_train.rules import (
    Rule,
    above_zero,
    flag_of,
    given_but_not,
    micro_batch_scope,
    number,
    off,
    on,
    other_reference_kl,
    ours,
    p3o,
    prepass,
    reuse,
    several_steps,
    step_scope,
    undeclared_temperature,
    unused_reference,
    value_of,
    whitened_in_parts,
    whole,
)

KL_MODES = ("proxy_safe", "proxy", "importance", "off")
"""The pull of P3O towards the behavior policy: how it is estimated, or that there is none."""

_LEAVE_OUT = {
    "use_tis": "P3O weights every token by its capped ratio already, and a second importance weight double-corrects",
    "use_critic": "the advantages of P3O are relative to a group of responses and need no value function",
    "use_opd": "P3O and on-policy distillation are mutually exclusive: each brings its own pull towards a policy",
    "get_mismatch_metrics": "they change loss masks by the weights between trainer and engine, and e would not know of "
    "it; e and the mean ratio report that mismatch",
    "use_opsm": "it masks sequences for a drift that the cap of P3O has weighed already, and e would not know of it",
    "custom_pg_loss_reducer_function_path": "the loss is a sum over tokens, divided once by the exact count of the "
    "step, and another reduction changes the objective",
    "enable_mtp_training": "the loss of multi-token prediction is added inside the model, over other tokens than P3O's",
    "mtp_num_layers": "the loss of multi-token prediction is added inside the model, over other tokens than P3O's",
    "use_routing_replay": "its store of expert choices fits one forward pass, and P3O's passes are others",
    "moe_enable_routing_replay": "its store of expert choices fits one forward pass, and P3O's passes are others",
    "use_rollout_routing_replay": "its store of expert choices fits one forward pass, and P3O's passes are others",
    "overlap_moe_expert_parallel_comm": "it selects the combined 1F1B schedule, which asks the forward step for a "
    "schedule plan, and a plan has no logits",
}
_STREAMING = (
    "micro-batches arrive while the step runs and cannot be read twice, and log-probs may be those of other weights"
)
_NOISE = (
    "two forward passes over the same tokens draw different noise, so e would not belong to the log-probs that are "
    "trained on"
)
_SCALES = (
    "scaling factors follow the values of earlier passes, so the pass that e comes from changes the pass that is "
    "trained with"
)
_CHOICES = {
    "p3o_ess_scope": (SCOPES, ""),
    "p3o_context_source": (SOURCES, ""),
    "p3o_kl_mode": (KL_MODES, '; "exact" requires full-vocabulary behavior logits, which rollouts do not record'),
}


def broken_rules(args: Any) -> list[Rule]:
    """Every rule that ``args`` breaks, in the order of the table."""
    return [rule for rule in RULES if rule.concerns(args) and rule.broken(args)]


def _left_out(name: str, why: str) -> Rule:
    return Rule(name, p3o, (name,), on(name), why, f"leave {flag_of(name)} out")


def _step_only(name: str, why: str, is_number: bool = False) -> Rule:
    broken, repair = (above_zero(name), f"set {flag_of(name)} 0") if is_number else (on(name), "leave it out")
    return Rule(name, step_scope, (name,), broken, why, f"{repair}, or set --p3o-ess-scope micro-batch")


def _non_negative(name: str) -> Rule:
    broken = given_but_not(name, lambda value: 0 <= number(value) < math.inf)
    why = "ratios are compared with 1 - clip_low and 1 + clip_high, and both must be finite and >= 0"
    return Rule(name, ours, (name,), broken, why, f"set {flag_of(name)} 0.2")


def _finite(name: str) -> Rule:
    broken = given_but_not(name, lambda value: math.isfinite(number(value)))
    return Rule(name, ours, (name,), broken, "the weight of a term must be a finite number", f"set {flag_of(name)} 0")


def _choice(name: str) -> Rule:
    choices, hint = _CHOICES[name]
    why = f"it must be one of {', '.join(choices)}{hint}"
    return Rule(name, p3o, (name,), given_but_not(name, choices.__contains__), why, f"set {flag_of(name)} {choices[0]}")


def _truncating(name: str, everything: float) -> Rule:
    unrecorded = given_but_not(name, lambda value: number(value) == everything)
    return Rule(
        name,
        p3o,
        (name, "record_kept_tokens"),
        lambda args: unrecorded(args) and not value_of(args, "record_kept_tokens"),
        "ratios need log-probs of the untruncated rollout distribution, or the tokens that were kept at each position",
        f"set {flag_of(name)} {everything}, or --record-kept-tokens",
    )


RULES: tuple[Rule, ...] = (
    *map(_choice, _CHOICES),
    Rule(
        "no pull in micro-batch scope",
        micro_batch_scope,
        ("p3o_kl_mode", "p3o_ess_scope"),
        lambda args: value_of(args, "p3o_kl_mode") == "off",
        WITHOUT_PULL,
        "set --p3o-ess-scope step, or --p3o-kl-mode proxy_safe",
    ),
    Rule(
        "behavior log-probs",
        p3o,
        ("use_rollout_logprobs",),
        off("use_rollout_logprobs"),
        "without the log-probs recorded while sampling there is no importance ratio to correct",
        "set --use-rollout-logprobs",
    ),
    Rule(
        "token mean",
        p3o,
        ("calculate_per_token_loss",),
        off("calculate_per_token_loss"),
        "a per-micro-batch denominator makes the weight of a token depend on how the step is cut",
        "set --calculate-per-token-loss",
    ),
    _truncating("rollout_top_p", 1.0),
    _truncating("rollout_top_k", -1),
    Rule(
        "record_kept_tokens",
        ours,
        ("record_kept_tokens", "loss_from_hidden"),
        lambda args: on("record_kept_tokens")(args) and on("loss_from_hidden")(args),
        "log-probs over the kept tokens need the logits of those, and --loss-from-hidden normalises over all",
        "leave --loss-from-hidden out, or sample without top-p and top-k",
    ),
    Rule(
        "rollout_temperature",
        ours,
        ("rollout_temperature",),
        given_but_not("rollout_temperature", lambda value: 0 < number(value) < math.inf),
        "it divides the trainer's logits too and must be a finite number > 0; greedy decoding (0) has no log-probs",
        "set --rollout-temperature 1.0",
    ),
    Rule(
        "temperature_convention",
        ours,
        ("temperature_convention", "rollout_temperature"),
        undeclared_temperature,
        "at another temperature than 1, e depends on what log-probs are of and on what the trainer divides logits by",
        "set --temperature-convention scaled (both by the temperature), mismatch (log-probs by it, trainer at 1) or "
        "raw (both at 1)",
    ),
    Rule(
        "update_weights_interval",
        ours,
        ("update_weights_interval",),
        given_but_not("update_weights_interval", lambda value: whole(value) and value >= 1),
        "the engines get new weights every that many rollouts, which must be a whole number >= 1",
        "set --update-weights-interval 1",
    ),
    _non_negative("clip_low"),
    _non_negative("clip_high"),
    _finite("entropy_coef"),
    _finite("kl_loss_coef"),
    *(_left_out(name, why) for name, why in _LEAVE_OUT.items()),
    Rule(
        "normalize_advantages",
        p3o,
        ("normalize_advantages", "data_parallel_size", "context_parallel_size"),
        whitened_in_parts,
        "whitening over a part of the ranks puts parts of one response on different scales, and which ranks the mean "
        "and the deviation come from cannot be seen from here",
        "leave --normalize-advantages out: advantages are relative to the group of their prompt already",
    ),
    Rule(
        "recompute_loss_function",
        micro_batch_scope,
        ("recompute_loss_function", "p3o_ess_scope"),
        on("recompute_loss_function"),
        "in micro-batch scope the loss reduces e over the ranks, and computing it again in the backward pass would "
        "enter that collective a second time",
        "leave --recompute-loss-function out, or set --p3o-ess-scope step",
    ),
    Rule(
        "use_kl_loss",
        p3o,
        ("kl_loss_coef", "use_kl_loss"),
        unused_reference,
        "the weight asks for a reference KL, but without its switch no reference policy is loaded",
        "set --use-kl-loss, or --kl-loss-coef 0",
    ),
    Rule(
        "kl_loss_type",
        p3o,
        ("kl_loss_type", "kl_loss_coef"),
        other_reference_kl,
        "the reference KL of P3O is the k3 estimate",
        "set --kl-loss-type k3, or --kl-loss-coef 0",
    ),
    _step_only("fp8", _SCALES),
    _step_only("fp4", _SCALES),
    _step_only("attention_dropout", _NOISE, is_number=True),
    _step_only("hidden_dropout", _NOISE, is_number=True),
    _step_only("moe_input_jitter_eps", _NOISE, is_number=True),
    Rule(
        "lora_dropout",
        step_scope,
        ("lora_dropout", "lora_rank"),
        above_zero("lora_dropout", "lora_rank"),
        _NOISE,
        "set --lora-dropout 0, or --p3o-ess-scope micro-batch",
    ),
    _step_only("fully_async", _STREAMING),
    # the same streaming, with weights shared between the roles
    _step_only("hybrid", _STREAMING),
    _step_only("return_schedule_plan", "a schedule plan has no outputs, and e needs log-probs"),
    Rule(
        "multimodal_keys",
        prepass,
        ("multimodal_keys",),
        on("multimodal_keys"),
        "the pre-pass forwards tokens alone, so e would be that of a model that does not see the images",
        "set --p3o-ess-scope micro-batch, or --p3o-context-source reuse with a log-prob pass that sees them",
    ),
    Rule(
        "reuse in micro-batch scope",
        micro_batch_scope,
        ("p3o_context_source", "p3o_ess_scope"),
        reuse,
        "in micro-batch scope e comes from the log-probs of the loss itself, and another pass would be ignored",
        "set --p3o-ess-scope step, or leave --p3o-context-source out",
    ),
    Rule(
        "reuse over several steps",
        reuse,
        (
            "p3o_context_source",
            "num_steps_per_rollout",
            "rollout_batch_size",
            "n_samples_per_prompt",
            "global_batch_size",
        ),
        several_steps,
        "the log-prob pass ran with the weights before the first optimizer step of a rollout, and later steps have "
        "others",
        "set --p3o-context-source prepass, or one optimizer step per rollout",
    ),
    Rule(
        "reuse of old weights",
        reuse,
        ("p3o_context_source", "keep_old_actor"),
        on("keep_old_actor"),
        "the log-prob pass runs with the weights of the old actor, not with those that are trained",
        "set --p3o-context-source prepass, or leave --keep-old-actor out",
    ),
)
