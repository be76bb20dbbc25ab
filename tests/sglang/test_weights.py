"""Weight changes on a real server, in the middle of responses."""

import time

import pytest

from p3o_train.recording import Sampling
from p3o_train.sglang_client import ServerError
from tests.sglang.reference import largest_difference, log_probs, make_requests
from tests.sglang.test_requests import LONG, MIDWAY_S, in_background

# two float32 implementations, 600 tokens deep
ROUNDING = 1e-3


def change_in_the_middle(engine, server, models, requests):
    """Responses that both models sampled: (request, response, index of the first token of the second)."""
    thread, outcome = in_background(lambda: engine.generate(requests, LONG))
    server.wait_for(len(requests))
    time.sleep(MIDWAY_S)
    engine.update_weights(models[1].state_dict(), 7)
    thread.join()
    mixed = []
    for request, response in zip(requests, outcome[0], strict=True):
        (old, _, cut), (new, start, end) = response.recording.version_spans
        assert (old, new, start, end) == (0, 7, cut, LONG.max_new_tokens)
        mixed.append((request, response, cut))
    return mixed


def test_d18_retracted_responses_go_on_with_keys_and_values_of_the_new_weights(engine, server, models):
    for request, response, cut in change_in_the_middle(engine, server, models, make_requests((3, 30, 90))):
        old, new = (log_probs(model, request, response) for model in models)
        assert largest_difference(old, response, slice(None, cut)) < ROUNDING
        assert largest_difference(new, response, slice(cut, None)) < ROUNDING
        assert response.recording.pause_mode == "retract"


def test_d18_in_place_responses_go_on_with_old_keys_and_values_and_nobody_else_does(make_engine, server, models):
    engine = make_engine(server.url, pause_mode="in_place")
    engine.update_weights(models[0].state_dict(), 0)
    requests = make_requests((3, 30, 90))
    for request, response, cut in change_in_the_middle(engine, server, models, requests):
        assert largest_difference(log_probs(models[0], request, response), response, slice(None, cut)) < ROUNDING
        # far more than any rounding: the keys and values are those of other weights
        assert largest_difference(log_probs(models[1], request, response), response, slice(cut, None)) > 0.1
        assert response.recording.pause_mode == "in_place"
    for request, response in zip(requests, engine.generate(requests, Sampling(max_new_tokens=4)), strict=True):
        assert largest_difference(log_probs(models[1], request, response), response) < ROUNDING


def test_abort_mode_ends_responses_at_the_change(make_engine, server, models):
    engine = make_engine(server.url, pause_mode="abort")
    engine.update_weights(models[0].state_dict(), 0)
    requests = make_requests((3, 30))
    thread, outcome = in_background(lambda: engine.generate(requests, LONG))
    server.wait_for(len(requests))
    time.sleep(MIDWAY_S)
    engine.update_weights(models[1].state_dict(), 1)
    thread.join()
    for request, response in zip(requests, outcome[0], strict=True):
        assert response.recording.finish_reason == "abort"
        assert response.recording.version_spans == ((0, 0, len(response.token_ids)),)
        assert largest_difference(log_probs(models[0], request, response), response) < ROUNDING


def test_d20_change_flushes_the_cache_and_ends_no_response(engine, server, models):
    requests = make_requests((100, 100))
    thread, outcome = in_background(lambda: engine.generate(requests, LONG))
    server.wait_for(len(requests))
    time.sleep(MIDWAY_S)
    engine.update_weights(models[1].state_dict(), 3)
    thread.join()
    assert [response.recording.finish_reason for response in outcome[0]] == ["length", "length"]
    engine.update_weights(models[0].state_dict(), 4)
    asked = server.post("/generate", input_ids=requests[0].prompt_ids, sampling_params={"max_new_tokens": 1})
    assert asked.json()["meta_info"]["cached_tokens"] == 0
    assert asked.json()["meta_info"]["weight_version"] == "4"


def test_only_the_newest_weights_stay_on_disk(engine, models, tmp_path):
    for version in (1, 2):
        engine.update_weights(models[0].state_dict(), version)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-2"]


def test_refused_weights_are_reported_and_sampling_goes_on(engine, make_engine, server, models):
    # not a name of weights: the server finds none
    broken = make_engine(server.url, save=lambda directory, weights: directory.mkdir())
    with pytest.raises(ServerError, match=r"did not change to weight version 5; .* none.*answered 400"):
        broken.update_weights({}, 5)
    (request,) = make_requests((3,))
    (response,) = engine.generate([request], Sampling(max_new_tokens=3))
    assert response.recording.version_spans == ((0, 0, 3),)
    assert largest_difference(log_probs(models[0], request, response), response) < ROUNDING
