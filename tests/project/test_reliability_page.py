"""docs/reliability.md is what its command makes of docs/data/reliability.json, and says what is in it."""

import copy
import json
import re

import pytest

from tests.soak.page import DATA, PAGE, render
from tests.soak.trials import Tally, Trial, faults_to_json

RECORD = json.loads(DATA.read_text())


def made_up(**changes):
    """A record of one fault that was injected three times, and one tally."""
    trials = [Trial("a fault", "somehow", True, 2, 1.0), Trial("a fault", "somehow", True, 4, 3.5)]
    tally = Tally("a function")
    for _ in range(1499):
        tally.add("fine")
    part = {"command": "a command", "date": "2026-01-02", "machine": "a machine", "seconds": 61}
    faults = faults_to_json([*trials, changes.get("third", Trial("a fault", "somehow", True, 0, 2.0))])
    if changes.get("finding"):
        tally.finding("it breaks", "a longer example")
        tally.finding("it breaks", "an example")
    return {"parts": {"one": part | {"tallies": [tally.to_json()], "faults": faults}}}


def test_page_is_that_of_the_record():
    assert PAGE.read_text(encoding="utf-8") == render(RECORD), "run: python -m tests.soak.campaign --page-only"


def test_the_readme_has_its_numbers():
    head = re.search(
        r"\*\*(\d+ of \d+) injected faults were survived\*\*, and no fault cost more than (\d+) ", PAGE.read_text()
    )
    inputs = re.search(r"Of ([\d,]+) random inputs none made a finding", PAGE.read_text())
    assert head and inputs
    said = " ".join((PAGE.parents[1] / "README.md").read_text(encoding="utf-8").split())
    assert f"{head[1]} survived, at most {head[2]} steps lost, and no finding in {inputs[1]} random inputs" in said


def test_every_part_is_there():
    from tests.soak.campaign import PARTS

    assert list(RECORD["parts"]) == [part.name for part in PARTS]


def test_numbers_are_those_of_the_record():
    page = render(made_up())
    assert "**3 of 3 injected faults were survived**, and no fault cost more than 4 optimizer steps." in page
    assert "| a fault | somehow | 3 | 3 | 2.0, 4 | 2.0, 3.5 |" in page
    assert "**Of 1,499 random inputs none made a finding.**" in page
    assert "| a function | 1,499 | 1,499 fine | 0 |" in page
    assert "Measured on a machine:\n\n```text\na command   2026-01-02     61 s\n```" in page
    assert "Not survived" not in page and "Findings" not in page


def test_what_went_wrong_is_said():
    page = render(made_up(third=Trial("a fault", "somehow", False, 9, 2.0, "other `bits`"), finding=True))
    assert "**2 of 3 injected faults were survived**, and no fault cost more than 9 optimizer steps." in page
    assert "Not survived:\n\n- a fault: `other 'bits'`\n" in page
    assert "**Of 1,501 random inputs 2 made a finding.**" in page
    assert "- a function, it breaks: `an example`\n" in page


def test_damage_that_was_taken_is_said():
    record = made_up()
    assert "Taken as" not in render(record)
    record["parts"]["one"]["tallies"][0]["outcomes"]["another valid recording"] = 12
    assert "Taken as another valid recording: 12 of 1,499 (a function); neither files" in render(record)


@pytest.mark.parametrize("missing", ["tallies", "faults"])
def test_a_record_of_some_parts(missing):
    record = copy.deepcopy(made_up())
    record["parts"]["one"][missing] = []
    page = render(record)
    assert ("## Faults" in page) == (missing != "faults") and ("## Random input" in page) == (missing != "tallies")
