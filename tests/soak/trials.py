"""What a campaign counts: one trial for each fault that was injected, one tally for each thing that was fuzzed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

OTHER = "another valid recording"
"""The outcome of an input that was damaged and is data all the same."""
MAX_EXAMPLES = 12
"""Findings of one kind of input that are written down; all are counted."""
MAX_NOTE = 300


def shown(text: str) -> str:
    """As it may stand in a record: short, and without the folders of a machine."""
    return re.sub(r"(/[^\s/:,'\"]+)+/", "", text)[:MAX_NOTE]


@dataclass(frozen=True)
class Trial:
    """One fault, injected once."""

    fault: str
    injected: str
    """How."""
    survived: bool
    """The run ended as is promised for this fault, and what went on from there ended in the bits of an undisturbed
    run."""
    steps_lost: int | None = None
    """Optimizer steps whose numbers were written and that were done again; None where nothing went on."""
    seconds: float | None = None
    """From the fault to the end of the process that met it; None where nothing had to be detected."""
    note: str = ""
    """What was wrong, where the trial was not survived."""


class Finding(AssertionError):
    """What must not happen, and the input that makes it happen."""

    def __init__(self, what: str, example: str = "") -> None:
        super().__init__(what)
        self.what, self.example = what, example


@dataclass
class Tally:
    """Random inputs to one function, by what became of them."""

    target: str
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, str] = field(default_factory=dict)
    """What must not happen -> the shortest input that makes it happen."""
    found: int = 0
    """Inputs with a finding."""

    def add(self, outcome: str) -> None:
        """One input that did what it should."""
        self.outcomes[outcome] += 1

    def finding(self, what: str, example: str) -> None:
        """One input that did not."""
        self.found += 1
        known = self.findings.get(what)
        if known is None or len(example) < len(known):
            self.findings[what] = example

    @property
    def tries(self) -> int:
        """All inputs."""
        return self.found + self.outcomes.total()

    def to_json(self) -> dict[str, Any]:
        """As it is written into the record."""
        first = sorted(self.findings.items())[:MAX_EXAMPLES]
        return {
            "target": self.target,
            "tries": self.tries,
            "outcomes": dict(sorted(self.outcomes.items())),
            "inputs_with_findings": self.found,
            "findings": [{"what": shown(what), "example": shown(example)} for what, example in first],
        }


def faults_to_json(trials: list[Trial]) -> list[dict[str, Any]]:
    """One entry for each fault, in the order in which they were first met."""
    grouped: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        grouped.setdefault((trial.fault, trial.injected), []).append(trial)
    return [
        {
            "fault": fault,
            "injected": injected,
            "times": len(some),
            "survived": sum(trial.survived for trial in some),
            "steps_lost": [trial.steps_lost for trial in some if trial.steps_lost is not None],
            "seconds": [round(trial.seconds, 2) for trial in some if trial.seconds is not None],
            "failures": [shown(trial.note) for trial in some if not trial.survived],
        }
        for (fault, injected), some in grouped.items()
    ]
