"""The loss from logits, forward and backward. Run: pytest bench -k from_logits"""

import pytest

from bench.conftest import step_clock
from bench.vocabulary_cases import cases


@pytest.mark.benchmark(timer=step_clock)
@pytest.mark.parametrize(("provider", "scope"), cases("logits"))
def test_from_logits(measure_vocabulary, vocabulary_shape, provider, scope):
    measure_vocabulary("logits", vocabulary_shape, provider, scope)
