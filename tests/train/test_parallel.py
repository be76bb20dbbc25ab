"""Ranks that agree on an error: real processes over Gloo, in two grids of two groups each."""

import pytest
import torch.distributed as dist

from p3o_train.parallel import ParallelGroups, agree, check_equal_counts, raise_together, together
from tests.distributed.ranks import on_all_ranks

GIVEN_UP = "this optimizer step was given up before anything moved: "
ALONE = ParallelGroups()


def grids():
    """Ranks 0 and 1 are the first stage, 2 and 3 the last; those of a stage are replicas, or shards of one model."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    return (
        ParallelGroups(data_context=inside[rank // 2], pipeline=stages[rank % 2]),
        ParallelGroups(tensor=inside[rank // 2], pipeline=stages[rank % 2]),
    )


def outcome(action):
    """Type, text and cause of what ``action`` raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), repr(error.__cause__)
    return None


def failing_together(groups, failure):
    with together(groups, "cpu"):
        if failure is not None:
            raise failure


def every_agreement(rank):
    found = []
    for groups in grids():
        for failing in range(4):
            failure = LookupError(f"of {rank}") if rank == failing else None
            found.append((failing, outcome(lambda groups=groups, failure=failure: agree(failure, groups, "cpu"))))
            found.append((failing, outcome(lambda groups=groups, failure=failure: failing_together(groups, failure))))
    first, second = grids()
    several = {1: ValueError("one"), 2: LookupError("two")}.get(rank)
    return {
        "one": found,
        "two": [outcome(lambda groups=groups: agree(several, groups, "cpu")) for groups in (first, second)],
        "none": outcome(lambda: agree(None, first, "cpu")),
        "nobody knows": outcome(lambda: raise_together(None, first)),
        "equal": outcome(lambda: check_equal_counts(3, first, "cpu")),
        "counts": [
            outcome(lambda groups=groups, odd=odd: check_equal_counts(7 if rank == odd else 3, groups, "cpu"))
            for groups in (first, second)
            for odd in range(4)
        ],
    }


@pytest.fixture(scope="module")
def ranks():
    return on_all_ranks(every_agreement, 4)


@pytest.mark.host_only
def test_failure_of_one_rank_stays_there(ranks):
    for rank, made in enumerate(ranks):
        assert len(made["one"]) == 16
        for failing, (kind, text, cause) in made["one"]:
            assert (kind, text) == ("RuntimeError", f"{GIVEN_UP}rank {failing} raised LookupError: of {failing}")
            assert cause == (repr(LookupError(f"of {failing}")) if rank == failing else "None")


@pytest.mark.host_only
def test_two_failures_are_two_errors(ranks):
    """Replicas look for the first one, then stages, then shards. A ValueError stays one."""
    one = ("ValueError", f"{GIVEN_UP}rank 1 raised ValueError: one")
    two = ("RuntimeError", f"{GIVEN_UP}rank 2 raised LookupError: two")
    for made in ranks:
        assert [(kind, text) for kind, text, _ in made["two"]] == [one, two]
    # each rank chains its own
    assert [made["two"][0][2] for made in ranks] == ["None", "ValueError('one')", "LookupError('two')", "None"]


@pytest.mark.host_only
def test_agreement_without_a_failure(ranks):
    assert [made["none"] for made in ranks] == [None] * 4
    assert {made["nobody knows"][:2] for made in ranks} == {("RuntimeError", f"{GIVEN_UP}a rank failed")}


@pytest.mark.host_only
def test_another_number_of_micro_batches_is_seen_by_its_own_groups_only(ranks):
    assert [made["equal"] for made in ranks] == [None] * 4
    (same,) = {found for made in ranks for found in made["counts"]}
    assert same[0] == "ValueError" and "the same number of micro-batches, but one has 3 and another 7;" in same[1]


def test_one_process_agrees_with_itself():
    agree(None, ALONE, "cpu")
    check_equal_counts(2, ALONE, "cpu")
    failure = KeyError("alone")
    with pytest.raises(RuntimeError, match="rank 0 raised KeyError: 'alone'") as caught, together(ALONE, "cpu"):
        raise failure
    assert caught.value.__cause__ is failure


def test_interrupts_wait_for_nobody(monkeypatch):
    monkeypatch.setattr("p3o_train.parallel.agree", lambda *_: pytest.fail("no agreement was due"))
    with pytest.raises(KeyboardInterrupt), together(ALONE, "cpu"):
        raise KeyboardInterrupt


def test_broken_groups_hide_the_failure(monkeypatch):
    def broken(*_):
        raise RuntimeError("connection closed")

    monkeypatch.setattr("p3o_train.parallel._largest_anywhere", broken)
    failure = LookupError("mine")
    text = "rank 0 raised LookupError: mine; the other ranks were not there to be told of it: connection closed"
    with pytest.raises(RuntimeError, match=text) as caught:
        agree(failure, ALONE, "cpu")
    assert caught.value.__cause__ is failure
    with pytest.raises(RuntimeError, match=r"^connection closed$"):
        agree(None, ALONE, "cpu")
