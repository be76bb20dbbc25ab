"""Which instructions of a disassembled kernel a thread executes for one whole block, of tokens or of a row of logits.

Loops are found by their backward branches. In a kernel over tokens the outermost ones run over blocks, and each is
counted once (a kernel without loops is taken whole). Left out are

    loops inside them: their trip count is data (the search for the sequence of a token), and
    stretches that a branch skips, or that follow a conditional EXIT, and that touch global memory in pieces
    under 128 bits only: the masked tail of the last block, or what a block inside one sequence need not gather.

In a kernel over rows the loops that load 128 bits from global memory run over whole blocks of logits, one such loop
for each time the row is walked, and each is counted whole: a branch inside it leaves nothing out, and loops that
overlap are one. A loop around several of them goes from row to row. Left out is what runs once a row or not for these
logits: the last block, which is not whole, and the columns at the edges; the loop that writes zeros where a row has
no gradient, which loads nothing; and the code for the label. A loop over whole blocks that loses its wide loads is no
longer found, so the number of loops that are found is part of the budget.
"""

import re
from dataclasses import dataclass

_LINE = re.compile(r"^\s*(?:/\*[0-9a-f]{4,}\*/\s+(?P<text>[^;]*);|(?P<label>\.L_x_\d+):)")
_OPCODE = re.compile(r"(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction and, if it may jump, the position it jumps to."""

    opcode: str
    target: int | None


def parse(text: str) -> list[Instruction]:
    """Instructions of ``nvdisasm -c`` output that holds one kernel, up to the last EXIT."""
    lines = [match for match in map(_LINE.match, text.splitlines()) if match]
    bodies = [line["text"].strip() for line in lines if line["text"]]
    labels: dict[str, int] = {}
    for index, line in enumerate(lines):
        if line["label"]:
            labels[line["label"]] = index - len(labels)
    code = []
    for body in bodies:
        opcode, target = _OPCODE.match(body), _TARGET.search(body)
        jump = labels.get(target[1]) if target and opcode["name"].startswith("BRA") else None
        conditional_end = opcode["name"] == "EXIT" and opcode["guard"]
        code.append(Instruction(opcode["name"], len(bodies) if conditional_end else jump))
    return code


def loops(code: list[Instruction]) -> list[range]:
    """First to last position of every loop; the jump to itself behind the last EXIT is none."""
    found = [
        range(instruction.target, position + 1)
        for position, instruction in enumerate(code)
        if instruction.target is not None and instruction.target < position
    ]
    return sorted(found, key=lambda loop: (loop.start, -loop.stop))


def _is_inside(loop: range, other: range) -> bool:
    return loop != other and other.start <= loop.start and loop.stop <= other.stop


def _is_narrow(code: list[Instruction]) -> bool:
    touched = [instruction.opcode for instruction in code if instruction.opcode.startswith(("LDG", "STG"))]
    return bool(touched) and not any(".128" in opcode for opcode in touched)


def hot_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """What one thread executes for its logits of one whole block, each time that a row is walked."""
    every = [loop for loop in loops(code) if any(_is_wide_load(code[position]) for position in loop)]
    over_rows = [loop for loop in every if len(_joined([other for other in every if _is_inside(other, loop)])) > 1]
    regions = _joined([loop for loop in every if loop not in over_rows])
    return [[code[position] for position in region] for region in regions]


def _joined(found: list[range]) -> list[range]:
    """Loops that overlap made one."""
    regions: list[range] = []
    for loop in found:
        if regions and loop.start < regions[-1].stop:
            before = regions.pop()
            loop = range(before.start, max(before.stop, loop.stop))
        regions.append(loop)
    return regions


def _is_wide_load(instruction: Instruction) -> bool:
    return instruction.opcode.startswith("LDG") and ".128" in instruction.opcode


def block_path(code: list[Instruction]) -> list[Instruction]:
    """What one thread executes for its tokens of one whole block."""
    every = loops(code)
    end = max(position for position, instruction in enumerate(code) if instruction.opcode == "EXIT") + 1
    outermost = [loop for loop in every if not any(_is_inside(loop, other) for other in every)]
    path: list[Instruction] = []
    for body in outermost or [range(end)]:
        left_out = {position for loop in every if _is_inside(loop, body) for position in loop}
        for position in body:
            jump = code[position].target
            # a jump out of a loop ends it; a jump to the end of the code is a conditional EXIT
            if jump is not None and position < jump and (jump <= body.stop or not outermost):
                skipped = range(position + 1, jump)
                left_out |= set(skipped) if _is_narrow(code[skipped.start : skipped.stop]) else set()
        path += [code[position] for position in body if position not in left_out]
    return path
