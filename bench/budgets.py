"""What a compiled kernel may cost. A kernel of another role joins with one line in BUDGETS."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = (80, 90)  # where budgets are binding; elsewhere a launch has to compile


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits of one role; None: no limit."""

    registers: int
    spill_bytes: int = 0
    sass_per_element: float | None = None
    mufu_per_element: float | None = None


BUDGETS = {"K2": Budget(registers=64)}


def violations(entry: Mapping[str, Any]) -> list[str]:
    """What a report entry exceeds, one sentence each."""
    if entry["arch"] not in ARCHITECTURES:
        return []
    budget = BUDGETS[entry["role"]]
    title = f"{entry['variant']} on sm_{entry['arch']}"
    found = []
    for name in Budget.__dataclass_fields__:
        limit, value = getattr(budget, name), entry[name]
        if limit is not None and value is not None and value > limit:
            found.append(f"{title}: {name} is {value:g}, the budget is {limit:g}")
    for arguments, opcode in ((entry["reads"], "LDG.E.128"), (entry["writes"], "STG.E.128")):
        wanted = sum(entry["signature"][name] in ("*fp32", "*bf16", "*fp16") for name in arguments)
        count = entry["block_memory"].get(opcode, 0)
        if count < wanted:
            found.append(f"{title}: {count} {opcode} for a whole block of {wanted} floating point [T] arguments")
    return found
