"""When a rank that fails joins the others in the gradient finalizer's check, and what it leaves behind."""

from types import SimpleNamespace

import pytest
import torch

from p3o_train.parallel import ParallelGroups
from p3o_train.step import CheckedFinalizer

ALONE = ParallelGroups()
JOINED = r"given up before anything moved: rank 0 raised KeyError: 'mine'"


class Finalizer:
    """Megatron's side: its function, and whether it was called."""

    def __init__(self, failure=None):
        self.failure, self.calls = failure, 0
        self.config = SimpleNamespace(finalize_model_grads_func=self.finalize)

    def finalize(self, model, num_tokens):
        self.calls += 1
        if self.failure is not None:
            raise self.failure


class Chunk:
    def __init__(self, overlap):
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=overlap)
        self.finished = 0

    def finish_grad_sync(self):
        self.finished += 1


def checked(megatron, catch_up=None, invalid_tokens=lambda: None):
    return CheckedFinalizer(megatron.config, ALONE, invalid_tokens, "cpu", catch_up)


def test_failing_rank_leaves_the_others_in_the_check():
    megatron, caught_up, mine = Finalizer(), [], KeyError("mine")
    with (
        pytest.raises(RuntimeError, match=JOINED) as raised,
        checked(megatron, lambda: not caught_up.append(None)),
    ):
        raise mine
    assert raised.value.__cause__ is mine and caught_up == [None]
    assert megatron.calls == 0 and megatron.config.finalize_model_grads_func == megatron.finalize


@pytest.mark.parametrize("catch_up", [None, lambda: False])
def test_rank_joins_where_it_cannot_catch_up(catch_up):
    megatron, mine = Finalizer(), KeyError("mine")
    with pytest.raises(KeyError) as raised, checked(megatron, catch_up):
        raise mine
    assert raised.value is mine and megatron.config.finalize_model_grads_func == megatron.finalize


def test_interrupted_rank_waits_for_the_others():
    with pytest.raises(KeyboardInterrupt), checked(Finalizer(), lambda: pytest.fail("it was about to join")):
        raise KeyboardInterrupt


@pytest.mark.parametrize("inside", [True, False], ids=["in the finalizer", "after it"])
def test_rank_joins_after_the_check(inside):
    """The others have left it: one of them would wait forever."""
    mine = KeyError("mine")
    megatron = Finalizer(mine if inside else None)
    with pytest.raises(KeyError) as raised, checked(megatron, lambda: pytest.fail("it was about to join")):
        megatron.config.finalize_model_grads_func([], torch.tensor(3))
        raise mine
    assert raised.value is mine and megatron.calls == 1


def test_failure_before_the_check_is_kept_to_the_rank():
    megatron, mine = Finalizer(), KeyError("mine")

    def failing():
        raise mine

    with pytest.raises(RuntimeError, match=JOINED) as raised, checked(megatron, None, failing):
        megatron.config.finalize_model_grads_func([], torch.tensor(3))
    assert raised.value.__cause__ is mine and megatron.calls == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_sums_under_way_are_forgotten(overlap):
    megatron, chunks = Finalizer(), [Chunk(overlap), Chunk(overlap)]
    with checked(megatron):
        megatron.config.finalize_model_grads_func(chunks, torch.tensor(3))
        assert [chunk.finished for chunk in chunks] == [0, 0]  # that is the finalizer's own affair
        with pytest.raises(RuntimeError, match="no valid response tokens"):
            megatron.config.finalize_model_grads_func(chunks, torch.tensor(0))
    assert [chunk.finished for chunk in chunks] == [int(overlap)] * 2
