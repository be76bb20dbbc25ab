"""The loss with two anchors: bad data and arguments, operators, ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from p3o_kernels import RatioStats, _backend, p4o_loss
from tests.distributed.ranks import on_all_ranks
from tests.kernels.anchored import TOKENS, UNSANITIZED, run, two_anchor_batch

pytestmark = UNSANITIZED

NAMES = ("log_probs", "behavior_log_probs", "proximal_log_probs", "advantages", "mask")


@pytest.mark.parametrize("log_ratio", [355.0, -373.0, math.inf, math.nan])
@pytest.mark.parametrize("index", [1, 2], ids=["behavior", "proximal"])
@pytest.mark.parametrize("frozen", [False, True], ids=["micro-batch", "step"])
def test_an_impossible_ratio(place, frozen, index, log_ratio):
    tensors = two_anchor_batch(place.device)
    tensors[4][6] = True
    one = RatioStats.zeros(place.device).to_context()
    options = {"context": one, "proximal_context": one} if frozen else {}
    tensors[index][6] = tensors[0][6] - log_ratio
    with pytest.raises(ValueError, match=r"invalid data on 1 of \d+ valid.*token 6: log_probs.*proximal_log_probs"):
        p4o_loss(*tensors, **options)
    output, grad = run(p4o_loss, tensors, validate=False, **options)
    assert output.loss.isnan() and grad.isnan().all()
    assert output.metrics.to_dict("")["invalid_tokens"] == 1


@pytest.mark.parametrize("index", [1, 2], ids=["behavior", "proximal"])
def test_finite_ratios_whose_squares_overflow_in_sum(index):
    tensors = two_anchor_batch()[:4]
    tensors[index] = tensors[0] - 354.8  # rho^2 is 1.5e308
    with pytest.raises(ValueError, match="invalid data on 1 of 37"):
        p4o_loss(*tensors)


CONTEXT = RatioStats.zeros().to_context()
NO_NUMBER = type(CONTEXT)(*[torch.tensor(math.nan, dtype=torch.float64)] * 5)
BAD = {
    "proximal shape": ({"proximal_log_probs": torch.zeros(3)}, ValueError, r"proximal_log_probs \(3,\)"),
    "proximal dtype": (
        {"proximal_log_probs": torch.zeros(TOKENS).int()},
        TypeError,
        "proximal_log_probs must be float32",
    ),
    "proximal device": (
        {"proximal_log_probs": torch.zeros(TOKENS, device="meta")},
        ValueError,
        "proximal_log_probs meta",
    ),
    "mask": ({"mask": torch.ones(TOKENS)}, TypeError, "mask must be torch.bool"),
    "one context": ({"context": CONTEXT}, ValueError, "proximal_context is missing: give both"),
    "other context": ({"proximal_context": CONTEXT}, ValueError, "together, context is missing"),
    "context type": (
        {"context": CONTEXT, "proximal_context": 0.5},
        TypeError,
        "proximal_context must be an ESSContext.*got float",
    ),
    "context and group": (
        {"context": CONTEXT, "proximal_context": CONTEXT, "process_group": object()},
        ValueError,
        "context and process_group exclude each other",
    ),
    "NaN context": ({"context": CONTEXT, "proximal_context": NO_NUMBER}, ValueError, "proximal_context.ess is NaN"),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be one of"),
    "kl_mode": ({"kl_mode": "exact"}, ValueError, "rollouts do not record"),
    "clip_high": ({"clip_high": math.nan}, ValueError, "clip_high must be finite"),
    "num_tokens": ({"num_tokens": 0}, ValueError, "num_tokens must be >= 1"),
    "num_tokens tensor": ({"num_tokens": torch.tensor(0)}, ValueError, "num_tokens must be >= 1, got 0"),
    "offsets": ({"cu_seqlens": torch.tensor([0, 5]).int()}, ValueError, r"end at T = 37, got \[0, 5\]"),
}


@pytest.mark.host_only
@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name):
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        p4o_loss(**(dict(zip(NAMES, two_anchor_batch(), strict=True)) | changes))


@pytest.mark.host_only
def test_operators_and_compile_without_a_host_read():
    backend = "triton" if _backend.INTERPRETED else "eager"
    log_probs, behavior, proximal, advantages, mask = two_anchor_batch()
    torch.library.opcheck(torch.ops.p3o.anchors, (log_probs, behavior, proximal, mask, backend))
    ess = [torch.tensor(value, dtype=torch.float64) for value in (0.7, 0.9)]
    arguments = (log_probs.requires_grad_(), behavior, proximal, advantages, mask, None, *ess, None, 0)
    for reduction in ("mean", "none"):
        options = (reduction, "importance", 0.2, 0.2, backend)
        torch.library.opcheck(torch.ops.p3o.two_anchor_loss, (*arguments, *options))
    compiled = torch.compile(p4o_loss, fullgraph=True, backend="aot_eager")  # a read breaks the graph
    got, grad = run(compiled, two_anchor_batch(), validate=False)
    want, want_grad = run(p4o_loss, two_anchor_batch(), validate=False)
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)


def share(rank):
    return [t[:25] if rank == 0 else t[25:] for t in two_anchor_batch()]


def on_a_rank(rank):
    group = dist.group.WORLD
    output, grad = run(p4o_loss, share(rank), process_group=group, reduction="sum")
    texts = []
    for index in (1, 2, 3):  # only rank 1 has bad data
        bad = [t.clone() for t in share(rank)]
        bad[4][3] = True
        if rank == 1:
            bad[index][3] = math.nan
        try:
            p4o_loss(*bad, process_group=group)
        except ValueError as error:
            texts.append(str(error))
    used = [output.ess.item(), output.context.ess.item(), output.proximal_context.ess.item()]
    return output.loss.item(), grad.tolist(), used, texts


@pytest.mark.host_only
def test_two_ranks_equal_one_process():
    whole, whole_grad = run(p4o_loss, two_anchor_batch(), reduction="sum")
    first, second = on_all_ranks(on_a_rank, 2)
    assert first[2] == second[2]  # the same bits on every rank
    assert first[2][1:] == pytest.approx([whole.context.ess.item(), whole.proximal_context.ess.item()], rel=1e-13)
    assert first[0] + second[0] == pytest.approx(whole.loss.item(), rel=1e-6)
    # e differs by float64 roundings, which may turn the last bit of the cap, 6e-8; two terms may cancel
    torch.testing.assert_close(torch.tensor(first[1] + second[1]), whole_grad, rtol=2e-7, atol=1.2e-7)
    assert len(first[3]) == len(second[3]) == 3
    for text, other in zip(first[3], second[3], strict=True):
        assert text.startswith("invalid data on 1 of ") and other.startswith("invalid data on 1 of ")
        assert "no single token of this rank" in text and "the first is token 3" in other
