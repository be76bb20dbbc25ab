"""Launches, GEMMs and memory of the vocabulary paths at real sizes, counted on tensors that hold no data.

The launch code runs on fake tensors, with kernels and GEMMs replaced by a note: like cuBLAS with ``out=`` they allocate
nothing that PyTorch sees. Operators would hide what happens inside them, so the functions behind them are called.
"""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.memory import FakePeak
from p3o_kernels import _launch, _linear, _linear_ops, _row_launch
from p3o_kernels._inputs import LossOptions, TokenInputs
from p3o_kernels._linear import Layer
from p3o_kernels._rows import RowGrads, Rows
from p3o_kernels._tiles import RowIndex

pytestmark = pytest.mark.host_only
T, H, V = 8192, 4096, 151_936
TILE = 512 * 2**20
GIB = 2**30
OPTIONS = LossOptions(0, "sum", "proxy_safe", 0.2, 0.2, 0.0, 0.0)


@pytest.fixture
def launches(monkeypatch):
    recorded = []
    monkeypatch.setattr(_launch, "run", lambda kernel, *rest, **options: recorded.append(kernel.__name__))
    return recorded


@pytest.fixture
def gemms(monkeypatch):
    """(rows, columns, inner size) of every product."""
    recorded = []

    def linear(out, hidden, weight, bias):
        recorded.append((*out.shape, hidden.shape[1]))

    def product(out, a, b, accumulate):
        assert out.shape == (a.shape[0], b.shape[1]) and a.shape[1] == b.shape[0]
        recorded.append((*out.shape, a.shape[1]))

    monkeypatch.setattr(_linear, "linear", linear)
    monkeypatch.setattr(_linear, "product", product)
    return recorded


@pytest.fixture
def fake():
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def rows(**changes) -> Rows:
    fields = {"labels": torch.zeros(T, dtype=torch.int64), "mask": None, "row_temperature": None}
    return Rows(**(fields | {"temperature": 1.0, "softcap": 0.0, "vocab_start": 0, "entropy": False} | changes))


def tokens(ess: bool) -> TokenInputs:
    token = torch.zeros(T)
    e = torch.ones((), dtype=torch.float64) if ess else None
    return TokenInputs(token, token, token, None, None, e, None, None, None)


def layer(dtype=torch.bfloat16, size=V) -> Layer:
    return Layer(torch.empty(T, H, dtype=dtype), torch.empty(size, H, dtype=dtype), None)


def token_kernels(given: TokenInputs, log_probs):
    return _launch.token_loss(replace(given, log_probs=log_probs), replace(OPTIONS, reduction="mean"))


def test_from_logits_with_a_context(launches, fake):
    """One launch reads a row and writes its gradient over it; beside it lp, g and a scratch that does not grow."""
    logits = torch.empty(T, V, dtype=torch.bfloat16)
    some, given, scale = rows(), tokens(True), torch.ones((), dtype=torch.float64)
    with FakePeak() as peak:
        log_probs, _ = _row_launch.row_loss(logits, logits, some, given, OPTIONS, scale)
        made = token_kernels(given, log_probs)
        _row_launch.scale_rows(logits, made.loss)
    assert launches == ["row_loss_kernel", "token_loss_kernel", "finish_loss_kernel", "scale_rows_kernel"]
    assert peak.bytes <= 16 * T


def test_from_logits_in_micro_batch_scope(launches, fake):
    """K1, K2, K3: lp (4), normaliser (6) and g (4 bytes a row) forward, a scaled g in place of lp backward."""
    logits = torch.empty(T, V, dtype=torch.bfloat16)
    some, one, given = rows(), torch.ones(()), tokens(False)
    with FakePeak() as peak:
        values = _row_launch.row_values(logits, some)
        made = token_kernels(given, values.log_probs)
        object.__setattr__(values, "log_probs", values.normalizer)  # nobody keeps it
        grad, _ = _launch.scale_grad(made.token_grad, made.scale, one, None, 0.0, False)
        _row_launch.row_grad(logits, logits, some, values, RowGrads(grad, None))
    assert launches[:1] == ["row_stats_kernel"] and launches[-1:] == ["row_grad_kernel"]
    assert Counter(launches)["row_stats_kernel"] == Counter(launches)["row_grad_kernel"] == 1
    assert peak.bytes <= 16 * T


def test_gradient_of_logits_out_of_place_is_the_only_matrix(launches, fake):
    logits = torch.empty(T, V, dtype=torch.bfloat16)
    some = rows()
    with FakePeak() as peak:
        values = _row_launch.row_values(logits, some)
        _row_launch.row_grad(
            logits, _row_launch.empty_like_rows(logits), some, values, RowGrads(values.log_probs, None)
        )
    assert logits.nbytes <= peak.bytes <= logits.nbytes + 16 * T


def backward(made: Layer, needed, workspace=TILE, main_grad=None):
    some = rows()
    partials = _linear.partials(made, some, workspace, _row_launch)
    values = _row_launch.finish_partials(partials, some)
    grads = RowGrads(values.log_probs, None)
    return _linear_ops.compute_gradients(made, some, values, grads, needed, main_grad, -1, workspace, "triton")


def flops(gemms) -> float:
    """In units of one whole T x V x H product."""
    return sum(m * n * k for m, n, k in gemms) / (T * V * H)


def test_from_hidden_by_recomputation(launches, gemms, fake):
    """4 GEMMs; d(hidden), d(weight) and one workspace, which the float32 sum of d(hidden) is part of."""
    made = layer()
    with FakePeak() as peak:
        grads = backward(made, (True, True, False))
    assert grads.weight.dtype == torch.bfloat16 and flops(gemms) == 4.0
    assert grads.hidden.nbytes + grads.weight.nbytes < peak.bytes
    assert peak.bytes <= grads.hidden.nbytes + grads.weight.nbytes + 1.2 * TILE


def test_from_hidden_with_gradients_formed_forward(launches, gemms, fake):
    """3 GEMMs; with a float32 weight d(weight) is summed where it ends."""
    made, given, scale = layer(torch.float32), tokens(True), torch.ones((), dtype=torch.float64)
    with FakePeak() as peak:
        _linear.loss_gradients(made, rows(), None, given, OPTIONS, scale, (True, True, False), TILE, _row_launch)
    assert flops(gemms) == 3.0 and Counter(launches)["row_loss_kernel"] > 1
    assert peak.bytes <= made.hidden.nbytes + made.weight.nbytes + 1.2 * TILE


def test_a_half_precision_weight_is_summed_in_half_precision(fake):
    """Nor in a float32 copy that nobody budgeted: logits are recomputed, unless one tile holds all tokens."""
    assert not _linear.forms_gradients_forward(layer(), T, True, TILE)
    assert _linear.forms_gradients_forward(layer(), T, False, TILE)
    assert _linear.forms_gradients_forward(layer(), T, True, 3 * GIB)
    assert _linear.forms_gradients_forward(layer(torch.float32), T, True, TILE)


def test_a_frozen_weight_costs_neither_gemm_nor_memory(launches, gemms, fake):
    made = layer()
    with FakePeak() as peak:
        backward(made, (True, False, False))
    assert flops(gemms) == 3.0
    assert peak.bytes <= made.hidden.nbytes + 1.2 * TILE


def test_main_grad_takes_the_weight_gradient_without_a_copy(launches, gemms, fake):
    made, main_grad = layer(), torch.zeros(V, H)
    with FakePeak() as peak:
        grads = backward(made, (True, True, False), main_grad=main_grad)
    assert grads.weight is None and flops(gemms) == 4.0
    assert peak.bytes <= made.hidden.nbytes + 1.2 * TILE


def test_masked_tokens_are_left_out_of_the_gemms(launches, gemms, fake):
    made, some = layer(), rows(mask=torch.ones(T, dtype=torch.bool))
    _linear_ops._partials(made, some, RowIndex(torch.zeros(1024, dtype=torch.int64), True), TILE, "triton")
    assert {m for m, _, _ in gemms} == {1024}


@pytest.mark.parametrize("budget", [TILE, TILE // 8, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_workspace_exceeds_its_bound(launches, gemms, fake, dtype, budget):
    """Beside it only the statistics of each part of the vocabulary, and their stack and merge."""
    made = layer(dtype, 8000)
    with FakePeak() as peak:
        _linear.partials(made, rows(), budget, _row_launch)
    statistics = 16 * T * (8000 // 1024 + 1)
    assert peak.bytes <= budget + 3 * statistics


def test_the_eager_way_for_comparison(fake):
    """What is replaced: 13.9 GiB at this size."""
    logits = torch.empty(T, V, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(T, 1, dtype=torch.int64)
    with FakePeak() as peak:
        logits.float().log_softmax(-1).gather(1, labels).sum().backward()
    assert peak.bytes > 10 * GIB


@pytest.mark.parametrize(
    ("vocab", "rows", "want"),
    [(151_936, 8192, 132), (151_936, 40, 40), (32_768, 8192, 400)],
    ids=["one for each multiprocessor", "fewer rows", "half of the cache"],
)
def test_rows_under_way_fit_the_cache(monkeypatch, vocab, rows, want):
    """An H100's 132 multiprocessors and 50 MiB of L2: the second sweep of a row must find it there."""
    device = SimpleNamespace(L2_cache_size=50 * 2**20, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    logits = SimpleNamespace(shape=(rows, vocab), device=torch.device("cuda"), element_size=lambda: 2)
    assert _row_launch.rows_under_way(logits) == want
