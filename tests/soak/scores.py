"""A reward that fails on order: ``--rm-type tests.soak.scores:score`` with P3O_SOAK_REWARD in the environment."""

import os
import time

_calls = [0]
AFTER = 20
"""Responses that each worker scores before the fault: more than a rollout has."""


def score(text: str, label: str) -> float:
    """Whether the text begins with the label; after some calls in this process, the fault."""
    _calls[0] += 1
    fault = os.environ.get("P3O_SOAK_REWARD", "") if _calls[0] > AFTER else ""
    if fault == "raises":
        raise RuntimeError("out of order")
    if fault == "hangs":
        time.sleep(3600)
    if fault == "ends its process":
        os._exit(1)
    return float("nan") if fault == "gives NaN" else float(text.startswith(label))
