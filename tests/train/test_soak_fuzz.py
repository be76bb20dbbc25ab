"""A little of the fuzz of the reliability campaign (``make soak``), and that it sees what is broken."""

import json

import pytest

from tests.soak import campaign, fuzz, loss, wires

pytestmark = pytest.mark.host_only
CASES = 40


@pytest.fixture(scope="module")
def drawn():
    """Of the loss, then of everything that reads recordings."""
    return [*fuzz.fuzz_loss(CASES, 3), *fuzz.fuzz_recordings(CASES, 3)]


def test_nothing_is_found(drawn):
    assert [tally.findings for tally in drawn] == [{}] * len(drawn)


def test_as_many_as_asked_for_are_tried_and_all_outcomes_are_met(drawn):
    assert drawn[0].tries == CASES and sum(tally.tries for tally in drawn[1:]) >= CASES
    met = {outcome for tally in drawn for outcome in tally.outcomes}
    assert met >= {"as the float64 reference", "invalid data refused", "valid and taken", "refused by name"}


def test_the_same_seed_draws_the_same(drawn):
    assert [tally.to_json() for tally in fuzz.fuzz_recordings(CASES, 3)] == [tally.to_json() for tally in drawn[1:]]


def scaled(*arguments, **options):
    output = real_loss(*arguments, **options)
    return output._replace(loss=output.loss * (1 + 1e-4))


def careless(*arguments, **options):
    options["validate"] = False
    return real_loss(*arguments, **options)


def in_place(log_probs, behavior_log_probs, *arguments, **options):
    made = real_loss(log_probs, behavior_log_probs, *arguments, **options)
    behavior_log_probs.add_(1.0)
    return made


real_loss = loss.p3o_loss


@pytest.mark.parametrize(
    ("broken", "finding"),
    [
        (scaled, "the loss is not that of the reference"),
        (careless, "invalid data is accepted"),
        (in_place, "the same input gives other bits"),
    ],
)
def test_a_broken_loss_is_found(monkeypatch, broken, finding):
    monkeypatch.setattr(loss, "p3o_loss", broken)
    (tally,) = fuzz.fuzz_loss(CASES, 3)
    assert finding in tally.findings and tally.found > 1


def test_a_reader_that_leaks_is_found(monkeypatch):
    monkeypatch.setattr(wires, "parse_server_info", lambda url, info: 1 / 0)
    monkeypatch.setattr(fuzz, "READERS", {"answers": (wires.check_sglang, 1)})
    (tally,) = fuzz.fuzz_recordings(5, 3)
    assert list(tally.findings) == ["ZeroDivisionError leaks: division by zero"] and tally.found == 5


def test_the_command_writes_record_and_page_part_by_part(tmp_path, capsys):
    record, page = tmp_path / "record.json", tmp_path / "page.md"
    given = ["--cases", "15", "--seed", "3", "--record", str(record), "--page", str(page)]
    assert campaign.main(["--only", "recordings", *given]) == 0
    once = json.loads(record.read_text())["parts"]["recordings"]
    assert campaign.main(["--only", "loss", *given]) == 0
    parts = json.loads(record.read_text())["parts"]
    assert list(parts) == ["loss", "recordings"] and parts["recordings"] == once
    assert "--only loss --cases 15 --seed 3" in page.read_text()
    page.unlink()
    assert campaign.main(["--page-only", *given]) == 0 and "p3o_loss" in page.read_text()
    assert "loss: 0 of 15 inputs with findings" in capsys.readouterr().out


def test_ctrl_c_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    def stopped(part, args, folder):
        if part.name == "recordings":
            raise KeyboardInterrupt
        return {"seconds": 1.0, "tallies": [], "faults": []}

    monkeypatch.setattr(campaign, "_run", stopped)
    record = tmp_path / "record.json"
    assert campaign.main(["--only", "loss", "--only", "recordings", "--record", str(record)]) == 130
    assert list(json.loads(record.read_text())["parts"]) == ["loss"]
    assert "--missing" in capsys.readouterr().out
