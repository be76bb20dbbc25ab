"""What a compiled kernel may cost. A kernel of another role joins with one line in BUDGETS.

In the vocabulary kernels K1, K3 and K1K3 an element is one logit. K1K3 walks a row twice, and both sweeps count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = (80, 90)  # where budgets are binding; elsewhere a launch has to compile


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits; None: no limit."""

    registers: int
    spill_bytes: int = 0
    sass_per_element: float | None = None
    mufu_per_element: float | None = None


BUDGETS = {
    "K2": Budget(registers=64),
    "K1": Budget(registers=96),
    "K3": Budget(registers=96),
    "K1K3": Budget(registers=96),
    "row_stats bf16": Budget(registers=64, sass_per_element=7.0, mufu_per_element=1.15),
    "row_stats bf16, has_entropy": Budget(registers=96, sass_per_element=11.5, mufu_per_element=1.15),
    "row_grad bf16": Budget(registers=64, sass_per_element=6.5, mufu_per_element=1.05),
    "row_loss bf16": Budget(registers=64, sass_per_element=14.0, mufu_per_element=2.25),
}
"""Of a variant by its name, of the others by their role."""

_FLOATS = {"*fp32": 4, "*bf16": 2, "*fp16": 2}


def violations(entry: Mapping[str, Any]) -> list[str]:
    """What a report entry exceeds, one sentence each."""
    if entry["arch"] not in ARCHITECTURES:
        return []
    budget = BUDGETS.get(entry["variant"], BUDGETS[entry["role"]])
    title = f"{entry['variant']} on sm_{entry['arch']}"
    found = []
    for name in Budget.__dataclass_fields__:
        limit, value = getattr(budget, name), entry[name]
        if limit is not None and value is not None and value > limit:
            found.append(f"{title}: {name} is {value:g}, the budget is {limit:g}")
    memory = _sweep_violations(entry) if entry["sweeps"] else _token_violations(entry)
    return found + [f"{title}: {sentence}" for sentence in memory]


def _token_violations(entry: Mapping[str, Any]) -> list[str]:
    """[T] arguments must move in 128-bit pieces."""
    found = []
    for arguments, opcode in ((entry["reads"], "LDG.E.128"), (entry["writes"], "STG.E.128")):
        wanted = sum(entry["signature"][name] in _FLOATS for name in arguments)
        count = entry["block_memory"].get(opcode, 0)
        if count < wanted:
            found.append(f"{count} {opcode} for a whole block of {wanted} floating point [T] arguments")
    return found


def _sweep_violations(entry: Mapping[str, Any]) -> list[str]:
    """Logits must move in 128-bit pieces, once a sweep, and nothing else may touch memory meanwhile."""
    if entry["hot_loops"] != entry["sweeps"]:
        return [f"{entry['hot_loops']} loops with LDG.E.128 where a row is walked {entry['sweeps']} times"]
    itemsize = _FLOATS[entry["signature"][entry["reads"][0]]]
    pieces = entry["block"] // (32 * entry["num_warps"]) * itemsize // 16
    wanted = {"LDG.E.128": pieces * entry["sweeps"], "STG.E.128": pieces * len(entry["writes"])}
    wanted = {opcode: count for opcode, count in wanted.items() if count}
    if entry["block_memory"] == wanted:
        return []
    return [f"the loops over whole blocks have {entry['block_memory']}, a block needs {wanted}"]
