"""The speed comparison is a fair one; the speed itself is measured alone on the machine, by ``make bench``."""

from pathlib import Path

import pytest
import torch

from bench import cpu_times, interleave
from bench.baselines import feynrl_style_loss, plain_loss
from bench.memory import peak_extra_bytes
from p3o_kernels import p3o_loss

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("scope", ["micro_batch", "given_context"])
def test_baseline_computes_the_same_loss_and_gradient(scope):
    """Both sides of the comparison do the same work. Float32 sums over 1,000 tokens: 1e-5 relative."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -3.0 * torch.rand(1000, generator=generator)
    behavior = log_probs + 0.3 * torch.randn(1000, generator=generator)
    advantages = torch.randn(1000, generator=generator)
    mask = torch.rand(1000, generator=generator) > 0.1
    theirs, ours = (log_probs.clone().requires_grad_() for _ in range(2))
    output = p3o_loss(ours, behavior, advantages, mask, backend="eager")
    ess = None if scope == "micro_batch" else float(output.context.ess)
    loss, metrics = feynrl_style_loss(theirs, behavior, advantages, mask.float(), ess)
    loss.backward()
    output.loss.backward()
    means = output.metrics.to_dict(prefix="")
    torch.testing.assert_close(loss, output.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-5, atol=1e-8)
    same = {"ess": "normalized_ess", "clip_fraction": "clip_fraction", "behavior_kl": "behavior_kl_proxy"}
    assert [metrics[name] for name in same] == pytest.approx([means[name] for name in same.values()], rel=1e-5)


def test_peak_memory_counts_what_lives_at_once():
    """Two tensors of 1 MiB at most: the first is gone before the third is made. Small blocks may come on top."""
    source = torch.zeros(1 << 18)

    def step():
        first = source + 1.0
        second = first + 1.0
        del first
        return second + 1.0

    assert peak_extra_bytes(step, "cpu") == pytest.approx(2 << 20, abs=4096)


@pytest.mark.parametrize("ess", [None, 0.9])
def test_shortest_loss_is_the_same_loss(ess):
    """Float32 sums over 1,000 tokens in another order: 1e-5 relative."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -3.0 * torch.rand(1000, generator=generator)
    behavior = log_probs + 0.3 * torch.randn(1000, generator=generator)
    advantages = torch.randn(1000, generator=generator)
    mask = torch.rand(1000, generator=generator) > 0.1
    short, published = (log_probs.clone().requires_grad_() for _ in range(2))
    loss = plain_loss(short, behavior, advantages, mask, ess)
    expected, _ = feynrl_style_loss(published, behavior, advantages, mask.float(), ess)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(short.grad, published.grad, rtol=1e-5, atol=1e-8)


def test_turns_begin_with_a_call_that_is_not_timed():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    times = interleave.turns(steps, 2, 2, clock=iter(range(100)).__next__)
    assert "".join(order) == "aaabbb" * 2
    assert times == {"a": [1] * 4, "b": [1] * 4}


def test_every_provider_has_a_time_and_a_peak():
    rows = cpu_times.measure(1, smoke=True)
    assert {row["table"] for row in rows} == {"token", "variants", "from_logits", "from_hidden"}
    assert all(row["seconds"] > 0 for row in rows)
    assert all(row["peak_bytes"] > 0 for row in rows if row["provider"] != "three_gemms")
