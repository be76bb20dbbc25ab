"""The kernels with two anchors and with an e for each sequence, where they take different paths through memory."""

import pytest
import torch

from p3o_kernels import ESSContext, _anchored_eager, _backend, p3o_loss_per_sequence, p4o_loss, sequence_ess
from p3o_kernels._math_kernels import BLOCK
from tests.kernels.anchored import compare, offsets, run, sequence_batch, two_anchor_batch

# nothing, one token, one thread's four and a tail, a second block with a tail
TOKENS = [0, 1, 5, BLOCK + 1]
# unaligned starts, empty sequences, one in several blocks of 1024 tokens, one across the blocks of the loss kernel
MIXED = [3, 0, 1, 7, 1500, 2, 0, 3000, 5]
MANY = [3, 0, 1, 7, 2] * 330
SOME = [3, 0, 1, 7, 2] * 5


def frozen(value, device):
    ess = torch.tensor(value, dtype=torch.float64, device=device)
    return ESSContext(ess, ess, ess, ess, ess)


@pytest.mark.parametrize("given", [False, True], ids=["micro-batch", "step"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_two_anchors(place, tokens, given):
    options = {}
    if given:
        options = {"context": frozen(0.37, place.device), "proximal_context": frozen(0.8, place.device)}
    output, _ = compare(p4o_loss, two_anchor_batch(place.device, tokens), place.backend, **options)
    if given:
        assert output.ess.item() == 0.37 and output.proximal_context is options["proximal_context"]


@pytest.mark.parametrize("kl_mode", ["proxy", "importance"])
def test_a_loss_of_each_token(place, kl_mode):
    tensors = two_anchor_batch(place.device, 70)
    upstream = torch.linspace(0.5, 2.0, 70, device=place.device)
    options = {"upstream": upstream, "reduction": "none", "kl_mode": kl_mode}
    compare(p4o_loss, tensors, place.backend, **options)
    tensors = [*tensors[:2], *tensors[3:]]
    compare(p3o_loss_per_sequence, tensors, place.backend, cu_seqlens=offsets([9, 0, 61], place.device), **options)


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
def test_two_anchors_with_advantages_of_sequences(place, masked):
    """More sequences than a block has warps: every token needs the search."""
    tensors = two_anchor_batch(place.device, sum(MANY))[: 4 + masked]
    tensors[3] = torch.linspace(-1.0, 2.0, len(MANY), device=place.device)
    compare(p4o_loss, tensors, place.backend, cu_seqlens=offsets(MANY, place.device), reduction="sum")


@pytest.mark.parametrize("by_sequence", [False, True], ids=["tokens", "sequences"])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("lengths", [MIXED, SOME], ids=["mixed", "short"])
def test_sequences(place, lengths, masked, by_sequence):
    tensors = sequence_batch(place.device, lengths)[: 3 + masked]
    if by_sequence:
        tensors[2] = torch.linspace(-1.0, 2.0, len(lengths), device=place.device)
    compare(p3o_loss_per_sequence, tensors, place.backend, cu_seqlens=offsets(lengths, place.device))


@pytest.mark.parametrize("chunks", [1, 3])
def test_sums_of_sequences(place, monkeypatch, chunks):
    """One program for each sequence, or several whose sums are joined; the same bits each time."""
    if _backend.HAS_TRITON:
        monkeypatch.setattr("p3o_kernels._anchored_launch._chunks", lambda sequences, tokens: chunks)
    log_probs, behavior, _, mask = sequence_batch(place.device, MIXED)
    cu_seqlens = offsets(MIXED, place.device)
    got, again = (sequence_ess(log_probs, behavior, cu_seqlens, mask, backend=place.backend) for _ in range(2))
    cpu = [t.cpu() for t in (log_probs, behavior, mask, cu_seqlens)]
    want = _anchored_eager.sequence_sums(*cpu)
    for value, same, right in zip(vars(got).values(), vars(again).values(), want[4:7], strict=True):
        assert torch.equal(value, same)
        # float64 sums in another order, of exponentials good to 1e-13
        torch.testing.assert_close(value.cpu(), right, rtol=1e-12, atol=0)


def test_a_masked_token_gets_no_pull_where_the_shares_round(place):
    """The float64 sum of these shares is not 1."""
    ess = (0.01, 0.1)
    first, second = (1.0 - value for value in ess)
    assert first / (first + second) + second / (first + second) != 1.0
    contexts = [frozen(value, place.device) for value in ess]
    tensors = two_anchor_batch(place.device, 20)
    tensors[4][:] = torch.arange(20, device=place.device) == 0
    options = {"context": contexts[0], "proximal_context": contexts[1], "reduction": "sum", "backend": place.backend}
    _, grad = run(p4o_loss, tensors, **options)
    assert grad[0] != 0 and (grad[1:] == 0).all()


def test_offsets_that_lead_outside_touch_nothing(place):
    """Unvalidated, they give some number, but no kernel reads beyond the tensors."""
    log_probs, behavior, advantages, mask = sequence_batch(place.device, [40])
    bad = torch.tensor([-7, 90, 30, 64], dtype=torch.int32, device=place.device)
    options = {"cu_seqlens": bad, "validate": False, "backend": place.backend}
    output = p3o_loss_per_sequence(log_probs, behavior, advantages, mask, **options)
    assert int(output.num_tokens) == int(mask.sum())


@pytest.mark.parametrize("layout", ["strided", "offset"])
def test_any_layout(place, layout):
    def moved(tensor):
        if layout == "strided":
            return torch.stack([tensor, tensor], 1)[:, 0]
        return torch.cat([tensor[:1], tensor])[1:]  # the data pointer is not 16-byte aligned

    tensors = two_anchor_batch(place.device, 70)
    want, want_grad = run(p4o_loss, tensors, backend=place.backend)
    got = p4o_loss(*map(moved, tensors), backend=place.backend)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.metrics.vector, want.metrics.vector)
    cu_seqlens, tensors = offsets([30, 1, 39], place.device), [*tensors[:2], *tensors[3:]]
    want, want_grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, backend=place.backend)
    got, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=moved(cu_seqlens), backend=place.backend)
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)
    got = p3o_loss_per_sequence(*map(moved, tensors), cu_seqlens=cu_seqlens, backend=place.backend)
    assert torch.equal(got.metrics.vector, want.metrics.vector)
