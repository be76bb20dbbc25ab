"""What a rule about arguments is made of: whom it concerns, what breaks it, and what a user is told.

Predicates read a namespace of arguments and change nothing. It may be another framework's: an attribute that is absent
or None means that the feature is absent.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

from p3o_train.objective import ESTIMATORS

Predicate = Callable[[Any], bool]

# where the flag has another name than its attribute
_SPELLING = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
_BATCH_SIZES = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size")
_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


class Rule(NamedTuple):
    """One reason to refuse."""

    name: str
    concerns: Predicate
    attributes: tuple[str, ...]
    """Shown with their values, as flags."""
    broken: Predicate
    why: str
    instead: str

    def message(self, args: Any) -> str:
        """Flags and values, the reason, and what to set."""
        given = {name: value for name in self.attributes if (value := value_of(args, name)) is not None}
        shown = [f"{flag_of(name)} {value!r}" for name, value in given.items()]
        return f"{', '.join(shown) or flag_of(self.attributes[0]) + ' is not set'}: {self.why}; {self.instead}"


def value_of(args: Any, name: str) -> Any:
    """The argument, or None where the namespace does not know it."""
    return getattr(args, name, None)


def flag_of(name: str) -> str:
    """What a user types for an attribute."""
    return _SPELLING.get(name, "--" + name.replace("_", "-"))


def whole(value: Any) -> bool:
    """Whether it is an integer; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def number(value: Any) -> float:
    """NaN for what is no number: NaN passes no comparison."""
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan


# whom a rule concerns


def ours(args: Any) -> bool:
    """The estimators of this package; another framework's others are not its business."""
    return value_of(args, "advantage_estimator") in ESTIMATORS


def p3o(args: Any) -> bool:
    return bool(value_of(args, "advantage_estimator") == "p3o")


def step_scope(args: Any) -> bool:
    return p3o(args) and value_of(args, "p3o_ess_scope") == "step"


def micro_batch_scope(args: Any) -> bool:
    return p3o(args) and value_of(args, "p3o_ess_scope") in (None, "micro-batch")


def reuse(args: Any) -> bool:
    return p3o(args) and value_of(args, "p3o_context_source") == "reuse"


def prepass(args: Any) -> bool:
    return step_scope(args) and not reuse(args)


# what breaks a rule


def on(*names: str) -> Predicate:
    """Any of these features."""
    return lambda args: any(value_of(args, name) for name in names)


def off(name: str) -> Predicate:
    return lambda args: not value_of(args, name)


def given_but_not(name: str, accepted: Predicate) -> Predicate:
    """A value that is not accepted; ``accepted`` takes the value."""
    return lambda args: value_of(args, name) is not None and not accepted(value_of(args, name))


def above_zero(*names: str) -> Predicate:
    """All of these, each given and not known to be 0."""
    parts = [given_but_not(name, lambda value: number(value) <= 0) for name in names]
    return lambda args: all(part(args) for part in parts)


def several_steps(args: Any) -> bool:
    """Whether a rollout is known to feed more than one optimizer step."""
    steps = value_of(args, "num_steps_per_rollout")
    if steps is None:
        prompts, samples, batch = (number(value_of(args, name)) for name in _BATCH_SIZES)
        steps = prompts * samples / batch if batch > 0 else math.nan
    return number(steps) > 1


def whitened_in_parts(args: Any) -> bool:
    """Advantage whitening, unless this rank is known to hold all tokens of a step."""
    replicas, context = value_of(args, "data_parallel_size"), value_of(args, "context_parallel_size")
    world = value_of(args, "world_size")
    if replicas is not None:
        alone = replicas * (context or 1) == 1
    else:
        alone = world is not None and world == math.prod(value_of(args, name) or 1 for name in _MODEL_PARALLEL)
    return bool(value_of(args, "normalize_advantages")) and not alone


def undeclared_temperature(args: Any) -> bool:
    """A temperature other than 1 without a word on what is divided by it."""
    temperature = number(value_of(args, "rollout_temperature"))
    return value_of(args, "temperature_convention") is None and temperature > 0 and temperature != 1


def unused_reference(args: Any) -> bool:
    """A weight of the reference KL in a framework that loads no reference policy."""
    return bool(value_of(args, "kl_loss_coef")) and value_of(args, "use_kl_loss") is False


def other_reference_kl(args: Any) -> bool:
    """A reference KL by another estimate than k3."""
    return bool(value_of(args, "kl_loss_coef")) and value_of(args, "kl_loss_type") not in (None, "k3", "low_var_kl")
