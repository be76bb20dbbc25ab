"""What torch sees of the vocabulary operations: contracts, full graphs, CUDA graphs, the gradient of the reference."""

import pytest
import torch

from p3o_kernels import (
    _backend,
    _linear_ops,
    _row_ops,
    linear_log_probs,
    p3o_loss_from_hidden,
    p3o_loss_from_logits,
    reference,
    token_log_probs,
)
from tests.kernels.rows import normal
from tests.kernels.test_vocabulary_loss import T, case, frozen

pytestmark = pytest.mark.host_only
BACKEND = "triton" if _backend.INTERPRETED else "eager"
NUMBERS = (0.8, 0.0, 0)  # temperature, softcap, first entry


def test_contracts_of_row_operators():
    tensors = case("cpu")
    logits, labels, mask = tensors["logits"], tensors["labels"], tensors["mask"]
    for entropy in (False, True):
        rows = (labels, mask, None)
        torch.library.opcheck(_row_ops.row_partials, (logits, *rows, *NUMBERS, entropy, BACKEND))
        leaf = logits.clone().requires_grad_()
        torch.library.opcheck(_row_ops.row_values, (leaf, *rows, None, *NUMBERS, entropy, False, BACKEND))
        _, h, *normalizer = _row_ops.row_values(logits, *rows, None, *NUMBERS, entropy, False, BACKEND)
        grads = (h if entropy else None, normal(T), normal(T, seed=1) if entropy else None)
        torch.library.opcheck(_row_ops.row_grad, (logits, *rows, *normalizer, *grads, *NUMBERS, BACKEND))
        torch.library.opcheck(_row_ops.row_grad_, (logits.clone(), *rows, *normalizer, *grads, *NUMBERS, BACKEND))
    leaf = logits.clone().requires_grad_()
    torch.library.opcheck(_row_ops.attach, (torch.tensor(1.5), leaf, torch.ones_like(logits), BACKEND))
    torch.library.opcheck(_row_ops.scale_rows_, (torch.ones_like(logits), torch.tensor(0.5), BACKEND))


def loss_arguments(tensors):
    ess, one = torch.tensor(0.5, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    return (tensors["behavior_log_probs"], tensors["advantages"], None, ess, None, one)


def test_contracts_of_loss_operators():
    tensors = case("cpu")
    rows = (tensors["labels"], tensors["mask"], None)
    numbers = (0.8, 0.0, True, "proxy_safe", 0.0, 0.05)
    arguments = (*rows, *loss_arguments(tensors), *numbers, BACKEND)
    torch.library.opcheck(_row_ops.row_loss_, (torch.empty_like(tensors["logits"]), tensors["logits"], *arguments))
    layer = [tensors[name] for name in ("hidden", "weight", "bias")]
    memory = (-1, 700, [True, True, True], BACKEND)
    torch.library.opcheck(_linear_ops.linear_loss, (*layer, *rows, *loss_arguments(tensors), *numbers, *memory))


def test_contracts_of_linear_operators():
    tensors = case("cpu")
    layer = [tensors[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    rows = (tensors["labels"], tensors["mask"], None)
    memory = (-1, 700, BACKEND)
    detached = [tensor.detach() for tensor in layer]
    torch.library.opcheck(_linear_ops.linear_partials, (*detached, *rows, *NUMBERS, True, *memory))
    torch.library.opcheck(_linear_ops.linear_values, (*layer, *rows, None, None, *NUMBERS, True, *memory))
    _, h, *normalizer = _linear_ops.linear_values(*detached, *rows, None, None, *NUMBERS, True, *memory)
    grads = (h, normal(T), normal(T, seed=1), None)
    options = (*NUMBERS, -1, 700, [True, True, False], BACKEND)
    torch.library.opcheck(_linear_ops.linear_grad, (*detached, *rows, *normalizer, *grads, *options))


def from_logits(tensors, context):
    arguments = [tensors[name] for name in ("labels", "behavior_log_probs", "advantages", "mask")]
    output = p3o_loss_from_logits(tensors["logits"] * 1.0, *arguments, context=context, validate=False)
    return output.loss, output.metrics.means()["normalized_ess"]


def from_hidden(tensors, context):
    arguments = [tensors[name] for name in ("labels", "behavior_log_probs", "advantages", "mask")]
    output = p3o_loss_from_hidden(
        tensors["hidden"] * 1.0, tensors["weight"], *arguments, context=context, entropy_coef=0.01, validate=False
    )
    return output.loss, output.metrics.means()["entropy"]


def log_probs(tensors, context):
    from_logits, entropy = token_log_probs(tensors["logits"] * 1.0, tensors["labels"], return_entropy=True)
    from_hidden = linear_log_probs(tensors["hidden"] * 1.0, tensors["weight"], tensors["labels"], mask=tensors["mask"])
    return (from_logits + entropy).sum() + from_hidden.sum(), from_hidden


@pytest.mark.parametrize("context", [False, True], ids=["micro-batch", "step"])
@pytest.mark.parametrize("step", [from_logits, from_hidden, log_probs])
def test_full_graph(step, context):
    given = frozen("cpu") if context else None
    made = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        tensors = case("cpu")
        leaves = [tensors[name].requires_grad_() for name in ("logits", "hidden", "weight")]
        loss, value = function(tensors, given)
        loss.backward()
        made.append([loss.detach(), value.detach(), *(leaf.grad for leaf in leaves)])
    for eager, compiled in zip(*made, strict=True):
        assert (eager is None) == (compiled is None)
        if eager is not None:
            torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-8)


def test_gradient_of_the_reference():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 6, 3, -100])
    mask = torch.tensor([True, True, True, False])

    def values(logits):
        return reference.token_log_probs(logits, labels, mask=mask, temperature=0.7, softcap=2.0, return_entropy=True)

    assert torch.autograd.gradcheck(values, (logits,))


@pytest.mark.gpu
@pytest.mark.parametrize("step", [from_logits, from_hidden])
def test_cuda_graph(step):
    tensors = case("cuda")
    leaves = [tensors[name].requires_grad_() for name in ("logits", "hidden", "weight")]
    context = frozen("cuda")

    def run():
        for leaf in leaves:
            leaf.grad = None
        loss, _ = step(tensors, context)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run()
    tensors["behavior_log_probs"].add_(0.1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(loss, run())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device():
    tensors = case("cuda:1")
    with torch.cuda.device(0):
        made = token_log_probs(tensors["logits"], tensors["labels"])
    assert made.device.index == 1 and made.isfinite().all()
