"""Launches and memory of the triton path, counted without a GPU.

Allocations are those of the launch code itself; the kernels are replaced by nothing, so values mean
nothing here.
"""

import pytest
import torch

from bench.memory import peak_extra_bytes
from p3o_kernels import _launch, _ops
from p3o_kernels._inputs import LossOptions, TokenInputs

pytestmark = pytest.mark.host_only
TOKENS = 1 << 20


@pytest.fixture
def launches(monkeypatch):
    recorded = []
    monkeypatch.setattr(_launch, "run", lambda kernel, *rest, **options: recorded.append(kernel.__name__))
    return recorded


def inputs(**changes):
    token = torch.zeros(TOKENS)
    mask = torch.ones(TOKENS, dtype=torch.bool)
    fields = {"log_probs": token, "behavior_log_probs": token, "advantages": token, "mask": mask}
    absent = dict.fromkeys(("cu_seqlens", "ess", "reference_log_probs", "entropy", "divisor"))
    return TokenInputs(**(absent | fields | changes))


OPTIONS = LossOptions(0, "mean", "proxy_safe", 0.2, 0.2, 0.0, 0.0)
ESS = torch.tensor(0.5, dtype=torch.float64)


def test_one_pass_and_a_reduction_with_a_context(launches):
    _launch.token_loss(inputs(ess=ESS), OPTIONS)
    assert launches == ["token_loss_kernel", "finish_loss_kernel"]


def test_two_passes_and_a_reduction_without(launches):
    _launch.token_loss(inputs(), OPTIONS)
    assert launches == ["ratio_sums_kernel", "token_loss_kernel", "finish_loss_kernel"]


def test_one_launch_backward(launches):
    token = torch.zeros(TOKENS)
    for with_entropy in (False, True):
        launches.clear()
        _launch.scale_grad(token, ESS, torch.ones(()), None, 0.1, with_entropy)
        assert launches == ["scale_grad_kernel"]


def test_statistics_are_two_launches_and_a_context_one(launches):
    token = torch.zeros(TOKENS)
    _launch.context(_launch.ratio_sums(token, token, None))
    assert launches == ["ratio_sums_kernel", "finish_ratio_kernel", "context_kernel"]


@pytest.mark.parametrize("sequences", [None, 8])
def test_forward_holds_one_number_per_token(launches, sequences):
    """g, 4 bytes a token, and a scratch that does not grow with T; never an expanded advantage."""
    changes = {}
    if sequences:
        changes = {"advantages": torch.zeros(sequences), "cu_seqlens": torch.zeros(sequences + 1, dtype=torch.int32)}
    tokens = inputs(**changes)
    peak = peak_extra_bytes(lambda: _launch.token_loss(tokens, OPTIONS), "cpu")
    assert 4 * TOKENS <= peak <= 4 * TOKENS + 512 * 16 * 8 + 512 * 4 * 8 + 4096


def test_backward_holds_one_number_per_token(launches):
    token_grad, scale = torch.zeros(TOKENS), torch.ones((), dtype=torch.float64)
    one = torch.ones(())
    peak = peak_extra_bytes(lambda: _ops._triton_backward(token_grad, scale, one, None, 0.0, False), "cpu")
    assert 4 * TOKENS <= peak <= 4 * TOKENS + 4096
