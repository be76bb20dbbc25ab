"""Rollouts with an engine that answers by rule: order, files, failures, what is left out.

``CountingEngine`` stands in for a language model, which the real engines' own tests have.
"""

import dataclasses
import math
import threading

import pytest
import torch

from p3o_train.contract import Contract, ContractViolation
from p3o_train.engine import RolloutFailed
from p3o_train.recording import Recording, Response, Sampling, VersionSpan
from p3o_train.rollout_files import partial_rollouts, read_rollout, rollout_ids
from p3o_train.rollouts import EngineShare, Rollouts, RolloutSettings
from p3o_train.tasks import ReverseDigits
from tests.distributed.ranks import on_all_ranks

END, LOG_PROB = ReverseDigits.stop_token_ids[0], -0.5


class CountingEngine:
    """Answers with one digit, the seed modulo 10, and the end; its log-probs are all the same."""

    def __init__(self):
        self.version, self.asked, self.updates, self.closed = 0, [], [], False
        self.fails_at = None
        self.empty = set()
        self.gate = threading.Event()
        self.gate.set()

    def generate(self, requests, sampling):
        assert self.gate.wait(30)
        self.asked.append([request.sample_id for request in requests])
        made = {}
        for place, request in enumerate(requests):
            if request.sample_id == self.fails_at:
                raise RolloutFailed("http://host:1 does not answer", made)
            made[place] = self.answer(request, sampling)
        return [made[place] for place in range(len(requests))]

    def answer(self, request, sampling):
        tokens = () if request.sample_id in self.empty else (request.seed % 10, END)
        spans = (VersionSpan(self.version, 0, len(tokens)),) if tokens else ()
        reason = "stop" if tokens else "abort"
        recording = Recording("local", "1", sampling, "scaled", spans, reason)
        return Response(tokens, (LOG_PROB,) * len(tokens), recording)

    def update_weights(self, weights, version):
        self.updates.append(version)
        if version == 13:
            raise ValueError("weights of version 13 must be finite")
        self.version = version

    def close(self):
        self.closed = True


def settings(directory=None, **changes):
    sampling = Sampling(4, (END,))
    made = RolloutSettings(2, 3, sampling, sampling, Contract(None, 1.0, 16), seed=5, directory=directory)
    return dataclasses.replace(made, **changes)


def made(engine=None, **changes):
    engine = CountingEngine() if engine is None else engine
    return engine, Rollouts(ReverseDigits(), EngineShare(engine), settings(**changes))


def tokens(samples):
    return [sample.token_ids.tolist() for sample in samples]


def test_samples_of_a_rollout():
    engine, rollouts = made()
    engine.version = 4
    samples = rollouts.finish(4)
    prompts = ReverseDigits().prompts(4, 2)
    assert [sample.sample_id for sample in samples] == [f"rollout 4, response {index}" for index in range(6)]
    assert [sample.group_id for sample in samples] == [0, 0, 0, 1, 1, 1]
    for index, sample in enumerate(samples):
        prompt = prompts[index // 3]
        digit = sample.response_ids[0].item()
        assert sample.token_ids.tolist() == [*prompt.token_ids, digit, END]
        # one of three positions is right, or none; "d <end>" has no end where it belongs
        assert sample.reward == pytest.approx((digit == int(prompt.label[0])) / 3)
        assert sample.behavior_log_probs.tolist() == [LOG_PROB, LOG_PROB]
        assert sample.weight_versions.tolist() == [4, 4]
    assert len({sample.response_ids[0].item() for sample in samples}) > 2  # another seed for each


def test_seeds_depend_on_run_and_rollout_alone():
    first, again = made()[1], made()[1]
    assert tokens(first.finish(0)) == tokens(again.finish(0)) != tokens(again.finish(1))
    assert tokens(made(seed=6)[1].finish(0)) != tokens(first.finish(0))


def test_evaluation_has_its_own_prompts_and_sampling():
    cold = Sampling(4, (END,), temperature=0.01)  # which the contract of training would refuse
    engine, rollouts = made(evaluation=cold)
    prompts = ReverseDigits().evaluation_prompts(5)
    value = rollouts.evaluate(prompts)
    assert 0 <= value <= 1 / 3
    assert engine.asked == [[f"evaluation {index}" for index in range(5)]]
    assert rollouts.evaluate(prompts) == value


def test_rollouts_ahead_are_sampled_by_the_weights_of_their_turn(tmp_path):
    """However long anything takes: the engine is stopped until everything has been handed to it."""
    engine, rollouts = made(ahead=1, directory=tmp_path)
    engine.gate.clear()
    rollouts.begin(0)
    rollouts.begin(1)
    rollouts.update_weights({}, 1)
    rollouts.begin(2)
    rollouts.begin(2)
    engine.gate.set()
    versions = [rollouts.finish(index)[0].weight_versions[0].item() for index in range(3)]
    assert versions == [0, 0, 1]
    assert len(engine.asked) == 3
    rollouts.close()
    assert engine.closed


def test_weights_that_an_engine_refuses_stop_the_run(tmp_path):
    _, now = made()
    with pytest.raises(ValueError, match="version 13 must be finite"):
        now.update_weights({}, 13)
    _, rollouts = made(ahead=1, directory=tmp_path)
    rollouts.update_weights({}, 13)
    rollouts.begin(0)
    with pytest.raises(ValueError, match="version 13 must be finite"):
        rollouts.finish(0)
    rollouts.close()


def test_what_is_written_is_not_sampled_again(tmp_path):
    engine, rollouts = made(directory=tmp_path)
    samples = rollouts.finish(0)
    later, resumed = made(directory=tmp_path)
    again = resumed.finish(0)
    assert (len(engine.asked), later.asked) == (1, [])
    assert tokens(again) == tokens(samples) and [one.reward for one in again] == [one.reward for one in samples]
    assert [one.recording for one in again] == [one.recording for one in samples]


def test_settling_writes_what_is_under_way(tmp_path):
    engine, rollouts = made(ahead=2, directory=tmp_path)
    for rollout_id in range(3):
        rollouts.begin(rollout_id)
    first = rollouts.finish(0)
    rollouts.settle()
    assert rollout_ids(tmp_path) == [0, 1, 2]
    assert tokens(rollouts.finish(1)) == tokens(read_rollout(tmp_path, 1)[1]) != tokens(first)
    assert len(engine.asked) == 3
    rollouts.close()


def test_files_of_another_run_are_refused(tmp_path):
    made(directory=tmp_path)[1].finish(0)
    with pytest.raises(ValueError, match=r"rollout 0 in .* was written by a run with other settings"):
        made(directory=tmp_path, identity="other")[1].finish(0)


def test_a_failure_loses_nothing_that_was_finished(tmp_path):
    engine, rollouts = made(directory=tmp_path)
    engine.fails_at = "rollout 0, response 4"
    with pytest.raises(RolloutFailed, match=r"rollout 0: http://host:1 .*\(4 of 6 responses were finished; .*--resume"):
        rollouts.finish(0)
    assert rollout_ids(tmp_path) == [] and partial_rollouts(tmp_path) == [0]
    assert all(math.isnan(sample.reward) for sample in read_rollout(tmp_path, 0, partial=True)[1])
    later, resumed = made(directory=tmp_path)
    samples = resumed.finish(0)
    assert later.asked == [["rollout 0, response 4", "rollout 0, response 5"]]
    whole = made()[1].finish(0)
    assert tokens(samples) == tokens(whole)
    assert [sample.reward for sample in samples] == [sample.reward for sample in whole]


def test_a_failure_without_files_says_nothing_of_them():
    engine, rollouts = made()
    engine.fails_at = "rollout 0, response 0"
    with pytest.raises(RolloutFailed, match=r"\(0 of 6 responses were finished\)$"):
        rollouts.finish(0)


def test_a_response_without_tokens_belongs_to_no_group():
    engine, rollouts = made()
    engine.empty = {"rollout 0, response 1"}
    samples = rollouts.finish(0)
    assert [sample.is_dummy for sample in samples] == [False, True, False, False, False, False]
    assert samples[1].token_ids.tolist() == list(ReverseDigits().prompts(0, 2)[0].token_ids)
    assert not torch.cat([sample.valid_mask for sample in samples if sample.is_dummy]).any()


def test_rewards_that_failed_are_counted():
    class Failing(ReverseDigits):
        reward_failures = 3

    rollouts = Rollouts(Failing(), EngineShare(CountingEngine()), settings())
    rollouts.finish(0)
    assert rollouts.reward_failures == 3


def test_the_contract_is_checked_before_anything_is_written(tmp_path):
    engine, rollouts = made(directory=tmp_path)
    engine.version = 7  # weights that there are none of yet
    with pytest.raises(ContractViolation, match="rollout 0, response 0"):
        rollouts.finish(0)
    assert rollout_ids(tmp_path) == []


def a_rank(rank, directory, ahead):
    engine = CountingEngine()
    if rank == 1:
        engine.fails_at = "rollout 1, response 3"
    rollouts = Rollouts(ReverseDigits(), EngineShare(engine, rank, 2), settings(directory=directory, ahead=ahead))
    for rollout_id in (0, 1):
        rollouts.begin(rollout_id)
    samples = rollouts.finish(0)
    try:
        rollouts.finish(1)
    except RolloutFailed as failure:
        return tokens(samples), engine.asked, str(failure), sorted(failure.finished)
    finally:
        rollouts.close()
    return tokens(samples), engine.asked, "nothing was raised", []


@pytest.mark.host_only
@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_share_the_requests_and_the_failures(ahead, tmp_path):
    first, second = on_all_ranks(a_rank, 2, tmp_path, ahead)
    assert first[0] == second[0] == tokens(made()[1].finish(0))
    assert first[1][0] == [f"rollout 0, response {index}" for index in (0, 2, 4)]
    assert second[1][0] == [f"rollout 0, response {index}" for index in (1, 3, 5)]
    assert first[2] == second[2] and "rollout 1: http://host:1 does not answer (4 of 6" in first[2]
    assert first[3] == second[3] == [0, 1, 2, 4]
    assert partial_rollouts(tmp_path) == [1]
