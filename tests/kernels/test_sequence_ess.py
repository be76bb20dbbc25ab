"""The effective sample size of each sequence, and the loss that is capped by it."""

import math

import pytest
import torch
import torch.distributed as dist

from p3o_kernels import p3o_loss, ratio_stats, reference
from p3o_kernels.sequences import p3o_loss_per_sequence, sequence_ess
from tests.distributed.ranks import on_all_ranks

# lengths with an empty first, middle and last sequence, one of one token, one wholly masked
LENGTHS = [0, 4, 1, 0, 7, 3, 0]
MASKED = slice(12, 15)  # the sequence of three
REDUCTIONS = ["mean", "sum", "none"]
KL_MODES = ["proxy", "proxy_safe", "importance"]


def offsets(lengths=LENGTHS, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def batch(device="cpu", lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    log_probs = -torch.rand(tokens, generator=generator) - 0.1
    behavior = log_probs + 0.6 * torch.randn(tokens, generator=generator)
    advantages = torch.randn(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) > 0.2
    mask[MASKED] = False
    return [tensor.to(device) for tensor in (log_probs, behavior, advantages, mask)]


def run(function, tensors, dtype=None, upstream=None, **options):
    tensors = [t.to(dtype) if dtype and t.is_floating_point() else t.clone() for t in tensors]
    tensors[0].requires_grad_()
    output = function(*tensors, **options)
    output.loss.backward(None if upstream is None else upstream.to(output.loss.dtype))
    return output, tensors[0].grad


def assert_as_exact_as_eager(value, truth, eager):
    """At most 1.5 times the largest error of eager autograd in float32, or 1e-6 of the largest value."""
    value, truth, eager = value.detach().double().cpu(), truth.detach().cpu(), eager.detach().double().cpu()
    allowed = max(1.5 * (eager - truth).abs().max().item(), 1e-6 * truth.abs().max().item())
    assert (value - truth).abs().max().item() <= allowed


def compare(tensors, **options):
    output, grad = run(p3o_loss_per_sequence, tensors, **options)
    truth, truth_grad = run(reference.p3o_loss_per_sequence, tensors, torch.float64, **options)
    eager, eager_grad = run(reference.p3o_loss_per_sequence, tensors, **options)
    assert_as_exact_as_eager(output.loss, truth.loss, eager.loss)
    assert_as_exact_as_eager(grad, truth_grad, eager_grad)
    # sums of float32 terms, in float64; the float64 reference does not round l
    torch.testing.assert_close(output.metrics.vector, truth.metrics.vector, rtol=1e-5, atol=1e-5)
    return output, grad


def test_values_by_the_definition(place):
    """Ratios 1, 2, 0.5, 4 are one sequence, 3 alone is another."""
    ratios, advantages = [1.0, 2.0, 0.5, 4.0, 3.0], [1.0, -1.0, 2.0, -0.5, 2.0]
    first = 7.5**2 / (4 * (21.25 + 1e-8))
    second = 9.0 / (9.0 + 1e-8)
    log_probs, grads, losses = [-2.0 + math.log(ratio) for ratio in ratios], [], []
    for ratio, advantage, log_prob, cap in zip(ratios, advantages, log_probs, [first] * 4 + [second], strict=True):
        weight, log_ratio = min(ratio, cap), math.log(ratio)
        grads.append(-weight * advantage + (1 - cap) * (1 - 1 / ratio))
        losses.append(-weight * log_prob * advantage + (1 - cap) * (log_ratio + 1 / ratio - 1))
    lp, a = (torch.tensor(values, device=place.device) for values in (log_probs, advantages))
    cu_seqlens = offsets([4, 0, 1], place.device)
    output, grad = run(p3o_loss_per_sequence, [lp, torch.full_like(lp, -2.0), a], cu_seqlens=cu_seqlens)
    # log-probs are rounded to float32, which moves rho by 1e-7 of itself
    assert output.sequence_ess.ess.tolist() == pytest.approx([first, 1.0, second], rel=1e-6)
    assert output.sequence_ess.num_tokens.tolist() == [4, 0, 1]
    assert output.sequence_ess.ratio_mean.tolist() == pytest.approx([1.875, 1.0, 3.0], rel=1e-6)
    assert output.loss.item() == pytest.approx(sum(losses) / 5, rel=1e-6)
    assert grad.tolist() == pytest.approx([value / 5 for value in grads], rel=1e-6)
    assert int(output.num_tokens) == 5 and output.num_tokens.dtype == torch.int64
    metrics = output.metrics.to_dict("")
    assert metrics["normalized_ess"] == pytest.approx((4 * first + second) / 5, rel=1e-6)
    assert metrics["cap_fraction"] == 0.8 and metrics["clip_fraction"] == 0.8  # all but 0.5; all but 1


def test_each_sequence_has_the_ess_it_has_alone(place):
    log_probs, behavior, _, mask = batch(place.device)
    got = sequence_ess(log_probs, behavior, offsets(device=place.device), mask)
    assert got.ess.dtype == got.num_tokens.dtype == torch.float64 and got.ess.shape == (len(LENGTHS),)
    bounds = offsets().tolist()
    for index, part in enumerate(slice(*bounds[i : i + 2]) for i in range(len(LENGTHS))):
        alone = ratio_stats(log_probs[part], behavior[part], mask[part], backend="eager").to_context()
        # the order of adding differs: float64 roundings
        assert got.ess[index].item() == pytest.approx(alone.ess.item(), rel=1e-14)
        assert got.num_tokens[index].item() == int(mask[part].sum())
        assert got.ratio_mean[index].item() == pytest.approx(alone.ratio_mean.item(), rel=1e-14)
    assert got.ess[[0, 3, 5, 6]].tolist() == [1.0] * 4  # without a token


@pytest.mark.parametrize("kl_mode", KL_MODES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_and_gradient(place, reduction, kl_mode):
    tensors = batch(place.device)
    upstream = torch.linspace(-1.0, 2.0, sum(LENGTHS), device=place.device) if reduction == "none" else None
    options = {"cu_seqlens": offsets(device=place.device), "reduction": reduction, "kl_mode": kl_mode}
    output, grad = compare(tensors, upstream=upstream, **options)
    assert output.loss.dtype == torch.float32
    assert (grad[~tensors[3]] == 0).all()


@pytest.mark.parametrize("log_ratio", [-20.0, 0.0, 20.0, 90.0])
@pytest.mark.parametrize("kl_mode", KL_MODES)
def test_a_distant_token(kl_mode, log_ratio):
    tensors = batch(lengths=[4, 3])[:3]
    tensors[1][5] = tensors[0][5] - log_ratio
    compare(tensors, cu_seqlens=offsets([4, 3]), kl_mode=kl_mode)


def test_several_chunks(monkeypatch):
    tensors, cu_seqlens = batch(), offsets()
    want, want_grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, reduction="none", upstream=tensors[2])
    monkeypatch.setattr("p3o_kernels._eager.CPU_CHUNK", 4)
    got, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, reduction="none", upstream=tensors[2])
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)
    # the order of adding differs: float64 roundings
    torch.testing.assert_close(got.metrics.vector, want.metrics.vector, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("lengths", [LENGTHS, [1] * 15], ids=["mixed", "ones"])
def test_advantages_of_sequences(place, lengths):
    """[B] also where B = T."""
    log_probs, behavior, _, mask = batch(place.device, lengths)
    advantages = torch.linspace(-1.0, 2.0, len(lengths), device=place.device)
    expanded = torch.repeat_interleave(advantages, torch.tensor(lengths, device=place.device))
    cu_seqlens = offsets(lengths, place.device)
    got, grad = compare([log_probs, behavior, advantages, mask], cu_seqlens=cu_seqlens)
    want, want_grad = run(p3o_loss_per_sequence, [log_probs, behavior, expanded, mask], cu_seqlens=cu_seqlens)
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)


def test_one_sequence_is_p3o(place):
    tensors = batch(place.device)
    whole = offsets([sum(LENGTHS)], place.device)
    got, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=whole)
    want, want_grad = run(p3o_loss, tensors)
    # float32 terms of another order of operations, in kernels: a few roundings
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, want_grad, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(got.metrics.vector, want.metrics.vector, rtol=1e-6, atol=1e-6)


def test_the_cut_into_micro_batches_changes_no_gradient(place):
    tensors, cu_seqlens = batch(place.device), offsets(device=place.device)
    _, whole = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, num_tokens=10)
    cut = int(cu_seqlens[3])
    _, first = run(p3o_loss_per_sequence, [t[:cut] for t in tensors], cu_seqlens=cu_seqlens[:4], num_tokens=10)
    rest = cu_seqlens[3:] - cut
    _, second = run(p3o_loss_per_sequence, [t[cut:] for t in tensors], cu_seqlens=rest, num_tokens=10)
    assert torch.equal(torch.cat([first, second]), whole)


def test_other_sequences_have_no_say(place):
    tensors, cu_seqlens = batch(place.device), offsets(device=place.device)
    _, before = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, reduction="sum")
    tensors[1][5:12] += torch.linspace(-3.0, 3.0, 7, device=place.device)
    _, after = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, reduction="sum")
    assert torch.equal(before[:5], after[:5]) and not torch.equal(before[5:12], after[5:12])


def test_equal_policies_leave_the_policy_gradient(place):
    log_probs, _, advantages, _ = batch(place.device)
    options = {"cu_seqlens": offsets(device=place.device), "reduction": "sum"}
    _, grad = run(p3o_loss_per_sequence, [log_probs, log_probs, advantages], **options)
    assert torch.equal(grad, -advantages)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_masked_slot_changes_no_bit(place, index, poison):
    tensors, cu_seqlens = batch(place.device), offsets(device=place.device)
    clean, clean_grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens)
    tensors[index] = torch.where(tensors[3], tensors[index], poison)
    output, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens)
    assert torch.equal(output.loss, clean.loss) and torch.equal(grad, clean_grad)
    assert torch.equal(output.metrics.vector, clean.metrics.vector)
    assert torch.equal(output.sequence_ess.ess, clean.sequence_ess.ess)


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=["no-sequence", "empty"])
def test_no_tokens(place, lengths):
    nothing = [torch.zeros(0, device=place.device)] * 3
    output, grad = run(p3o_loss_per_sequence, nothing, cu_seqlens=offsets(lengths, place.device))
    assert output.loss.item() == 0.0 and grad.shape == (0,) and int(output.num_tokens) == 0
    assert output.sequence_ess.ess.tolist() == [1.0] * len(lengths)


def test_all_masked(place):
    tensors = batch(place.device)
    tensors[3][:] = False
    output, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=offsets(device=place.device))
    assert output.loss.item() == 0.0 and (grad == 0).all() and (output.sequence_ess.ess == 1).all()


@pytest.mark.parametrize("log_ratio", [355.0, -373.0, math.inf, -math.inf, math.nan])
def test_an_impossible_ratio(place, log_ratio):
    tensors, cu_seqlens = batch(place.device), offsets(device=place.device)
    tensors[3][6] = True
    tensors[1][6] = tensors[0][6] - log_ratio
    with pytest.raises(ValueError, match=r"invalid data on 1 of \d+ valid tokens.*token 6: log_probs"):
        p3o_loss_per_sequence(*tensors, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match=r"invalid data on 1 of \d+ valid tokens.*token 6: log_probs"):
        sequence_ess(*tensors[:2], cu_seqlens, tensors[3])
    unread = sequence_ess(*tensors[:2], cu_seqlens, tensors[3], validate=False)
    assert unread.ess.isnan().tolist() == [False] * 4 + [True] + [False] * 2
    output, grad = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens, validate=False)
    assert output.loss.isnan() and grad.isnan().all()
    assert output.metrics.to_dict("")["invalid_tokens"] == 1


def test_a_bad_advantage(place):
    tensors = batch(place.device)
    tensors[2] = torch.tensor([0.0, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0], device=place.device)
    count = int(tensors[3][5:12].sum())
    with pytest.raises(ValueError, match=rf"invalid data on {count} of .*advantages nan"):
        p3o_loss_per_sequence(*tensors, cu_seqlens=offsets(device=place.device))


def test_finite_ratios_whose_squares_overflow_in_sum(place):
    log_probs = torch.zeros(8, device=place.device)
    behavior = torch.full_like(log_probs, -354.8)  # rho^2 is 1.5e308
    with pytest.raises(ValueError, match=r"invalid data on 1 of 8.*S2 = inf"):
        sequence_ess(log_probs, behavior, offsets([7, 1], place.device))


def test_same_bits_and_half_precision(place):
    tensors, cu_seqlens = batch(place.device), offsets(device=place.device)
    half = [t.bfloat16() if t.is_floating_point() else t for t in tensors]
    first, grad = run(p3o_loss_per_sequence, half, cu_seqlens=cu_seqlens)
    second, same = run(p3o_loss_per_sequence, [t.float() if t.is_floating_point() else t for t in half],
                       cu_seqlens=cu_seqlens)  # fmt: skip
    assert torch.equal(first.loss, second.loss) and torch.equal(grad, same.bfloat16())
    spread = [torch.stack([t, t], 1)[:, 0] for t in tensors]  # stride 2
    dense, _ = run(p3o_loss_per_sequence, tensors, cu_seqlens=cu_seqlens)
    strided = p3o_loss_per_sequence(*spread, cu_seqlens=cu_seqlens)
    assert torch.equal(dense.loss, strided.loss)


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
    arguments = dict(zip(names, batch(), strict=True)) | {"cu_seqlens": offsets()} | changes
    with pytest.raises(error, match=message):
        p3o_loss_per_sequence(**arguments)
    if name.startswith("offsets"):
        with pytest.raises(error, match=message):
            sequence_ess(arguments["log_probs"], arguments["behavior_log_probs"], arguments["cu_seqlens"])


def test_num_tokens_divides(place):
    tensors, cu_seqlens = batch(place.device), offsets(device=place.device)
    total = p3o_loss_per_sequence(*tensors, cu_seqlens=cu_seqlens, reduction="sum").loss
    for divisor in (7, torch.tensor(7, device=place.device)):
        got = p3o_loss_per_sequence(*tensors, cu_seqlens=cu_seqlens, num_tokens=divisor).loss
        torch.testing.assert_close(got, total / 7, rtol=2e-7, atol=0)  # one rounding to float32 each


@pytest.mark.host_only
def test_operators_and_compile_without_a_host_read():
    log_probs, behavior, advantages, mask = batch()
    torch.library.opcheck(torch.ops.p3o.sequence_sums, (log_probs, behavior, mask, offsets()))
    ess = torch.full((len(LENGTHS),), 0.7, dtype=torch.float64)
    arguments = (log_probs.requires_grad_(), behavior, None, advantages, mask, offsets(), ess, None, 0)
    for reduction in ("mean", "none"):
        torch.library.opcheck(torch.ops.p3o.anchored_loss, (*arguments, reduction, "proxy_safe", 0.2, 0.2))
    options = {"cu_seqlens": offsets(), "validate": False}
    compiled = torch.compile(p3o_loss_per_sequence, fullgraph=True, backend="aot_eager")  # a read breaks the graph
    got, grad = run(compiled, batch(), **options)
    want, want_grad = run(p3o_loss_per_sequence, batch(), **options)
    assert torch.equal(got.loss, want.loss) and torch.equal(grad, want_grad)


CUT = [[0, 2, 1, 0, 5, 1, 0], [0, 2, 0, 0, 2, 2, 0]]  # of LENGTHS, on two ranks


def parts(rank):
    """The tokens of this rank, and its offsets."""
    starts = offsets().tolist()
    rows = []
    for start, first, own in zip(starts, CUT[0], CUT[rank], strict=False):
        begin = start if rank == 0 else start + first
        rows += range(begin, begin + own)
    return [t[rows] for t in batch()], offsets(CUT[rank]), rows


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
    whole, whole_grad = run(p3o_loss_per_sequence, batch(), cu_seqlens=offsets(), reduction="sum")
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
