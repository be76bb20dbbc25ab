"""Samples, layouts and packed batches refuse what cannot be right, and say which sample it is."""

import dataclasses
import math

import pytest
import torch
from samples import make_sample

from p3o_train.packing import dummy_batch, pack
from p3o_train.types import ContextLayout, Sample, check_equal_lengths


def test_masks_are_anded():
    sample = make_sample(response=3, valid=[1, 1, 0], pairing_mask=[True, False, True])
    assert sample.valid_mask.tolist() == [True, False, False]


def test_masks_default_to_true():
    sample = make_sample(response=3)
    assert sample.valid_mask.tolist() == [True, True, True]
    assert sample.valid_mask.dtype == torch.bool


def test_lists_and_tensors_make_the_same_sample():
    one = Sample.from_lists([5, 6, 7], 2, [-1.5, None], [1, 0], sample_id="a")
    other = Sample.from_lists(
        torch.tensor([5, 6, 7], dtype=torch.int32),
        2,
        torch.tensor([-1.5, math.nan], dtype=torch.float64),
        torch.tensor([1.0, 0.0]),
    )
    for sample in (one, other):
        assert sample.token_ids.dtype == torch.int64
        assert sample.token_ids.tolist() == [5, 6, 7]
        assert sample.behavior_log_probs.dtype == torch.float32
        assert sample.behavior_log_probs[0].item() == -1.5
        assert sample.behavior_log_probs[1].isnan()
        assert sample.valid_mask.tolist() == [True, False]


def test_an_empty_response_has_nothing():
    sample = Sample.from_lists([5, 6], 0, [])
    assert sample.behavior_log_probs.shape == sample.valid_mask.shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, 2, 3], 2, None), ["'x'", "requires behavior log-probs", "2 response tokens"]),
        (([1, 2, 3], 2, [-1.0]), ["'x'", "behavior_log_probs", "length 1", "is 2", "of 3 token_ids"]),
        (([1, 2, 3], 2, [-1.0, -1.0], [1]), ["'x'", "loss_mask", "length 1", "is 2"]),
        (([1, 2, 3], 2, [-1.0, math.nan]), ["'x'", "nan", "response token 1", "1 of 2", "drop"]),
        (([1, 2, 3], 2, [None, -1.0]), ["'x'", "nan", "response token 0"]),
        (([1, 2, 3], 2, [-1.0, -math.inf]), ["'x'", "-inf"]),
        (([1, 2, 3], 3, [-1.0] * 3), ["'x'", "[0, 3)", "prompt", "got 3"]),
        (([1, 2, 3], -1, []), ["'x'", "got -1"]),
        (([], 0, []), ["'x'", "got 0"]),
        (([[1, 2, 3]], 1, [-1.0]), ["'x'", "token_ids", "one-dimensional", "(1, 3)"]),
    ],
)
def test_a_bad_sample_is_named(arguments, words):
    with pytest.raises(ValueError) as error:
        Sample.from_lists(*arguments, sample_id="x")
    assert [word for word in words if word not in str(error.value)] == []


def test_a_bad_pairing_mask_is_named():
    with pytest.raises(ValueError, match="'x': pairing_mask has length 1, but response_length is 3"):
        make_sample(response=3, pairing_mask=[True], sample_id="x")


def test_the_constructor_checks_dtypes():
    sample = make_sample()
    with pytest.raises(ValueError, match=r"loss_mask must be one-dimensional torch\.bool.*from_lists converts"):
        dataclasses.replace(sample, loss_mask=sample.loss_mask.int())


def test_a_dummy_has_no_valid_token():
    with pytest.raises(ValueError, match="a dummy must have no valid token, got 3"):
        dataclasses.replace(make_sample(response=3), is_dummy=True)


def test_samples_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_sample().reward = 1.0


@pytest.mark.parametrize(
    ("cp_size", "tp_size", "order", "alignment"),
    [
        (1, 1, "zigzag", 1),
        (1, 4, "zigzag", 4),
        (2, 1, "zigzag", 4),
        (2, 2, "zigzag", 8),
        (4, 2, "zigzag", 16),
        (4, 1, "contiguous", 4),
        (2, 4, "contiguous", 8),
    ],
)
def test_alignment(cp_size, tp_size, order, alignment):
    layout = ContextLayout(cp_size, 0, tp_size, order)
    assert layout.alignment == alignment
    assert layout.padded_length(0) == 0
    assert layout.padded_length(1) == layout.padded_length(alignment) == alignment
    assert layout.padded_length(alignment + 1) == 2 * alignment


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cp_size": 2, "cp_rank": 2}, r"cp_rank must be in \[0, 2\), got 2"),
        ({"cp_rank": -1}, "got -1"),
        ({"cp_size": 0}, "must be >= 1, got 0 and 1"),
        ({"tp_size": 0}, "must be >= 1, got 1 and 0"),
        ({"order": "ring"}, "order must be one of .*got 'ring'"),
    ],
)
def test_a_bad_layout_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        ContextLayout(**arguments)


def test_unequal_metadata_is_not_truncated():
    with pytest.raises(ValueError, match=r"must match.*total_lengths=2, response_lengths=2, loss_masks=1"):
        check_equal_lengths({"total_lengths": [3, 4], "response_lengths": [1, 1], "loss_masks": [[1]]})


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("labels", torch.zeros(6, dtype=torch.int64), r"'s100'.*labels \(6,\) instead of \(5,\)"),
        ("advantages", torch.zeros(2), r"advantages \(2,\) instead of \(1,\)"),
        ("cu_seqlens", torch.zeros(3, dtype=torch.int32), r"cu_seqlens \(3,\) instead of \(2,\)"),
        ("response_lengths", (3, 3), "total_lengths=1, response_lengths=2, sample_ids=1"),
        ("num_tokens", 6, "count of 5 tokens.*got 6"),
        ("num_tokens", -1, "got -1"),
        ("is_dummy", True, "0 in a dummy; got 3"),
    ],
)
def test_a_packed_batch_checks_itself(field, value, text):
    batch = pack([make_sample()], [1.0])
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(batch, **{field: value})


def test_a_batch_moves_as_a_whole():
    batch = dummy_batch()
    moved = batch.to("meta")
    tensors = {name: value for name, value in vars(moved).items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 10
    assert {value.device.type for value in tensors.values()} == {"meta"}
    assert (moved.max_seqlen, moved.sample_ids, moved.layout) == (batch.max_seqlen, batch.sample_ids, batch.layout)
