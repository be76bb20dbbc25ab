"""The contract as a whole: what it declares, what it reports, and what a batch costs."""

import sys

import pytest
import torch

from p3o_train.contract import Contract, ContractViolation, check_response
from p3o_train.types import Sample
from tests.train.recordings import SCALED, VOCAB, answer, check, refuses, sampled


def test_ids_outside_the_vocabulary():
    refuses("token_ids[3] is 50, ids are in [0, 50)", response=(7, 50, 9))
    refuses("token_ids[2] is -1", response=(-1, 8, 9), mask=[0, 1, 1])
    for tokens in ((7, 8, 50), (7, 8, -1)):
        with pytest.raises(ContractViolation, match=r"token_ids\[2\] is"):
            check_response(*answer(tokens), SCALED)
    with pytest.raises(ContractViolation, match=r"prompt_ids\[1\] is 2, ids are in \[0, 2\)"):
        check_response(*answer((0, 1, 1)), Contract("scaled", 1.0, 2))
    with pytest.raises(ContractViolation, match="loss_mask has 2 entries for 3 response tokens and 3 log-probs"):
        check_response(*answer(), SCALED, loss_mask=[1, 1])


def test_a_recording_is_needed_but_of_dummies():
    sample = Sample.from_lists([1, 2, 3], 1, [-1.0], sample_id="b")
    with pytest.raises(ContractViolation, match="sample 'b': recording is missing"):
        check(sample)
    dummy = Sample("d", torch.tensor([1]), 0, torch.zeros(0), torch.zeros(0).bool(), is_dummy=True)
    assert check(dummy).samples == check().samples == 0


def test_the_first_violations_of_all_are_shown():
    bad = [sampled(log_probs=[-1.0, -1.0, 0.5], sample_id=f"s{index}", version=10) for index in range(4)]
    with pytest.raises(ContractViolation) as error:
        check(*bad, sampled())
    text = str(error.value)
    assert text.startswith("8 violations of the behavior log-prob contract:\n")
    assert [f"'s{index}'" in text for index in range(4)] == [True, True, True, False]
    assert text.endswith("and 3 more")
    with pytest.raises(ValueError, match=r"^1 violation of"):
        check(sampled(version=10))


def test_convention():
    assert Contract(None, 1.0, VOCAB).trainer_temperature == 1
    values = {name: Contract(name, 0.6, VOCAB) for name in ("scaled", "mismatch", "raw")}
    assert [contract.trainer_temperature for contract in values.values()] == [0.6, 1.0, 1.0]
    assert [contract.log_prob_kind for contract in values.values()] == ["scaled", "scaled", "raw"]
    with pytest.raises(ValueError, match=r"convention must be one of .* at temperature 0\.6, got None"):
        Contract(None, 0.6, VOCAB)
    with pytest.raises(ValueError, match="or None, got 'guess'"):
        Contract("guess", 1.0, VOCAB)
    with pytest.raises(ValueError, match="vocab_size must be >= 1, got 0"):
        Contract("scaled", 1.0, 0)
    # at temperature 1 raw and scaled are the same numbers
    for name in (None, "scaled", "mismatch", "raw"):
        check(sampled(log_prob_kind="raw"), sampled(), contract=Contract(name, 1.0, VOCAB))
    cool = {"temperature": 0.6, "top_p": 0.9, "log_prob_kind": "truncated", "kept_token_ids": ((7,), (8, 1), (9,))}
    check(sampled(**cool), contract=values["scaled"])
    check(sampled(**cool), contract=values["mismatch"])
    refuses("needs 'raw'", contract=values["raw"], **cool)


def test_numbers_for_a_log():
    report = check(sampled(mask=[1, 1, 0]), version=2)
    numbers = report.to_dict("x/")
    assert numbers["x/valid_tokens"] == 2.0 and numbers["x/age_mean"] == 2.0
    assert {type(value) for value in numbers.values()} == {float}


def lines_executed(function):
    """Lines of Python that a call runs through, loops counted as often as they turn."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_nothing_loops_over_tokens():
    """A batch has millions of them: a response of 3000 tokens takes as many lines of Python as one of 30."""

    def batch(length):
        log_probs = -torch.linspace(0.1, 1.7, length)
        return [sampled([3 + index] * length, log_probs, group_id=index // 2, version=1) for index in range(4)]

    short, long = batch(30), batch(3000)
    assert lines_executed(lambda: check(*short)) == lines_executed(lambda: check(*long)) > 100
