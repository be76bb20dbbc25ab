"""One kill of the reliability campaign (``make soak``), so that it does not rot."""

import random

import pytest

from tests.megatron.topologies import NEEDS_MEGATRON
from tests.soak.kills import kills
from tests.soak.runs import STEPS_PER_SAVE, Campaign

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]


def test_one_kill(tmp_path):
    (trial,) = kills(Campaign(tmp_path, random.Random(0)), 1)
    assert trial.survived, trial.note
    assert trial.steps_lost is not None and 0 <= trial.steps_lost <= STEPS_PER_SAVE
