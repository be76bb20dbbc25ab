"""Which settings of TRL's GRPO trainer P3O cannot be trained with, and why; plain values, no import of TRL.

Every rule has one of two reasons: the setting changes the loss beside P3O, or it changes the distribution that tokens
are sampled from while their log-probs are those of another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SCOPES = ("micro-batch", "step")
KL_MODES = ("proxy_safe", "proxy", "importance")


class _Setting(NamedTuple):
    name: str
    neutral: tuple[Any, ...]
    """Accepted values; the first is the one to set."""
    why: str


_TWICE = "P3O weights every token by its capped ratio already, and this would weigh or drop tokens a second time"
_LOG_PROBS = "log-probs are taken over the whole vocabulary at the sampling temperature, and this samples otherwise"
_SETTINGS = (
    _Setting("loss_type", ("dapo",), "P3O brings its own loss, a token sum over the count of the optimizer step"),
    _Setting("importance_sampling_level", ("token",), "ratios and e are those of tokens"),
    _Setting("delta", (None,), _TWICE),
    _Setting("off_policy_mask_threshold", (None,), _TWICE),
    _Setting("top_entropy_quantile", (1.0,), "it drops tokens from the loss, and e would not know of it"),
    _Setting(
        "vllm_importance_sampling_correction",
        (False,),
        "the behavior log-probs of P3O are those that vLLM recorded, so its ratio corrects that mismatch already, and "
        "a second weight double-corrects",
    ),
    _Setting("use_adaptive_entropy", (False,), "the coefficient would follow an entropy that P3O does not measure"),
    _Setting("use_liger_kernel", (False,), "Liger's loss may take the place of the trainer's, and P3O with it"),
    _Setting("top_p", (1.0, 1), _LOG_PROBS),
    _Setting("top_k", (0, -1, None), _LOG_PROBS),
    _Setting("min_p", (None, 0.0, 0), _LOG_PROBS),
    _Setting("repetition_penalty", (1.0, 1), _LOG_PROBS),
    _Setting("vllm_structured_outputs_regex", (None,), _LOG_PROBS),
)
_OTHER_KL = (
    'P3O adds beta times the "k3" estimate of the KL to the reference, without a ratio before it, and this setting '
    "asks for another one"
)
# of generation: they end a response or store it, and do not touch the distribution of a token
_HARMLESS = ("max_new_tokens", "max_tokens", "cache_implementation", "use_cache", "seed", "stop", "stop_strings")
# of a model's own generation config, with the values at which they do nothing
_KNOBS: dict[str, tuple[Any, ...]] = {
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
}


def check_settings(args: Any) -> None:
    """Refuse a configuration whose training would not be P3O's.

    Args:
        args: a ``P3OConfig``, or anything with its attributes.

    Raises:
        ValueError: one for all that is wrong; it names each setting, its value, the reason and what to set.
    """
    problems = [
        f"{name}={getattr(args, name)!r}: {why}; set it to {neutral[0]!r}"
        for name, neutral, why in _SETTINGS
        if getattr(args, name) not in neutral
    ]
    problems += _own_settings(args)
    if args.beta and args.use_bias_correction_kl:
        problems.append(f"use_bias_correction_kl=True with beta={args.beta!r}: {_OTHER_KL}; set it to False")
    for name in sorted(set(args.generation_kwargs or {}) - set(_HARMLESS)):
        problems.append(
            f"generation_kwargs[{name!r}]={args.generation_kwargs[name]!r}: {_LOG_PROBS}, or may; leave it out (the "
            f"temperature has an argument of its own; accepted are {', '.join(_HARMLESS)})"
        )
    _raise(problems)


def _own_settings(args: Any) -> list[str]:
    problems = [
        f"{name}={getattr(args, name)!r}: must be one of {', '.join(choices)}"
        for name, choices in (("p3o_ess_scope", SCOPES), ("p3o_kl_mode", KL_MODES))
        if getattr(args, name) not in choices
    ]
    if not (math.isfinite(args.temperature) and args.temperature > 0):
        problems.append(f"temperature={args.temperature!r}: it divides logits and must be above 0")
    if args.steps_per_generation % args.gradient_accumulation_steps:
        problems.append(
            f"steps_per_generation={args.steps_per_generation!r} with gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps!r}: an optimizer step would span two generations, and its count of "
            "tokens, which divides the loss, is unknown until the second; set steps_per_generation to a multiple"
        )
    return problems


def check_generation(model_config: Mapping[str, Any], overridden: Iterable[str]) -> None:
    """Refuse what a model's own generation config would add to the sampling.

    Args:
        model_config: the config's values that differ from the library's defaults.
        overridden: names that the trainer sets itself.

    Raises:
        ValueError: a knob that changes the distribution of a token.
    """
    knobs = {name: model_config[name] for name in _KNOBS if name in model_config and name not in set(overridden)}
    _raise(
        f"model.generation_config.{name}={value!r}: {_LOG_PROBS}; set it to None"
        for name, value in knobs.items()
        if value is not None and value not in _KNOBS[name]
    )


def check_vllm_server(log_prob_mode: str) -> None:
    """Refuse a vLLM server whose log-probs are not those of the distribution that it samples from.

    Raises:
        ValueError: any mode but "processed_logprobs".
    """
    if log_prob_mode != "processed_logprobs":
        raise ValueError(
            f"the vLLM server records log-probs in the mode {log_prob_mode!r}, before the temperature, so ratios of "
            "fresh data would not be 1; start it with --logprobs-mode processed_logprobs"
        )


def _raise(problems: Iterable[str]) -> None:
    lines = [f"- {problem}" for problem in problems]
    if lines:
        raise ValueError("P3O cannot be trained with these settings:\n" + "\n".join(lines))
