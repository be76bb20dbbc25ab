"""Launches and memory of the triton path with two anchors and with an e for each sequence, counted without a GPU."""

import pytest
import torch

from bench.memory import peak_extra_bytes
from p3o_kernels import ESSContext, _anchored_launch, _backend, _launch, p3o_loss_per_sequence, p4o_loss, sequence_ess
from p3o_kernels._inputs import LossOptions, TokenInputs

pytestmark = pytest.mark.host_only
TOKENS = 1 << 20
OPTIONS = LossOptions(0, "mean", "proxy_safe", 0.2, 0.2, 0.0, 0.0)
LOSS = ["two_anchor_loss_kernel", "finish_loss_kernel"]


@pytest.fixture
def launches(monkeypatch):
    recorded = []
    monkeypatch.setattr(_launch, "run", lambda kernel, *rest, **options: recorded.append(kernel.__name__))
    monkeypatch.setattr(_backend, "INTERPRETED", True)  # "auto" is triton on the CPU, too
    return recorded


@pytest.mark.parametrize("given", [False, True], ids=["micro-batch", "step"])
def test_two_anchors(launches, given):
    one = torch.tensor(0.5, dtype=torch.float64)
    context = ESSContext(one, one, one, one, one) if given else None
    log_probs, other = torch.zeros(40, requires_grad=True), torch.zeros(40)
    output = p4o_loss(log_probs, other, other, other, context=context, proximal_context=context, validate=False)
    assert launches == (LOSS if given else ["anchor_sums_kernel", "join_sums_kernel", *LOSS])
    launches.clear()
    output.loss.backward()
    assert launches == ["scale_grad_kernel"]


@pytest.mark.parametrize(("lengths", "sums"), [([40] * 30, 1), ([60_000], 2), ([], 0)], ids=["many", "long", "none"])
def test_sequences(launches, lengths, sums):
    log_probs, other = torch.zeros(sum(lengths), requires_grad=True), torch.zeros(sum(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    wanted = ["sequence_sums_kernel", "join_sums_kernel"][:sums]
    output = p3o_loss_per_sequence(log_probs, other, other, cu_seqlens=cu_seqlens, validate=False)
    assert launches == [*wanted, "sequence_loss_kernel", "finish_loss_kernel"]
    launches.clear()
    output.loss.backward()
    assert launches == ["scale_grad_kernel"]
    launches.clear()
    sequence_ess(other, other, cu_seqlens, validate=False)
    assert launches == wanted


def test_programs_of_a_sequence():
    """At least 4096 tokens each on average, at most what fills a GPU, and never none."""
    chunks = _anchored_launch._chunks
    assert [chunks(1, tokens) for tokens in (0, 8191, 8192)] == [1, 1, 2]
    assert chunks(64, 64 * 8192) == 2 and chunks(4096, 1 << 30) == 1
    assert chunks(1, 1 << 30) == 512 and chunks(300, 1 << 30) == 3


def test_forward_holds_one_number_per_token(launches):
    """g, 4 bytes a token, and a scratch that does not grow with T; neither caps nor advantages of tokens."""
    token, sequences = torch.zeros(TOKENS), 8
    cu_seqlens = torch.arange(0, TOKENS + 1, TOKENS // sequences, dtype=torch.int32)
    absent = dict.fromkeys(("reference_log_probs", "entropy", "divisor"))
    fields = {"log_probs": token, "behavior_log_probs": token, "advantages": torch.zeros(sequences), "mask": token > -1}
    ess = torch.ones(sequences, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    by_sequence = TokenInputs(**fields, **absent, cu_seqlens=cu_seqlens, ess=ess)
    two = TokenInputs(**fields, **absent, cu_seqlens=cu_seqlens, ess=one)
    for step in (
        lambda: _anchored_launch.sequence_loss(by_sequence, OPTIONS),
        lambda: (_anchored_launch.anchors(two, token), _anchored_launch.two_anchor_loss(two, token, one, OPTIONS)),
    ):
        peak = peak_extra_bytes(step, "cpu")
        assert 4 * TOKENS <= peak <= 4 * TOKENS + 512 * 16 * 8 + 2 * 512 * 4 * 8 + 4096
    sums = peak_extra_bytes(lambda: _anchored_launch.sequence_sums(token, token, None, cu_seqlens), "cpu")
    assert sums <= 1024 * 4 * 8 + 8 * 8 * sequences + 4096
