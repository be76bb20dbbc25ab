"""The loss from hidden states, forward and backward. Run: pytest bench -k from_hidden"""

import pytest

from bench.conftest import step_clock
from bench.vocabulary_cases import cases


@pytest.mark.benchmark(timer=step_clock)
@pytest.mark.parametrize(("provider", "scope"), cases("hidden"))
def test_from_hidden(measure_vocabulary, vocabulary_shape, provider, scope):
    measure_vocabulary("hidden", vocabulary_shape, provider, scope)
