"""docs/reliability.md from the record of a campaign: every number and every judgement is read from it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from p3o_train.sinks import replace_file
from tests.soak.trials import OTHER

ROOT = Path(__file__).resolve().parents[2]
DATA, PAGE = ROOT / "docs" / "data" / "reliability.json", ROOT / "docs" / "reliability.md"

HEAD = """\
# Reliability

What happens to a run of `p3o train` that is killed, starved of disk space, left by its rollout server, or given files
that are not what was written; and what the loss and the readers of recordings do with random input.

{verdict}

A fault is **survived** if the run ends as is promised for it (an error that names what is wrong, where there has to be
one, before its deadline; nothing half-written), and if what goes on from there with `--resume` ends in the weights, the
optimizer, the schedule and the logged numbers of a run that was never disturbed, bit for bit.
"""

FAULTS = """\
## Faults

Small runs of the real command (`--preset tiny` with a narrower model; a checkpoint every 4 optimizer steps), one thread
for each process. **Steps lost** are optimizer steps whose numbers were in `metrics.jsonl` already and that were done
again. **Seconds** are those from the fault to the end of the process that had to notice it; for damaged files from the
start of the command, its imports included. Where nothing is to be noticed there is none.

| fault | how | times | survived | steps lost: mean, max | seconds: median, max |
|---|---|---:|---:|---:|---:|
"""

FUZZ = """\
## Random input

Drawn by hypothesis from a recorded seed. Calls of `p3o_loss` have 0 to 40 tokens, every dtype, masks with NaN and
infinities behind them, log-ratios around every limit, empty sequences, every reduction, KL mode and scope, and strided
tensors; a call is right if it is refused by an error that names the argument, or if loss and gradient are finite, those
of the float64 reference to within float32's rounding, and the same bits a second time, with its inputs unchanged.
The scopes of e are those of one process: its own tokens, or a frozen value. Recordings are valid, or damaged in one
place; the damaged are to be refused by an error that names the sample, or to be read without effect. **Another valid
recording** is one that was accepted with another value in it: a log-prob of -1.25 instead of -1.24 is a log-prob.

| input | tried | outcomes | inputs with findings |
|---|---:|---|---:|
"""

TAIL = """\
## What is not covered

- **More than one machine, NCCL, CUDA.** Ranks are processes of one machine over Gloo. How NCCL ends a collective whose
  peer is gone, and what a GPU fault or a full GPU memory leaves behind, is not measured.
- **Power loss.** Processes are killed, the machine goes on: what was written is in the page cache. Files are synced
  before they are renamed, and folders after it, but no test cuts the power, and `metrics.jsonl` is not synced.
- **Storage that lies**: network file systems with caches of their own, and bits that change after a checkpoint was
  read. A checkpoint's checksum is compared when it is loaded, and not before.
- **Real servers.** The rollout server is an HTTP server that speaks SGLang's protocol and samples from the weights it
  is given; the deadline for its answers is shortened for the campaign, from half an hour to seconds.
- **Size and length.** The models have thousands of parameters and the runs last for minutes; memory that grows over
  days would not be seen.
- **Exhaustiveness.** Moments and inputs are random, the kills of one run few. A fault that was survived every time may
  still have a moment that was not met.

## Make it again

```console
$ make soak                                              # all of it, then this page
$ python -m tests.soak.campaign --only kill --kills 5    # one part, of another size
$ python -m tests.soak.campaign --page-only              # this page from docs/data/reliability.json
```

The temporary file system of the disk faults needs the right to mount one; without it the size of files is limited
instead, and the table says so.
"""


def render(record: dict[str, Any]) -> str:
    """The whole page."""
    parts = record["parts"]
    faults = [fault for part in parts.values() for fault in part["faults"]]
    tallies = [tally for part in parts.values() for tally in part["tallies"]]
    pieces = [HEAD.format(verdict=_verdict(faults, tallies))]
    if faults:
        pieces.append(FAULTS + "".join(map(_fault_row, faults)) + _failures(faults))
    if tallies:
        pieces.append(FUZZ + "".join(map(_tally_row, tallies)) + _unseen(tallies) + _findings(tallies))
    return "\n".join([*pieces, _sources(parts), TAIL])


def write_page(path: Path, text: str) -> None:
    """Replaces the page at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())


def _verdict(faults: list[dict[str, Any]], tallies: list[dict[str, Any]]) -> str:
    said = []
    if faults:
        times, survived = sum(one["times"] for one in faults), sum(one["survived"] for one in faults)
        lost = [steps for one in faults for steps in one["steps_lost"]]
        most = f", and no fault cost more than {max(lost)} optimizer steps" if lost else ""
        said.append(f"**{survived} of {times} injected faults were survived**{most}.")
    if tallies:
        tries, found = sum(one["tries"] for one in tallies), sum(one["inputs_with_findings"] for one in tallies)
        said.append(f"**Of {tries:,} random inputs {found or 'none'} made a finding.**")
    return " ".join(said)


def _fault_row(fault: dict[str, Any]) -> str:
    lost, seconds = fault["steps_lost"], fault["seconds"]
    steps = f"{statistics.mean(lost):.1f}, {max(lost)}" if lost else ""
    took = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
    cells = (fault["fault"], fault["injected"], fault["times"], fault["survived"], steps, took)
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _failures(faults: list[dict[str, Any]]) -> str:
    failed = [(fault["fault"], note) for fault in faults for note in dict.fromkeys(fault["failures"])]
    if not failed:
        return ""
    return "\nNot survived:\n\n" + "".join(f"- {fault}: `{_code(note)}`\n" for fault, note in failed)


def _tally_row(tally: dict[str, Any]) -> str:
    outcomes = ", ".join(f"{count:,} {name}" for name, count in tally["outcomes"].items())
    return f"| {tally['target']} | {tally['tries']:,} | {outcomes} | {tally['inputs_with_findings']} |\n"


def _unseen(tallies: list[dict[str, Any]]) -> str:
    """Damage that was taken for data, where there is some."""
    seen = [(tally, tally["outcomes"].get(OTHER, 0)) for tally in tallies]
    parts = [f"{count:,} of {tally['tries']:,} ({tally['target']})" for tally, count in seen if count]
    if not parts:
        return ""
    taken = ", ".join(parts)
    return f"\nTaken as another valid recording: {taken}; neither files nor answers have a checksum of their values.\n"


def _findings(tallies: list[dict[str, Any]]) -> str:
    found = [(tally["target"], one["what"], one["example"]) for tally in tallies for one in tally["findings"]]
    if not found:
        return ""
    lines = (f"- {target}, {what}: `{_code(example)}`\n" for target, what, example in found)
    return "\nFindings, each with the shortest input that made it:\n\n" + "".join(lines)


def _code(text: str) -> str:
    return text.replace("`", "'").replace("\n", " ")


def _sources(parts: dict[str, Any]) -> str:
    width = max((len(part["command"]) for part in parts.values()), default=0)
    rows = "".join(f"{part['command']:{width}}   {part['date']}   {part['seconds']:>4} s\n" for part in parts.values())
    machines = "; ".join(dict.fromkeys(part["machine"] for part in parts.values()))
    return f"## Where the numbers come from\n\nMeasured on {machines}:\n\n```text\n{rows}```\n"
