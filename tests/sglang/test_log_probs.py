"""What a real server records is what transformers computes for the same tokens."""

import pytest
import torch

from p3o_train.recording import Sampling
from tests.sglang.reference import largest_difference, log_probs, logits, make_requests

# two float32 implementations of the same two layers, 300 tokens deep: 1.4e-5 was measured
ROUNDING = 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.2])
def test_log_probs_are_those_of_the_tempered_distribution(engine, models, temperature):
    requests = make_requests((1, 3, 17, 64, 300))
    responses = engine.generate(requests, Sampling(max_new_tokens=12, temperature=temperature))
    for request, response in zip(requests, responses, strict=True):
        assert len(response.token_ids) == 12
        assert largest_difference(log_probs(models[0], request, response, temperature), response) < ROUNDING
        record = response.recording
        assert (record.log_prob_kind, record.finish_reason, record.engine) == ("scaled", "length", "sglang")
        assert (record.version_spans, record.pause_mode) == (((0, 0, 12),), None)


def test_penalties_and_biases_are_inside_the_log_probs(engine, models):
    requests = make_requests((5,))
    sampling = Sampling(max_new_tokens=8, temperature=0.7, logit_bias={"9": 30.0})
    (response,) = engine.generate(requests, sampling)
    biased = logits(models[0], requests[0], response)
    biased[:, 9] += 30.0
    expected = (biased / 0.7).log_softmax(-1).gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
    assert set(response.token_ids) == {9}
    assert largest_difference(expected, response) < ROUNDING


def test_greedy_log_probs_are_raw(engine, models):
    requests = make_requests((5,))
    (response,) = engine.generate(requests, Sampling(max_new_tokens=8, temperature=0.0))
    raw = logits(models[0], requests[0], response).log_softmax(-1)
    assert tuple(raw.argmax(-1).tolist()) == response.token_ids
    assert response.recording.log_prob_kind == "raw"
    assert largest_difference(raw.amax(-1), response) < ROUNDING


def test_stop_token_belongs_to_the_response_with_its_log_prob(engine, models):
    requests = make_requests((4,) * 6)
    sampling = Sampling(max_new_tokens=200, stop_token_ids=tuple(range(0, 512, 8)))
    responses = engine.generate(requests, sampling)
    stopped = [response.recording.finish_reason == "stop" for response in responses]
    assert any(stopped)
    for request, response, stop in zip(requests, responses, stopped, strict=True):
        is_stop_token = [token % 8 == 0 for token in response.token_ids]
        assert is_stop_token == [False] * (len(is_stop_token) - 1) + [stop]
        assert largest_difference(log_probs(models[0], request, response), response) < ROUNDING


def test_truncated_log_probs_are_over_the_kept_tokens(engine, models):
    requests = make_requests((3, 40))
    sampling = Sampling(max_new_tokens=20, temperature=0.8, top_k=20, top_p=0.2)
    for request, response in zip(requests, engine.generate(requests, sampling), strict=True):
        scaled = logits(models[0], request, response) / 0.8
        kept = torch.zeros_like(scaled, dtype=torch.bool)
        for row, ids in enumerate(response.recording.kept_token_ids):
            kept[row, list(ids)] = True
        expected = scaled.masked_fill(~kept, -torch.inf).log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
        assert response.recording.log_prob_kind == "truncated"
        assert largest_difference(chosen, response) < ROUNDING
        assert (kept.sum(-1) <= 20).all() and (kept.sum(-1) < 20).any()
        least_kept = scaled.masked_fill(~kept, torch.inf).amin(-1)
        assert (least_kept > scaled.masked_fill(kept, -torch.inf).amax(-1) - ROUNDING).all()


def test_d04_top_p_without_top_k_is_refused_before_it_is_sent(engine):
    with pytest.raises(ValueError, match=r"top_k must be in \[2, 4096\], got -1"):
        engine.generate(make_requests((3,)), Sampling(max_new_tokens=2, top_p=0.9))
