"""Relax's scaling end to end, over Gloo: dynamic context parallelism and dummies."""

import pytest
import torch
from problem import check_gradient, log_probs, responses, truth, weight
from slime_driver import TEMPERATURE, arguments, batch_of, own, relax_ranks

from p3o_train.adapters import relax
from p3o_train.adapters._slime_family import Outputs, local_mask
from p3o_train.types import ContextLayout
from tests.distributed.ranks import on_all_ranks
from tests.megatron.topologies import NEEDS_MEGATRON

# samples of each micro-batch index, over both context-parallel ranks
PARTS = ((0, 1), (2, 3), (4, 5))


@pytest.mark.host_only
@NEEDS_MEGATRON
def test_gradients_are_those_of_the_whole_batch():
    whole = truth(responses(None, TEMPERATURE), None, TEMPERATURE)
    for in_parts, in_step in on_all_ranks(relax_ranks, 2, whole.contexts[0]):
        check_gradient(in_parts, truth(responses(None, TEMPERATURE), PARTS, TEMPERATURE))
        check_gradient(in_step, whole)


def test_step_scope_without_a_published_context_is_refused():
    with pytest.raises(RuntimeError, match=r"p3o_train.adapters.relax.publish\(context\)"):
        relax.p3o_loss_function(arguments("step"), batch_of(responses(), 1, 0), torch.zeros(1, 1, 1), None)


def test_what_was_published_is_gone_after_the_step():
    relax.publish(truth(responses()).contexts[0])
    relax.withdraw()
    with pytest.raises(RuntimeError, match="none was published"):
        relax.p3o_loss_function(arguments("step"), batch_of(responses(), 1, 0), torch.zeros(1, 1, 1), None)


@pytest.mark.parametrize("cp", [1, 2])
def test_an_empty_sample_is_refused_where_it_is_counted_as_a_token(monkeypatch, cp):
    samples = responses(4)
    rows = [own(sample, log_probs(sample, weight()), cp, 0) for sample in samples]
    monkeypatch.setattr(relax, "_outputs", lambda *given: Outputs(rows, None, ContextLayout(cp, 0), None))
    args, batch = arguments("micro-batch"), batch_of(samples, cp, 0)
    if cp == 2:
        relax.p3o_loss_function(args, batch, torch.zeros(1, 1, 1), None)
        return
    with pytest.raises(ValueError, match=r"sample 4 of this micro-batch is empty.*drop such samples"):
        relax.p3o_loss_function(args, batch, torch.zeros(1, 1, 1), None)


def test_padded_lengths_move_the_cut():
    """Eleven tokens of which seven are response, padded to 16 on two ranks."""
    batch = {
        "total_lengths": [11],
        "response_lengths": [7],
        "loss_masks": [torch.tensor([1, 1, 1, 0, 1, 1, 1])],
        "padded_total_lengths": [16],
    }
    # rank 0 holds rows 0-3 and 12-15, of which row 3 predicts the first response token
    assert local_mask(batch, ContextLayout(2, 0)).tolist() == [True]
    assert local_mask(batch, ContextLayout(2, 1)).tolist() == [True, True, False, True, True, True]
    assert local_mask(batch | {"__is_dummy__": True}, ContextLayout(2, 1)).tolist() == [False] * 6
    # without padding rank 0 holds rows 0-2 and 9-11, of which row 9 predicts the last one
    assert local_mask(batch | {"padded_total_lengths": None}, ContextLayout(2, 0)).tolist() == [True]
    equal = batch | {"padded_total_lengths": None, "max_seq_lens": [15]}
    assert local_mask(equal, ContextLayout(2, 1)).tolist() == [True, True, False, True, True, True]
