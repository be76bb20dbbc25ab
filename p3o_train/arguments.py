"""Command-line arguments of P3O, on a parser of our own or on another framework's, and what they may not be.

Validate last, when configuration files and the framework itself have changed what they change:

    add_p3o_arguments(parser)
    args = parser.parse_args()
    validate_p3o_arguments(args)
    objective = objective_from_arguments(args)
"""

from __future__ import annotations

import argparse
from typing import Any

from p3o_train.checkpoint_files import is_native_checkpoint
from p3o_train.contract import CONVENTIONS
from p3o_train.objective import ESTIMATORS, SCOPES, SOURCES, Objective
from p3o_train.refusals import KL_MODES, broken_rules
from p3o_train.rules import number, p3o, value_of

_ESTIMATOR = "--advantage-estimator"
_DEFAULTS = Objective()

_ARGUMENTS: dict[str, dict[str, Any]] = {
    _ESTIMATOR: {
        "choices": ESTIMATORS,
        "default": _DEFAULTS.advantage_estimator,
        "help": "Loss and advantages. The others are there to compare P3O with: the clipped ratio of GRPO, the clipped "
        "constant weight of CISPO, and the plain policy gradient, which has no ratio.",
    },
    "--p3o-ess-scope": {
        "choices": SCOPES,
        "default": _DEFAULTS.ess_scope,
        "help": "Tokens that the effective sample size is taken over: those of each micro-batch index on all ranks, or "
        "those of the whole optimizer step, which costs another forward pass and does not depend on how it is cut.",
    },
    "--p3o-context-source": {
        "choices": SOURCES,
        "default": _DEFAULTS.context_source,
        "help": "Step scope only: a forward pass of its own, or the trainer's own log-prob pass, if that ran with the "
        "weights that the step starts from.",
    },
    "--p3o-kl-mode": {
        "choices": KL_MODES,
        "default": _DEFAULTS.kl_mode,
        "help": "Pull back to the behavior policy. proxy_safe and proxy have the same values; the gradient of proxy "
        "has the wrong sign at log-ratios below -10, where it pushes a token further away, so proxy_safe is the "
        "default. importance: the unbiased estimate, weighted by the ratio. off: no pull, for comparisons, step "
        "scope alone.",
    },
    "--loss-from-hidden": {
        "action": "store_true",
        "help": "Bypass the output layer: the loss takes hidden states, and logits never exist.",
    },
    "--clip-low": {
        "type": float,
        "default": _DEFAULTS.clip_low,
        "help": "GRPO and CISPO: ratios are clipped below 1 - this; CISPO is published with 1, which is no lower "
        "bound. P3O and PG: a metric counts ratios below that, nothing is clipped.",
    },
    "--clip-high": {
        "type": float,
        "default": _DEFAULTS.clip_high,
        "help": "GRPO and CISPO: ratios are clipped above 1 + this. P3O and PG: a metric counts ratios above that, "
        "nothing is clipped.",
    },
    "--entropy-coef": {"type": float, "default": _DEFAULTS.entropy_coef, "help": "Weight of the entropy bonus."},
    "--kl-loss-coef": {
        "type": float,
        "default": _DEFAULTS.ref_kl_coef,
        "help": "Weight of the KL to a reference policy (k3 estimate).",
    },
    "--use-rollout-logprobs": {
        "action": "store_true",
        "help": "Importance ratios are against the log-probs that the engine recorded. P3O needs it.",
    },
    "--calculate-per-token-loss": {
        "action": "store_true",
        "help": "Divide once per step, by its count of valid tokens. P3O needs it.",
    },
    "--rollout-temperature": {
        "type": float,
        "default": _DEFAULTS.temperature,
        "help": "Divides logits while sampling.",
    },
    "--temperature-convention": {
        "choices": CONVENTIONS,
        "help": "Needed at another temperature T than 1. scaled: recorded log-probs are of softmax(logits / T), and "
        "the trainer divides its logits by T. mismatch: recorded as in scaled, trainer at 1. raw: both at 1.",
    },
    "--rollout-top-p": {"type": float, "default": 1.0, "help": "Nucleus of the rollouts; 1.0 is all of it."},
    "--rollout-top-k": {"type": int, "default": -1, "help": "Most likely tokens of the rollouts; -1 is all."},
    "--record-kept-tokens": {
        "action": "store_true",
        "help": "Record which tokens each one was sampled among, and normalise the trainer's log-probs over them; "
        "needed with top-p and top-k.",
    },
    "--update-weights-interval": {"type": int, "default": 1, "help": "Rollouts between two updates of the engines."},
    "--recompute-loss-function": {
        "action": "store_true",
        "help": "Compute the loss again in the backward pass, for memory; not in micro-batch scope.",
    },
}

# Objective's field -> attribute
_OBJECTIVE = {
    "advantage_estimator": "advantage_estimator",
    "ess_scope": "p3o_ess_scope",
    "context_source": "p3o_context_source",
    "from_hidden": "loss_from_hidden",
    "kl_mode": "p3o_kl_mode",
    "clip_low": "clip_low",
    "clip_high": "clip_high",
    "entropy_coef": "entropy_coef",
    "ref_kl_coef": "kl_loss_coef",
}


def add_p3o_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the group "p3o" to ``parser``, which is returned; a second call adds nothing.

    Flags that the parser has already stay as they are, default and help included, so call this after a framework has
    added its own. The one exception: where ``--advantage-estimator`` has choices, those of ``ESTIMATORS`` join
    them.
    """
    # argparse has no public way to ask: with conflict_handler="resolve" adding would replace
    present = parser._option_string_actions
    missing = {flag: options for flag, options in _ARGUMENTS.items() if flag not in present}
    if _ESTIMATOR in present and present[_ESTIMATOR].choices is not None:
        theirs = list(present[_ESTIMATOR].choices or ())
        present[_ESTIMATOR].choices = [*theirs, *(name for name in ESTIMATORS if name not in theirs)]
    if missing:
        group = parser.add_argument_group("p3o", "P3O: trust by the effective sample size of the batch")
        for flag, options in missing.items():
            group.add_argument(flag, **options)
    return parser


def validate_p3o_arguments(args: Any) -> None:
    """Refuses arguments that P3O cannot be trained with. Nothing on ``args`` is changed.

    Args:
        args: any namespace; attributes that are absent or None mean that a feature is absent. Nothing is checked unless
            ``advantage_estimator`` is one of ``ESTIMATORS``, and for others than p3o only what holds for all of them.

    Raises:
        ValueError: one for all violated rules (``p3o_train.refusals.RULES``): flag, value, reason, what to set.
    """
    broken = broken_rules(args)
    if broken:
        raise ValueError(
            f"these arguments do not go with --advantage-estimator {args.advantage_estimator}:\n"
            + "\n".join(f"  - {rule.message(args)}" for rule in broken)
        )


def validate_p3o_resume(args: Any, *, snapshot_in_checkpoint: bool) -> None:
    """Refuses to continue a run whose engines would go on with another policy than before.

    With an interval above 1 the engines sample with a snapshot that is older than the weights. A run that continues
    from the weights alone gives them the new ones, so ratios, and e, are not those of the run that was interrupted.

    Args:
        args: any namespace; read are ``advantage_estimator``, ``update_weights_interval``, ``load``, ``finetune``.
        snapshot_in_checkpoint: whether the checkpoint at ``load`` also holds that snapshot.

    Raises:
        ValueError: p3o, an interval above 1, a native checkpoint to resume from, and no snapshot in it.
    """
    interval, load = value_of(args, "update_weights_interval"), value_of(args, "load")
    resumes = is_native_checkpoint(load) and not value_of(args, "finetune")
    if p3o(args) and number(interval) > 1 and resumes and not snapshot_in_checkpoint:
        raise ValueError(
            f"--update-weights-interval {interval} with --load {load}: cannot resume exactly, since the engines sample "
            "with a policy snapshot older than the weights and the snapshot is not checkpointed; set "
            "--update-weights-interval 1, use a checkpoint that holds the snapshot, or start a new run from these "
            "weights with --finetune"
        )


def objective_from_arguments(args: Any) -> Objective:
    """The objective that ``args`` ask for; attributes that are absent or None have the defaults of ``Objective``.

    The trainer divides logits by ``rollout_temperature`` in the convention "scaled", and by 1 in the others.

    Raises:
        ValueError: an estimator, scope or source that there is none of.
    """
    given = {field: value_of(args, name) for field, name in _OBJECTIVE.items()}
    if value_of(args, "temperature_convention") in (None, "scaled"):
        given["temperature"] = value_of(args, "rollout_temperature")
    return Objective(**{field: value for field, value in given.items() if value is not None})
