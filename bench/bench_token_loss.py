"""The token loss, forward and backward. Run: pytest bench -k token_loss"""

import pytest

from bench.conftest import DEVICE, synchronized_clock
from bench.workload import BYTES_PER_TOKEN, SCOPES, make_step, providers


@pytest.mark.benchmark(timer=synchronized_clock)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("provider", providers(DEVICE))
def test_token_loss(measure, provider, scope, num_tokens):
    step = make_step(provider, num_tokens, scope, DEVICE)
    measure(step, tokens=num_tokens, bytes_moved=BYTES_PER_TOKEN * num_tokens, provider=provider, scope=scope)
