"""The example of TRL: it runs, prints what it trains on, and its policy learns the task."""

import re
import sys

import pytest
import torch

pytest.importorskip("trl")
from examples import trl_p3o

pytestmark = [pytest.mark.host_only, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("scope", ["step", "micro-batch"])
def test_the_reward_rises_and_every_table_row_has_an_e(scope, capsys):
    assert trl_p3o.main(["--steps", "64", "--ess-scope", scope]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, flags=re.MULTILINE)
    assert [int(row[0]) for row in rows] == [20, 40, 60, 64]
    assert all(0 < float(row[2]) <= 1 for row in rows) and float(rows[-1][2]) < 0.9999
    first, last = map(float, re.search(r"first generation ([\d.]+), of the last ([\d.]+)", printed).groups())
    assert first < 0.15 and last > 2 * first  # by chance a token repeats the prompt one time in twelve


def test_the_reward_is_the_share_that_repeats_the_prompt():
    assert trl_p3o.repeated(["3", "7"], ["3 1 3 3", "1 2"]) == [0.75, 0.0]


def test_a_useless_number_of_steps(capsys):
    with pytest.raises(SystemExit):
        trl_p3o.main(["--steps", "0"])
    assert "--steps: must be at least 1, got 0" in capsys.readouterr().err


def test_without_trl_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "p3o_train.adapters.trl", None)
    monkeypatch.delitem(sys.modules, "examples.trl_p3o")
    with pytest.raises(SystemExit, match=r'pip install -e "\.\[trl\]"'):
        __import__("examples.trl_p3o")
