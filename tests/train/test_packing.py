"""Packing: who owns which token, what stands beside it, and the way back."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from samples import CUTS, PROPERTY, layouts, log_probs_of, make_sample, sample_lists

from p3o_train.layout import local_valid_mask, offsets, owned_positions, owned_responses
from p3o_train.packing import dummy_batch, pack, pack_responses, pack_step, unpack_responses
from p3o_train.recording import Recording, Sampling, VersionSpan
from p3o_train.types import ContextLayout

# total, response, padded (None: as short as possible), cp_size -> owned response tokens of every rank
OWNED = [
    (11, 7, None, 2, [[6], [0, 1, 2, 3, 4, 5]]),
    (11, 7, None, 4, [[], [0], [1, 2], [3, 4, 5, 6]]),
    (11, 7, 16, 2, [[0], [1, 2, 3, 4, 5, 6]]),
    (5, 2, None, 2, [[], [0, 1]]),
    (12, 8, None, 2, [[6, 7], [0, 1, 2, 3, 4, 5]]),
    (9, 8, None, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    (5, 0, None, 2, [[], []]),
]


@pytest.mark.parametrize(("total", "response", "padded", "cp_size", "expected"), OWNED)
def test_owned_response_tokens(total, response, padded, cp_size, expected):
    padded_lengths = None if padded is None else [padded]
    owned = [owned_responses([total], [response], rank, padded_lengths)[0] for rank in layouts("zigzag", cp_size)]
    assert [indices.tolist() for indices in owned] == expected


def test_tensor_parallelism_pads_to_sixteen():
    layout = ContextLayout(2, 1, 2)
    assert owned_responses([11], [7], layout)[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert pack([make_sample(4, 7)], [1.0], layout).max_seqlen == 16


def test_zigzag_order_of_every_sequence():
    assert owned_positions([8, 4], ContextLayout(2, 0)).tolist() == [0, 1, 6, 7, 8, 11]
    assert owned_positions([8, 4], ContextLayout(2, 1)).tolist() == [2, 3, 4, 5, 9, 10]
    assert owned_positions([8, 4], ContextLayout(2, 1, order="contiguous")).tolist() == [6, 7, 8, 9, 10, 11]


def test_lengths_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match=r"padded length of 6 is no multiple of 4 \(cp_size 2.*pad it to 8"):
        owned_responses([5], [2], ContextLayout(2, 0), [6])
    with pytest.raises(ValueError, match="must hold, got 2, 5 and 4"):
        owned_responses([5], [2], ContextLayout(2, 0), [4])
    with pytest.raises(ValueError, match="must hold, got 5, 5 and 8"):
        owned_responses([5], [5], ContextLayout(2, 0))


def test_valid_mask_of_a_rank():
    masks = [torch.tensor([True, False, True, True, False, True, True]), torch.tensor([False, True])]
    ranks = [local_valid_mask([11, 5], [7, 2], masks, layout) for layout in layouts("zigzag", 2)]
    assert ranks[0].tolist() == [True]
    assert ranks[1].tolist() == [True, False, True, True, False, True, False, True]
    nothing = local_valid_mask([], [], [], ContextLayout(2, 0))
    assert (nothing.shape, nothing.dtype) == ((0,), torch.bool)


def test_unequal_metadata_is_not_truncated():
    masks, layout = [torch.ones(7).bool(), torch.ones(2).bool()], ContextLayout(2, 0)
    with pytest.raises(ValueError, match="total_lengths=2, response_lengths=2, valid_masks=1"):
        local_valid_mask([11, 5], [7, 2], masks[:1], layout)
    with pytest.raises(ValueError, match="total_lengths=2, response_lengths=2, padded_lengths=1"):
        local_valid_mask([11, 5], [7, 2], masks, layout, [12])
    with pytest.raises(ValueError, match="total_lengths=2, response_lengths=1"):
        owned_responses([11, 5], [7], layout)
    with pytest.raises(ValueError, match=r"valid_masks\[1\] has shape \(2,\), but response_length is 3"):
        local_valid_mask([11, 5], [7, 3], masks, layout)
    for advantages in ([1.0], [1.0, 2.0, 3.0], 1.0, [[1.0], [2.0]]):
        with pytest.raises(ValueError, match=r"advantages must be \(2,\), one per sample; got \("):
            pack([make_sample(), make_sample()], advantages)


def test_one_batch_in_full():
    samples = [make_sample(2, 3, valid=[1, 0, 1], first_token=10), make_sample(1, 2, first_token=20)]
    batch = pack(samples, [0.5, -2.0], ContextLayout(tp_size=4), pad_token_id=9)
    assert batch.tokens.tolist() == [10, 11, 12, 13, 14, 9, 9, 9, 20, 21, 22, 9]
    assert batch.labels.tolist() == [11, 12, 13, 14, 9, 9, 9, 9, 21, 22, 9, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 0, 1, 2, 2]
    assert batch.mask.nonzero().flatten().tolist() == [1, 3, 8, 9]
    assert batch.behavior_log_probs.tolist() == [0, -1, 0, -3, 0, 0, 0, 0, -1, -2, 0, 0]
    assert batch.advantages.tolist() == [0.5, -2.0]
    assert batch.cu_seqlens.tolist() == batch.local_cu_seqlens.tolist() == [0, 8, 12]
    assert batch.cu_seqlens_unpadded.tolist() == [0, 5, 8]
    assert (batch.max_seqlen, batch.num_tokens, batch.is_dummy) == (8, 4, False)
    assert (batch.total_lengths, batch.response_lengths, batch.sample_ids) == ((5, 3), (3, 2), ("s10", "s20"))
    dtypes = {name: value.dtype for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert {name for name, dtype in dtypes.items() if dtype == torch.int64} == {
        "tokens",
        "labels",
        "position_ids",
        "weight_versions",
    }
    assert {name for name, dtype in dtypes.items() if dtype == torch.int32} == {
        name for name in dtypes if "seqlens" in name
    }
    assert dtypes["behavior_log_probs"] == dtypes["advantages"] == torch.float32


def test_an_empty_response_yields_nothing():
    samples = [make_sample(4, 0), make_sample(1, 0), make_sample(2, 1)]
    for layout in layouts("zigzag", 2):
        batch = pack(samples[:2], [1.0, 1.0], layout)
        assert (batch.num_tokens, batch.mask.any().item(), batch.is_dummy) == (0, False, False)
    whole = pack(samples, [1.0] * 3)
    assert [values.numel() for values in unpack_responses([whole.labels], whole)] == [0, 0, 1]


@PROPERTY
@given(samples=sample_lists(), cut=CUTS)
def test_every_token_has_one_owner_and_its_own_label(samples, cut):
    """Token ids are unique over all samples, so that a label tells where it was taken from."""
    following, log_prob_of_valid = {}, {}
    for sample in samples:
        ids = sample.token_ids.tolist()
        following |= dict(pairwise(ids))
        responses = ids[len(ids) - sample.response_length :]
        for token, log_prob, valid in zip(responses, sample.behavior_log_probs, sample.valid_mask, strict=True):
            if valid:
                log_prob_of_valid[token] = log_prob.item()
    owned = []
    for layout in layouts(*cut):
        batch = pack(samples, [0.0] * len(samples), layout)
        rows = zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
        assert all(label == following.get(token, 0) for token, label in rows)
        labels = batch.labels[batch.mask].tolist()
        assert batch.num_tokens == len(labels)
        assert batch.behavior_log_probs[batch.mask].tolist() == [log_prob_of_valid[label] for label in labels]
        owned += labels
    assert sorted(owned) == sorted(log_prob_of_valid)


@PROPERTY
@given(samples=sample_lists(), cut=CUTS)
def test_shards_are_the_whole_batch_cut(samples, cut):
    """Tokens and positions of all ranks, put together, are those of a rank that shares with no other."""
    batches = [pack(samples, range(len(samples)), layout) for layout in layouts(*cut)]
    padded = [batches[0].layout.padded_length(sample.token_ids.numel()) for sample in samples]
    assert {batch.tokens.numel() * cut[1] for batch in batches} == {sum(padded)}
    assert all(batch.tokens.numel() % cut[2] == 0 for batch in batches)
    tokens, positions, owner = (torch.full((sum(padded),), -1) for _ in range(3))
    for batch in batches:
        owned = owned_positions(padded, batch.layout)
        tokens[owned], positions[owned] = batch.tokens, batch.position_ids
        sequences = torch.arange(len(samples)).repeat_interleave(batch.local_cu_seqlens.diff())
        assert torch.equal(sequences, torch.searchsorted(batch.cu_seqlens, owned, right=True) - 1)
        owner[owned] = batch.layout.cp_rank
        assert batch.cu_seqlens.tolist() == offsets(padded).tolist()
        assert batch.local_cu_seqlens.tolist()[-1] == batch.tokens.numel()
    assert owner.ge(0).all()
    for begin, sample in zip(offsets(padded).tolist(), samples, strict=False):
        length = sample.token_ids.numel()
        assert torch.equal(tokens[begin : begin + length], sample.token_ids)
        assert positions[begin : begin + length].tolist() == list(range(length))
    if cut[0] == "zigzag":
        assert all(torch.equal(batch.local_cu_seqlens * cut[1], batch.cu_seqlens) for batch in batches)


@PROPERTY
@given(samples=sample_lists(), cut=CUTS)
def test_values_come_back_in_response_order(samples, cut):
    batches = [pack(samples, [0.0] * len(samples), layout) for layout in layouts(*cut)]
    log_probs = log_probs_of(samples)
    for batch in batches:
        shards = [other.behavior_log_probs for other in batches]
        assert all(map(torch.equal, unpack_responses(shards, batch), log_probs))
        assert torch.equal(pack_responses(log_probs, batch), batch.behavior_log_probs)
        labels = unpack_responses([other.labels for other in batches], batch)
        ends = [sample.token_ids.numel() for sample in samples]
        for found, sample, end in zip(labels, samples, ends, strict=True):
            assert torch.equal(found, sample.token_ids[end - sample.response_length :])


@PROPERTY
@given(samples=sample_lists(), cut=CUTS)
def test_the_mask_of_the_batch_is_the_valid_mask_of_the_rank(samples, cut):
    total = [sample.token_ids.numel() for sample in samples]
    response = [sample.response_length for sample in samples]
    masks = [sample.valid_mask for sample in samples]
    counts = 0
    for layout in layouts(*cut):
        batch = pack(samples, [0.0] * len(samples), layout)
        is_response = pack_responses([torch.ones_like(mask) for mask in masks], batch)
        mask = local_valid_mask(total, response, masks, layout)
        assert torch.equal(batch.mask[is_response], mask)
        assert not batch.mask[~is_response].any()
        assert batch.num_tokens == int(mask.sum())
        counts += batch.num_tokens
    assert counts == sum(int(mask.sum()) for mask in masks)


@PROPERTY
@given(samples=sample_lists(), cut=CUTS)
def test_log_probs_outside_the_mask_do_not_matter(samples, cut):
    poison = [
        dataclasses.replace(
            sample, behavior_log_probs=torch.where(sample.valid_mask, sample.behavior_log_probs, math.inf)
        )
        for sample in samples
    ]
    for layout in layouts(*cut):
        one, other = (pack(some, [0.0] * len(samples), layout) for some in (samples, poison))
        assert torch.equal(one.behavior_log_probs, other.behavior_log_probs)
        assert one.behavior_log_probs.isfinite().all()


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_dummy_adds_nothing(order, cp_size):
    for layout in layouts(order, cp_size, 2):
        batch = dummy_batch(layout, pad_token_id=3)
        assert (batch.is_dummy, batch.num_tokens, batch.mask.any().item()) == (True, 0, False)
        assert batch.tokens.eq(3).all()
        assert batch.labels.eq(3).all()
        assert batch.tokens.numel() == layout.alignment // cp_size > 0


def test_filler_beside_a_sample_makes_no_dummy():
    filler = dataclasses.replace(make_sample(1, 0, first_token=20), is_dummy=True)
    assert not pack([make_sample(), filler], [1.0, 0.0]).is_dummy
    assert pack([filler, filler], [0.0, 0.0]).is_dummy


def test_a_step_fills_empty_micro_batches():
    samples = [make_sample(first_token=token) for token in (10, 20, 30)]
    batches = pack_step(samples, [1.0, 2.0, 3.0], [[2, 0], [], [1]])
    assert [batch.sample_ids for batch in batches] == [("s30", "s10"), ("dummy",), ("s20",)]
    assert [batch.advantages.tolist() for batch in batches] == [[3.0, 1.0], [0.0], [2.0]]
    assert [batch.is_dummy for batch in batches] == [False, True, False]
    with pytest.raises(ValueError, match=r"advantages must be \(3,\)"):
        pack_step(samples, [1.0, 2.0], [[0]])
    with pytest.raises(ValueError, match=r"samples is empty.*dummy_batch"):
        pack([], [])


def test_values_that_do_not_fit_are_refused():
    batch = pack([make_sample(2, 3), make_sample(1, 2, first_token=20)], [1.0, 1.0], ContextLayout(2, 0))
    with pytest.raises(ValueError, match="sample_ids=2, values=1"):
        pack_responses([torch.zeros(3)], batch)
    with pytest.raises(ValueError, match=r"'s20': values has shape \(1,\), but response_length is 2"):
        pack_responses([torch.zeros(3), torch.zeros(1)], batch)
    with pytest.raises(ValueError, match=r"shards must be 2 tensors of shape \(6,\).*got \[\(6,\)\]"):
        unpack_responses([torch.zeros(6)], batch)
    with pytest.raises(ValueError, match=r"got \[\(6,\), \(4,\)\]"):
        unpack_responses([torch.zeros(6), torch.zeros(4)], batch)


def test_more_tokens_than_int32_are_refused():
    with pytest.raises(ValueError, match="2147483648 packed tokens exceed 2147483647"):
        offsets([2**30, 2**30])


def recorded(spans, kept=None):
    return Recording("local", "1", Sampling(8), "scaled", spans, "stop", kept_token_ids=kept)


def test_weight_versions_lie_where_their_tokens_are_predicted():
    spans = (VersionSpan(3, 0, 2), VersionSpan(5, 2, 3))
    samples = [make_sample(2, 3, valid=[1, 0, 1], recording=recorded(spans)), make_sample(1, 2)]
    assert pack(samples, [0.0, 0.0]).weight_versions.tolist() == [0, 3, 0, 5, 0, 0, 0, 0]


def test_kept_tokens_lie_where_their_tokens_are_predicted():
    kept = ((102, 7), (103,), (104, 8, 9))
    sample = make_sample(2, 3, recording=recorded((VersionSpan(0, 0, 3),), kept))
    empty = make_sample(2, 2, valid=[0, 0])
    rows = pack([empty, sample], [0.0, 0.0]).kept_token_ids
    nothing = [-1, -1, -1]
    assert rows.tolist() == [nothing] * 5 + [[102, 7, -1], [103, -1, -1], [104, 8, 9], nothing]
    assert pack([empty], [0.0]).kept_token_ids is None
    shards = [pack([sample], [0.0], layout).kept_token_ids for layout in layouts("zigzag", 2)]
    whole = pack([sample], [0.0], ContextLayout(tp_size=8)).kept_token_ids  # padded to 8 as well
    assert torch.equal(torch.cat([shards[0][:2], shards[1], shards[0][2:]]), whole)


def test_kept_tokens_for_some_samples_only_are_refused():
    sample = make_sample(2, 1, recording=recorded((VersionSpan(0, 0, 1),), ((102,),)))
    with pytest.raises(ValueError, match=r"sample 's50': no kept_token_ids are recorded, but sample 's100'"):
        pack([sample, make_sample(2, 1, first_token=50)], [0.0, 0.0])
    short = make_sample(2, 3, recording=recorded((VersionSpan(0, 0, 3),), ((102,), (103,))))
    with pytest.raises(ValueError, match="kept_token_ids has 2 sets, but response_length is 3"):
        pack([short], [0.0])
