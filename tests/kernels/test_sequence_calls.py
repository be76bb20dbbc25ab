"""The loss with an e for each sequence: bad arguments, operators, ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from p3o_kernels import _backend, p3o_loss_per_sequence, sequence_ess
from tests.distributed.ranks import on_all_ranks
from tests.kernels.anchored import LENGTHS, offsets, run, sequence_batch

BAD = {
    "offsets missing": ({"cu_seqlens": None}, TypeError, "cu_seqlens must be a torch.Tensor, got NoneType"),
    "offsets dtype": ({"cu_seqlens": offsets().long()}, TypeError, "cu_seqlens must be torch.int32"),
    "offsets end": ({"cu_seqlens": offsets([3, 5])}, ValueError, r"end at T = 15, got \[0, 3, 8\]"),
    "offsets decrease": (
        {"cu_seqlens": torch.tensor([0, 9, 4, 15]).int()},
        ValueError,
        r"never decrease.*got \[0, 9, 4, 15\]",
    ),
    "offsets far outside": (
        {"cu_seqlens": torch.tensor([-5, 10**9, 15]).int()},
        ValueError,
        "cu_seqlens must start at 0",
    ),
    "shape": ({"behavior_log_probs": torch.zeros(3)}, ValueError, r"behavior_log_probs \(3,\)"),
    "advantages": ({"advantages": torch.zeros(3)}, ValueError, r"advantages must be \[7\], one per sequence"),
    "dtype": ({"log_probs": torch.zeros(15).double()}, TypeError, "log_probs must be float32"),
    "mask": ({"mask": torch.ones(15)}, TypeError, "mask must be torch.bool"),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be one of"),
    "kl_mode": ({"kl_mode": "exact"}, ValueError, "rollouts do not record"),
    "clip_low": ({"clip_low": -1.0}, ValueError, "clip_low must be >= 0"),
    "num_tokens": ({"num_tokens": 0}, ValueError, "num_tokens must be >= 1"),
    "num_tokens tensor": ({"num_tokens": torch.tensor(0)}, ValueError, "num_tokens must be >= 1, got 0"),
}


@pytest.mark.host_only
@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name):
    changes, error, message = BAD[name]
    names = ("log_probs", "behavior_log_probs", "advantages", "mask")
    arguments = dict(zip(names, sequence_batch(), strict=True)) | {"cu_seqlens": offsets()} | changes
    with pytest.raises(error, match=message):
        p3o_loss_per_sequence(**arguments)
    if name.startswith("offsets"):
        with pytest.raises(error, match=message):
            sequence_ess(arguments["log_probs"], arguments["behavior_log_probs"], arguments["cu_seqlens"])


@pytest.mark.host_only
def test_operators_and_compile_without_a_host_read():
    backend = "triton" if _backend.INTERPRETED else "eager"
    log_probs, behavior, advantages, mask = sequence_batch()
    torch.library.opcheck(torch.ops.p3o.sequence_sums, (log_probs, behavior, mask, offsets(), backend))
    ess = torch.full((len(LENGTHS),), 0.7, dtype=torch.float64)
    arguments = (log_probs.requires_grad_(), behavior, advantages, mask, offsets(), ess, None, 0)
    for reduction in ("mean", "none"):
        options = (reduction, "proxy_safe", 0.2, 0.2, backend)
        torch.library.opcheck(torch.ops.p3o.sequence_loss, (*arguments, *options))
    options = {"cu_seqlens": offsets(), "validate": False}
    compiled = torch.compile(p3o_loss_per_sequence, fullgraph=True, backend="aot_eager")  # a read breaks the graph
    got, grad = run(compiled, sequence_batch(), **options)
    want, want_grad = run(p3o_loss_per_sequence, sequence_batch(), **options)
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)


CUT = [[0, 2, 1, 0, 5, 1, 0], [0, 2, 0, 0, 2, 2, 0]]  # of LENGTHS, on two ranks


def parts(rank):
    """The tokens of this rank, and its offsets."""
    starts = offsets().tolist()
    rows = []
    for start, first, own in zip(starts, CUT[0], CUT[rank], strict=False):
        begin = start if rank == 0 else start + first
        rows += range(begin, begin + own)
    return [t[rows] for t in sequence_batch()], offsets(CUT[rank]), rows


def on_a_rank(rank):
    tensors, cu_seqlens, rows = parts(rank)
    group = dist.group.WORLD
    output, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, process_group=group, reduction="sum")
    alone = sequence_ess(*tensors[:2], cu_seqlens, tensors[3], process_group=group)
    assert torch.equal(alone.ess, output.sequence_ess.ess)
    texts = []
    for index in (1, 2):  # only rank 1 has bad data
        bad = [t.clone() for t in tensors]
        bad[3][0] = True
        if rank == 1:
            bad[index][0] = math.nan
        try:
            p3o_loss_per_sequence(*bad, cu_seqlens=cu_seqlens, process_group=group)
        except ValueError as error:
            texts.append(str(error))
    return rows, output.loss.item(), grad.tolist(), output.sequence_ess.ess.tolist(), texts


@pytest.mark.host_only
def test_sequences_cut_over_two_ranks():
    whole, whole_grad = run(p3o_loss_per_sequence, sequence_batch(), cu_seqlens=offsets(), reduction="sum")
    first, second = on_all_ranks(on_a_rank, 2)
    assert sorted(first[0] + second[0]) == list(range(15))
    assert first[3] == second[3]  # the same bits on every rank
    assert first[3] == pytest.approx(whole.sequence_ess.ess.tolist(), rel=1e-14)
    assert first[1] + second[1] == pytest.approx(whole.loss.item(), rel=1e-6)
    grad = torch.zeros(15)
    for rows, _, values, *_ in (first, second):
        grad[rows] = torch.tensor(values)
    # e differs by float64 roundings at most
    torch.testing.assert_close(grad, whole_grad, rtol=2e-7, atol=0)
    assert len(first[4]) == len(second[4]) == 2
    for text, other in zip(first[4], second[4], strict=True):
        assert text.startswith("invalid data on 1 of ") and other.startswith("invalid data on 1 of ")
        assert "no single token of this rank" in text and "the first is token 0" in other
