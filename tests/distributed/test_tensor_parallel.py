"""The vocabulary cut over real Gloo processes, against one process that holds all of it.

Two ranks and four start once each and run everything; the tests look at what came back.
"""

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from ranks import on_all_ranks
from vocabulary_cases import (
    CASES,
    DATA_ROWS,
    INTERPRETED,
    OPS,
    SHARDED,
    TOKENS,
    WIDTH,
    everything,
    problem,
    run,
    some_rows,
)

from p3o_kernels import reference

pytestmark = pytest.mark.host_only


class World(NamedTuple):
    ranks: int
    answers: list[dict[str, Any]]


@pytest.fixture(scope="module")
def two():
    """With Triton's interpreter: the cases that name the kernels run there as well."""
    return World(2, on_all_ranks(everything, 2, 2, interpret=True))


@pytest.fixture(scope="module")
def four():
    return World(4, on_all_ranks(everything, 4, 4))


@pytest.fixture(params=["two", "four"])
def world(request):
    return request.getfixturevalue(request.param)


@functools.cache
def dense(case, op, ranks, part=None):
    """(float64, the dtype of the case) of the reference in one process, which holds all tokens or a part of them."""
    made = problem(case, ranks)
    made = made if part is None else some_rows(made, DATA_ROWS[part])
    made.tokens["hidden"] = made.tokens["hidden"].nan_to_num(0.0)  # 0 * NaN: dW of the reference reads masked rows
    return run(reference, op, made, torch.float64), run(reference, op, made)


def joined(answers, key, name):
    """A tensor of the whole vocabulary, put together from its shards."""
    parts = [answer[key][name] for answer in answers]
    return torch.cat(parts, 1 if name == "d logits" else 0) if name in SHARDED else parts[0]


def assert_as_exact_as_eager(value, truth, eager, what, roundings=16):
    """At most 1.5 times the largest error of eager PyTorch, or ``roundings`` of the largest value."""
    assert value.shape == truth.shape, what
    unit = torch.finfo(value.dtype).eps / 2 if value.dtype != torch.float64 else 2**-24
    value, truth, eager = value.double(), truth.double(), eager.double()
    if what[-1] in ("loss", "metrics"):  # terms near 1 cancel: measured against their mean or sum without the signs
        size = truth.abs() + (1 if what[-1] == "loss" else TOKENS)
        value, truth, eager = value / size, truth / size, eager / size
        largest = 1.0
    else:
        largest = torch.where(truth.isfinite(), truth, 0.0).abs().amax().item()
    error, bound = (torch.where(made == truth, 0.0, (made - truth).abs()).amax().item() for made in (value, eager))
    assert error <= max(1.5 * bound, roundings * unit * largest), what


def assert_equals_dense(world, backend, case, op):
    truth, eager = dense(case, op, world.ranks)
    # half precision: the part of d(hidden) of each rank is rounded, and so is each sum of two, as in Megatron
    roundings = 2 * world.ranks if case == "bfloat16" else 16
    for name in truth.keys() - {"calls"}:
        value = joined(world.answers, (backend, case, op, 1), name)
        assert_as_exact_as_eager(value, truth[name], eager[name], (backend, case, op, name), roundings)


def same_bits(first, second):
    """NaN included."""
    return first.dtype == second.dtype and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (first, second)))


def first_runs(world):
    return [key for key in world.answers[0] if len(key) == 4 and key[3] == 1]


@pytest.mark.parametrize("case", CASES)
def test_cutting_the_vocabulary_changes_a_value_or_gradient(world, case):
    for op in CASES[case]:
        assert_equals_dense(world, "eager", case, op)


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernels_on_a_shard_change_a_value_or_gradient(two, case):
    for op in INTERPRETED[case]:
        assert_equals_dense(two, "triton", case, op)


def test_ranks_or_runs_differ_by_a_bit(world):
    found, (first, *others) = [], world.answers
    for key in first_runs(world):
        for name in first[key].keys() - {"calls"}:
            again = [same_bits(answer[key][name], answer[(*key[:3], 2)][name]) for answer in world.answers]
            equal = [name in SHARDED or same_bits(first[key][name], other[key][name]) for other in others]
            found += [] if all(again + equal) else [(key, name, again, equal)]
    assert found == []


def expected_calls(op, tokens=TOKENS):
    backward = [("all_reduce", tokens * WIDTH)] if "hidden" in op else []
    return {"forward": [("all_gather", 4 * tokens + 1)], "backward": backward}


def test_a_collective_too_many_or_too_few(world):
    """16 bytes a row and the size of the shard forward; d(hidden) backward."""
    for answer, key in itertools.product(world.answers, first_runs(world)):
        assert answer[key]["calls"] == expected_calls(key[2]), key
    for answer in world.answers:
        assert answer["frozen weight"]["calls"] == expected_calls("hidden")
        assert answer["frozen hidden"]["calls"] == expected_calls("logits")


def test_gradient_of_hidden_is_left_unreduced_or_reduced_twice(world):
    """Summed over the ranks once, like that of Megatron's ColumnParallelLinear: the caller must not do it again."""
    truth, eager = dense("plain", "hidden", world.ranks)
    for answer in world.answers:
        for key in ("megatron", ("eager", "plain", "hidden", 1)):
            assert_as_exact_as_eager(answer[key]["d hidden"], truth["d hidden"], eager["d hidden"], key)


def test_freezing_one_input_changes_the_gradient_of_another(world):
    for key, frozen in (("frozen weight", "d weight"), ("frozen hidden", "d hidden")):
        for answer in world.answers:
            usual = answer["eager", "plain", "hidden", 1]
            assert answer[key][frozen] is None
            for name in usual.keys() - {frozen, "calls"}:
                assert same_bits(answer[key][name], usual[name]), (key, name)


def test_main_grad_loses_a_micro_batch(world):
    """Two passes over bfloat16 inputs add to what it held, in float32; the weight itself gets no gradient."""
    truth, eager = dense("bfloat16", "hidden", world.ranks)
    main_grad = torch.cat([answer["main_grad"]["main_grad"] for answer in world.answers])
    assert all(answer["main_grad"]["d weight"] is None for answer in world.answers)
    twice = (0.5 + 2 * grads["d weight"].double() for grads in (truth, eager))
    assert_as_exact_as_eager(main_grad, *twice, ("main_grad",))
    hidden = [2 * grads["d hidden"].double() for grads in (truth, eager)]
    assert_as_exact_as_eager(
        world.answers[0]["main_grad"]["d hidden"], *hidden, ("main_grad", "d hidden"), 4 * world.ranks
    )


def test_memory_options_change_a_result(world):
    for option, case, op in (
        ("valid_tokens", "masked rows of NaN", "hidden, loss"),
        ("in place", "plain", "logits, loss"),
    ):
        for answer in world.answers:
            for name in answer[option].keys() - {"calls"}:
                assert same_bits(answer[option][name], answer["eager", case, op, 1][name]), (option, name)


@pytest.mark.parametrize("op", OPS)
def test_shards_of_different_sizes_are_silently_wrong(world, op):
    for answer in world.answers:
        made = answer["unequal", op]
        for name in made.keys() - {"calls", "metrics", "ess"}:
            assert made[name].isnan().all(), name
        if "loss" in op:
            assert answer["unequal, refused", op].startswith("invalid data on 23 of 23 valid tokens")
        assert answer["usable"] == world.ranks


@pytest.mark.parametrize("op", [name for name in OPS if "loss" in name])
@pytest.mark.parametrize("case", ["NaN on the last shard", "label at -inf", "label outside"])
def test_bad_data_on_one_rank_leaves_the_others_waiting(world, case, op):
    texts = {answer[case, op] for answer in world.answers}
    assert len(texts) == 1 and texts.pop().startswith("invalid data on ")


@pytest.mark.parametrize("op", ["logits, loss", "hidden, loss"])
def test_e_is_reduced_over_the_wrong_ranks(four, op):
    grid, (truth, eager) = four.answers, dense("plain", op, 2)
    assert all(same_bits(answer["grid", op]["ess"], grid[0]["grid", op]["ess"]) for answer in grid)
    for name in truth.keys() - {"calls"}:
        parts = [joined(grid[first : first + 2], ("grid", op), name) for first in (0, 2)]
        if name in ("d logits", "d hidden"):
            value = torch.cat(parts)
        else:
            value = parts[0] if name == "ess" else parts[0] + parts[1]
        if name != "metrics":  # they hold N and e of one rank; test_process_group reduces them
            assert_as_exact_as_eager(value, truth[name], eager[name], ("grid", op, name))
    for rank, answer in enumerate(grid):
        for name in truth.keys() - {"calls", *SHARDED}:
            assert same_bits(answer["grid", op][name], grid[rank // 2 * 2]["grid", op][name]), name
        assert len(answer["grid", op]["calls"]["forward"]) == 2
        assert answer["grid, NaN", op].startswith("invalid data on ")


@pytest.mark.parametrize("op", ["logits, loss", "hidden, loss"])
def test_a_rank_without_tokens_leaves_the_others_waiting(four, op):
    """Its loss is a 0 that backward goes through, its gradients are exact zeros, and e is that of the others."""
    grid, (truth, eager) = four.answers, dense("plain", op, 2, 1)
    for rank, answer in enumerate(grid):
        made = answer["grid, no token", op]
        assert_as_exact_as_eager(made["ess"], truth["ess"], eager["ess"], ("ess",))
        assert len(made["calls"]["forward"]) == 2
        assert made["calls"]["backward"] == expected_calls(op, 14 if rank < 2 else 9)["backward"]
        for name in made.keys() - {"calls", "metrics", "ess"}:
            if rank < 2:
                assert not made[name].any(), name
    for name in truth.keys() - {"calls", "metrics"}:
        assert_as_exact_as_eager(joined(grid[2:], ("grid, no token", op), name), truth[name], eager[name], (op, name))
