"""Packed attention in one process, all context-parallel ranks in turn, against a loop over tokens and heads."""

from types import SimpleNamespace

import pytest
import torch

from p3o_train.layout import owned_positions
from p3o_train.packed_attention import PackedAttention, packed_attention, packed_seq_params
from p3o_train.packing import pack
from p3o_train.types import ContextLayout, Sample

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTHS = (1, 5, 8, 11)


def problem(padded):
    """Query, key and value of whole padded sequences, in float64."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(padded), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def by_loops(query, key, value, padded, lengths):
    """Equation (1), one token and head at a time."""
    rows = [query.new_zeros(HEADS, DIM) for _ in range(len(query))]
    begin = 0
    for whole, length in zip(padded, lengths, strict=True):
        for token in range(length):
            scope = slice(begin, begin + token + 1)
            heads = [
                (key[scope, head // 2] @ query[begin + token, head] / DIM**0.5).softmax(0) @ value[scope, head // 2]
                for head in range(HEADS)
            ]
            rows[begin + token] = torch.stack(heads)
        begin += whole
    return torch.stack(rows)


def on_ranks(query, key, value, padded, lengths, cp_size):
    """The outputs of all ranks, back in the order of the sequences."""
    owned = [owned_positions(padded, ContextLayout(cp_size=cp_size, cp_rank=rank)) for rank in range(cp_size)]
    keys, values = ([whole[index] for index in owned] for whole in (key, value))
    outputs = [packed_attention(query[index], keys, values, padded, lengths, rank) for rank, index in enumerate(owned)]
    return torch.cat(outputs)[torch.cat(owned).argsort()]


def padded_to(cp_size):
    return [ContextLayout(cp_size=cp_size).padded_length(length) for length in LENGTHS]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_values_and_gradients_match_a_loop(cp_size):
    padded = padded_to(cp_size)
    results = []
    for function, arguments in ((on_ranks, (cp_size,)), (by_loops, ())):
        inputs = [part.requires_grad_() for part in problem(padded)]
        output = function(*inputs, padded, LENGTHS, *arguments)
        output.backward(torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape))
        results.append([output.detach(), *(part.grad for part in inputs)])
    for value, truth in zip(*results, strict=True):
        # float64: sums of at most eleven terms in another order
        torch.testing.assert_close(value, truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_padding_reaches_nobody(cp_size):
    padded, results = padded_to(4), []
    real = torch.cat([torch.arange(whole) < length for whole, length in zip(padded, LENGTHS, strict=True)])
    for filler in (0.0, float("nan"), float("inf")):
        inputs = [part.masked_fill(~real[:, None, None], filler).requires_grad_() for part in problem(padded)]
        output = on_ranks(*inputs, padded, LENGTHS, cp_size)
        output.sum().backward()
        results.append([output.detach(), *(part.grad for part in inputs)])
    for parts in zip(*results, strict=True):
        assert all(torch.equal(part, parts[0]) for part in parts)
        assert not parts[0][~real].any()


def test_a_rank_with_only_padding_stays_in_the_graph():
    """Otherwise it would miss the backward pass of the gather, and the other ranks would wait for it."""
    query, key, value = (part.requires_grad_() for part in problem([2]))
    output = packed_attention(query, [key] * 4, [value] * 4, [8], [1], cp_rank=1)
    assert not output.any()
    output.sum().backward()
    assert key.grad is not None and value.grad is not None


def test_an_uneven_length_is_refused():
    query, key, value = problem([6])
    with pytest.raises(ValueError, match="multiple of 4"):
        packed_attention(query, [key] * 2, [value] * 2, [6], [6])


def module(**options):
    config = SimpleNamespace(**({"attention_dropout": 0.0, "window_size": None, "softmax_type": "vanilla"} | options))
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return PackedAttention(config=config, pg_collection=SimpleNamespace(cp=group), layer_number=1)


@pytest.mark.parametrize("option", [{"attention_dropout": 0.1}, {"window_size": (4, 0)}, {"softmax_type": "learnable"}])
def test_attention_it_does_not_compute_is_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        module(**option)


def test_batches_that_are_not_packed_are_refused():
    query, key, value = problem([4])
    with pytest.raises(ValueError, match="packed_seq_params"):
        module()(query, key, value, None)
    packed = SimpleNamespace(qkv_format="thd")
    with pytest.raises(ValueError, match="causal"):
        module()(query, key, value, torch.ones(4, 4), packed_seq_params=packed)


def test_only_zigzag_batches_go_into_the_model():
    sample = Sample.from_lists([1, 2, 3, 4], 2, [0.0, 0.0])
    batch = pack([sample], [1.0], ContextLayout(cp_size=2, order="contiguous"))
    with pytest.raises(ValueError, match="contiguous"):
        packed_seq_params(batch)
