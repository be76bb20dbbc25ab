"""The comparison from logits and from hidden states is a fair one, and its verdicts follow from its figures."""

import pytest
import torch

from bench import peers, vocabulary_cases
from bench.check_vocabulary import necessary_bytes, verdicts
from bench.interleave import medians, seconds
from bench.vocabulary_workload import CPU, SCOPES, SMOKE, Step, make_batch, peak_bytes

SECONDS = {"three_gemms": 1.0, "p3o": 1.1, "liger_grpo": 2.0, "naive": 1.5}
PEAKS = {"three_gemms": 0, "p3o": 110, "liger_grpo": 300, "naive": 800}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("source", ["logits", "hidden"])
@pytest.mark.parametrize("provider", ["p3o", pytest.param("naive_compiled", marks=pytest.mark.host_only)])
def test_providers_compute_the_same(provider, source, scope):
    """Float32 sums over 1,024 logits and 64 tokens, in another order: 1e-5 of the largest gradient."""
    batch = make_batch(SMOKE, source)
    expected = peers.make_step("naive", batch, scope)()
    grads = [leaf.grad.clone() for leaf in batch.leaves]
    loss = peers.make_step(provider, batch, scope)()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for leaf, grad in zip(batch.leaves, grads, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-5, atol=1e-5 * float(grad.abs().max()))


def test_liger_differentiates_the_same_log_probs():
    """Its token loss differs, its matrix products do not: inside the clip range GRPO's gradient is rho A d(lp)."""
    pytest.importorskip("liger_kernel")
    batch = make_batch(SMOKE, "hidden")
    peers.make_step("liger_grpo", batch, "any")()
    grads = [leaf.grad.clone() for leaf in batch.leaves]
    hidden, weight = batch.leaves
    logits = hidden @ weight.t()
    log_probs = logits.log_softmax(-1).gather(-1, batch.labels[:, None])[:, 0]
    ratio, advantage = (log_probs - batch.behavior_log_probs).exp(), batch.advantages[0]
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    for grad, expected in zip(grads, torch.autograd.grad(loss, batch.leaves), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_every_provider_is_listed():
    names = {*peers.providers("logits"), *peers.providers("hidden")}
    assert names == {"three_gemms", "naive", "naive_compiled", "p3o", *peers.PEERS}
    assert ("p3o", "given_context") in vocabulary_cases.cases("logits")
    assert ("three_gemms", "any") not in vocabulary_cases.cases("logits")


def test_absent_peers_are_named(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda module: None if module == "liger_kernel" else object())
    assert peers.why_absent("liger_grpo", "cpu") == "not installed"
    assert peers.why_absent("te_cross_entropy", "cpu") == "needs CUDA"
    assert peers.why_absent("te_cross_entropy", "cuda") is None
    assert peers.why_absent("p3o", "cpu") is None
    assert "liger_grpo (liger_kernel): not installed" in " ".join(vocabulary_cases.legend("cpu"))


def test_necessary_memory():
    """4 bytes x (2,048 + 32,768) x 512 is 68 MiB, and a tile of 32."""
    assert necessary_bytes(CPU) == 100 * 2**20


@pytest.mark.parametrize(
    ("seconds", "peaks", "expected"),
    [
        ({}, {}, [True, True, True, True]),
        ({"p3o": 1.16}, {}, [False, True, True, True]),
        ({"liger_grpo": 1.4}, {}, [True, False, True, True]),
        ({}, {"p3o": 131}, [True, True, False, True]),
        ({}, {"naive": 549}, [True, True, True, False]),
    ],
)
def test_verdicts(seconds, peaks, expected):
    assert [verdict.reached for verdict in verdicts(SECONDS | seconds, PEAKS | peaks, 100)] == expected


def test_verdicts_without_liger():
    found = verdicts({name: value for name, value in SECONDS.items() if name != "liger_grpo"}, PEAKS, 100)
    assert [verdict.reached for verdict in found] == [True, None, True, True]
    assert "not installed" in str(found[1])


def test_rounds_are_interleaved_and_peaks_hold_gradients():
    order = []
    steps = {name: Step(lambda name=name: order.append(name)) for name in "ab"}
    times = seconds(steps, 3, clock=iter(range(100)).__next__)
    assert order == list("ababab")
    assert medians(times) == {"a": 1, "b": 1}
    batch = make_batch(SMOKE, "hidden")
    step = peers.make_step("p3o", batch, "given_context")
    step()
    assert peak_bytes(step, "cpu") >= sum(leaf.nbytes for leaf in batch.leaves)


def test_table():
    """Half the time of naive is a speed-up of 2; the bare products take four fifths of it."""

    def row(provider, scope, value):
        made = vocabulary_cases.info("hidden", CPU, provider, scope, peak=2**20)
        return made | {"seconds": value}

    rows = [row("three_gemms", "any", 0.8), row("naive", "micro_batch", 2.0), row("p3o", "micro_batch", 1.0)]
    last = vocabulary_cases.table(rows)[-1].split()
    assert last == ["hidden", "32768", "micro_batch", "p3o", "P3O", "1000.0", "2.00x", "80%", "1.0"]
