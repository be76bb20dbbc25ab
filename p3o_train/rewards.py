"""What a response is worth: functions of its text and the label of its prompt.

They are imported by worker processes, which start faster without torch: nothing here needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import numbers
import re
from collections.abc import Callable

Reward = Callable[[str, str], float]

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


def exact_match(response_text: str, label: str) -> float:
    """1 if both are the same text, blanks around it aside; otherwise 0."""
    return float(response_text.strip() == label.strip())


def first_integer(response_text: str, label: str) -> float:
    """1 if the first number in the response is the integer of the label; otherwise 0.

    Whatever follows does not count, since a base model goes on: after "3+4=" both "7" and " 7\\n5+1=6" earn 1. A number
    ends where its digits end ("1,000" is a 1), a fraction makes it another number ("7.5" is no 7, "7." is one), and
    "+7" and "007" are 7.

    Raises:
        ValueError: a label that is no integer in decimal digits.
    """
    wanted = _NUMBER.fullmatch(label.strip())
    if wanted is None or wanted[1]:
        raise ValueError(f"label must be an integer in decimal digits, got {label!r}; use another reward for it")
    given = _NUMBER.search(response_text)
    if given is None:
        return 0.0
    # as text: int() refuses numbers of some thousand digits, which a model may well write
    return float(_canonical(given[0]) == _canonical(wanted[0]))


def math_verify(response_text: str, label: str) -> float:
    """1 if math-verify finds the mathematics of the label in the response, whatever its form: 1/2 is 0.5. Otherwise 0.

    What it cannot parse or compare in a response is worth 0. Some expressions take it for ever, and its own limit
    works in the main thread only, so there is none here: call it where something else ends it.

    Raises:
        ValueError: a label in which there is no mathematics.
    """
    from math_verify import parse, verify

    # a bare "(1, 2)" would not be taken for mathematics
    wrapped = label if "$" in label or "\\boxed" in label else f"${label}$"
    gold = parse(wrapped, parsing_timeout=None)
    if not gold:
        raise ValueError(f"label must be mathematics that math-verify can parse, got {label!r}; use another reward")
    return float(verify(gold, parse(response_text, parsing_timeout=None), timeout_seconds=None))


REWARDS: dict[str, Reward] = {"exact": exact_match, "digits": first_integer, "math": math_verify}
IN_PROCESS = ("exact", "digits")
"""Those whose time is bounded by the length of the text, so that they need no process that can be ended."""


def resolve_reward(name: str) -> Reward:
    """The reward of a name: one of ``REWARDS``, or "module:function" of your own, which is imported.

    What comes back checks its results, and raises TypeError for one that is no number and ValueError for NaN or
    infinity. True and False are 1 and 0.

    Raises:
        ValueError: a name that leads to no function, with what is wrong about it.
        ImportError: a package that is not installed.
    """
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        raise ImportError('the reward "math" needs a package that is not here: pip install math-verify')
    reward = REWARDS[name] if name in REWARDS else _imported(name)

    def checked(response_text: str, label: str) -> float:
        value: object = reward(response_text, label)
        if not isinstance(value, numbers.Real):
            raise TypeError(f"must return a float, got {value!r} of type {type(value).__name__}")
        if not math.isfinite(value):
            raise ValueError(f"must return a finite number, got {value!r}")
        return float(value)

    return checked


def _imported(name: str) -> Reward:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f'reward must be one of {sorted(REWARDS)} or "module:function", got {name!r}')
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
        raise ValueError(
            f"reward {name!r}: importing {module_name!r} failed ({type(error).__name__}: {error}); the module must be "
            "on PYTHONPATH or installed, and import without errors"
        ) from error
    found: object = getattr(module, attribute, None)
    if found is None:
        raise ValueError(f"reward {name!r}: module {module_name!r} has no function {attribute!r}; check the spelling")
    if not callable(found):
        raise ValueError(
            f"reward {name!r}: {attribute!r} must be a function of (response_text, label), got a {type(found).__name__}"
        )
    reward: Reward = found
    return reward


def _canonical(number: str) -> tuple[bool, str]:
    """(is negative, digits without leading zeros)."""
    digits = number.lstrip("+-").lstrip("0")
    return number.startswith("-") and bool(digits), digits
