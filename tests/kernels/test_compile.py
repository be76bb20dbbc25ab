"""What torch sees: operator contracts, full graphs, CUDA graphs, gradients of the reference."""

import pytest
import torch

from p3o_kernels import ESSContext, _backend, _ops, p3o_loss, ratio_stats, reference

pytestmark = pytest.mark.host_only


def batch(tokens=50, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    log_probs, behavior, advantages, entropy = (torch.randn(tokens, generator=generator).to(device) for _ in range(4))
    mask = (torch.rand(tokens, generator=generator) > 0.2).to(device)
    return log_probs.requires_grad_(), behavior, advantages, mask, entropy.abs()


OPTIONS = ("proxy_safe", 0.2, 0.2, 0.1, 0.1)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("terms", [False, True])
def test_operator_contracts(reduction, terms):
    backend = "triton" if _backend.INTERPRETED else "eager"
    log_probs, behavior, advantages, mask, entropy = batch()
    tensors = (log_probs, behavior, advantages, mask if terms else None, None, None)
    optional = (behavior * 1.1, entropy.requires_grad_(), None) if terms else (None, None, None)
    torch.library.opcheck(_ops.token_loss, (*tensors, *optional, 0, reduction, *OPTIONS, backend))
    torch.library.opcheck(_ops.ratio_sums, (log_probs.detach(), behavior, mask, backend))
    torch.library.opcheck(_ops.context, (torch.tensor([7.5, 21.25, 4.0, 0.0], dtype=torch.float64), backend))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_full_graph(compiler):
    log_probs, behavior, advantages, mask, _ = batch()

    def step(log_probs, behavior, advantages, mask):
        context = ratio_stats(log_probs, behavior, mask).to_context(validate=False)
        output = p3o_loss(log_probs * 1.0, behavior, advantages, mask, context=context, validate=False)
        return output.loss, output.metrics.means()["normalized_ess"]

    eager_loss, eager_ess = step(log_probs, behavior, advantages, mask)
    (want,) = torch.autograd.grad(eager_loss, log_probs)
    loss, ess = torch.compile(step, fullgraph=True, backend=compiler)(log_probs, behavior, advantages, mask)
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert torch.equal(loss, eager_loss) and torch.equal(ess, eager_ess)
    torch.testing.assert_close(grad, want, rtol=1e-6, atol=1e-8)  # the compiler may fuse the factor 1.0


def test_compiled_backend_compiles_once_for_all_lengths():
    from torch._dynamo.utils import counters

    def run(tokens):
        log_probs, behavior, advantages, mask, _ = batch(tokens)
        p3o_loss(log_probs, behavior, advantages, mask, backend="compiled")

    run(64)
    run(1000)
    counters.clear()
    for tokens in (65, 200, 4097, 70_000):
        run(tokens)
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("kl_mode", ["proxy", "proxy_safe", "importance"])
def test_reference_gradient(kl_mode):
    """gradcheck differentiates the value, so l stays where value and gradient belong together."""
    generator = torch.Generator().manual_seed(0)
    log_probs, behavior, advantages = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(3))
    log_ratio = (log_probs - behavior).detach()

    def value(log_probs):
        # min() and e are constants of the gradient, so they are handed in as constants here
        ess = torch.tensor(0.6, dtype=torch.float64)
        weight = torch.minimum(log_ratio.exp(), ess)
        kl = log_probs - behavior
        kl = kl.exp() * kl - kl.exp() + 1 if kl_mode == "importance" else kl + (-kl).exp() - 1
        return (-weight * log_probs * advantages + (1 - ess) * kl).sum()

    log_probs.requires_grad_()
    (want,) = torch.autograd.grad(value(log_probs), log_probs)
    ess = torch.tensor(0.6, dtype=torch.float64)
    context = ESSContext(ess, ess, ess, ess, ess)
    loss = reference.p3o_loss(log_probs, behavior, advantages, context=context, reduction="sum", kl_mode=kl_mode).loss
    (grad,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(loss, value(log_probs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)
    if kl_mode == "proxy":  # the other modes replace the derivative on purpose
        assert torch.autograd.gradcheck(lambda x: reference.k3(x - behavior, kl_mode).sum(), (log_probs,))


@pytest.mark.gpu
def test_cuda_graph():
    log_probs, behavior, advantages, mask, _ = batch(10_000, "cuda")

    def step():
        log_probs.grad = None
        output = p3o_loss(log_probs, behavior, advantages, mask, validate=False)
        output.loss.backward()
        return output.loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    behavior.copy_(log_probs.detach() + 0.1)
    graph.replay()
    torch.cuda.synchronize()
    want = p3o_loss(log_probs.detach(), behavior, advantages, mask).loss
    assert torch.equal(loss, want)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device():
    tensors = batch(5000, "cuda:1")[:4]
    with torch.cuda.device(0):
        output = p3o_loss(*tensors)
    assert output.loss.device.index == 1 and output.loss.isfinite()
