"""The pre-pass leaves no trace, and a training pass over other data is noticed."""

import dataclasses
import random
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch

from p3o_train.packing import pack
from p3o_train.replay import MicroBatches, ReplayCheck, replayed
from p3o_train.types import Sample


def batch(*token_ids, advantages=(1.0,)):
    samples = [Sample.from_lists(ids, 2, [-0.5, -0.25], sample_id=str(place)) for place, ids in enumerate(token_ids)]
    return pack(samples, list(advantages) * len(samples))


def batches():
    return [batch([1, 2, 3]), batch([4, 5, 6, 7]), batch([8, 9, 10], [11, 12, 13])]


def draws():
    return random.random(), numpy.random.random(), torch.rand(3).tolist()


def test_iterator_goes_back_to_where_it_was_and_not_to_the_start():
    iterator = MicroBatches(batches())
    first = next(iterator)
    with replayed(iterator):
        assert len(list(iterator)) == 2
    second = next(iterator)
    assert first.tokens.tolist()[0] == 1 and second.tokens.tolist()[0] == 4


def test_one_iterator_for_every_virtual_stage_and_none_elsewhere():
    iterator = MicroBatches(batches())
    with replayed([iterator, None, iterator]):
        next(iterator)
    assert iterator.snapshot_position() == 0
    with replayed(None):
        pass


def test_random_streams_go_on_as_if_nothing_had_been_drawn():
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(3)
    want = draws()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(3)
    with replayed(None):
        draws()
    assert draws() == want


def test_streams_of_megatron_are_restored_where_it_has_seeded_them(monkeypatch):
    states = {"model-parallel-rng": 7}
    tracker = SimpleNamespace(
        is_initialized=lambda: True, get_states=lambda: dict(states), set_states=lambda given: states.update(given)
    )
    module = SimpleNamespace(get_cuda_rng_tracker=lambda: tracker)
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", module)
    with replayed(None):
        states["model-parallel-rng"] = 8
    assert states == {"model-parallel-rng": 7}


def test_everything_is_restored_after_an_error():
    iterator = MicroBatches(batches())
    torch.manual_seed(5)
    want = torch.rand(2)
    torch.manual_seed(5)
    with pytest.raises(KeyError, match="in the middle"), replayed(iterator):
        next(iterator)
        torch.rand(7)
        raise KeyError("in the middle")
    assert iterator.snapshot_position() == 0 and torch.equal(torch.rand(2), want)


def test_a_stream_cannot_be_replayed_and_is_not_touched():
    iterator, stream = MicroBatches(batches()), iter(batches())
    refusal = r"list_iterator is not replayable.*micro-batch for a streaming"
    with pytest.raises(RuntimeError, match=refusal), replayed([iterator, stream]):
        pytest.fail("the body must not run")
    assert len(list(stream)) == 3


def test_position_outside_the_step():
    with pytest.raises(ValueError, match="position must be between 0 and 3, got 4"):
        MicroBatches(batches()).restore_position(4)


def check(first, second):
    passes = ReplayCheck()
    for second_pass, seen in enumerate((first, second)):
        for made in seen:
            (passes.record_second if second_pass else passes.record_first)(made)
    passes.verify()


def test_same_tokens_pass():
    check(batches(), batches())
    check([], [])


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens: tokens.flip(0),
        lambda tokens: tokens + (torch.arange(tokens.numel()) == 2),
        lambda tokens: torch.cat([tokens[1:2], tokens[:1], tokens[2:]]),
    ],
    ids=["reversed", "one token", "two swapped"],
)
def test_other_tokens_are_noticed(change):
    second = batches()
    second[1] = dataclasses.replace(second[1], tokens=change(second[1].tokens))
    with pytest.raises(RuntimeError, match="micro-batch 1 of the training pass holds other tokens"):
        check(batches(), second)


def test_other_order_and_other_number_of_micro_batches_are_noticed():
    with pytest.raises(RuntimeError, match="micro-batch 0 of the training pass"):
        check(batches(), batches()[::-1])
    with pytest.raises(RuntimeError, match="saw 3 micro-batches and the training pass 2"):
        check(batches(), batches()[:2])
