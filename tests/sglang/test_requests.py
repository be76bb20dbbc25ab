"""What a real server takes, refuses and answers, beside the log-probs themselves."""

import dataclasses
import json
import threading
import time

import pytest

from p3o_train.engine import RolloutFailed
from p3o_train.recording import Request, Sampling
from p3o_train.sglang_wire import generate_body
from tests.sglang.reference import largest_difference, log_probs, make_requests
from tests.sglang.server import VOCABULARY, in_server_environment, running

LONG = Sampling(max_new_tokens=400)
# seconds after which a request that runs has tokens, but none has all of them, on any CPU
MIDWAY_S = 0.5
FIELDS = """
import dataclasses, json
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
print(json.dumps([[f.name for f in dataclasses.fields(GenerateReqInput)], list(SamplingParams.__struct_fields__)]))
"""


def in_background(call):
    """The thread, and the list that gets what ``call`` returns or raises."""
    outcome = []

    def run():
        try:
            outcome.append(call())
        except RolloutFailed as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_every_name_that_is_sent_exists_in_the_server():
    """It ignores a top-level name it does not know: a misspelt one would go unnoticed."""
    top_level, knobs = json.loads(in_server_environment(FIELDS).splitlines()[-1])
    body = generate_body(Request("", (1,), 0), LONG, rid="r", send_seed=True)
    assert set(body) - set(top_level) == set()
    assert set(body["sampling_params"]) - set(knobs) == set()
    ours = {field.name for field in dataclasses.fields(Sampling)} - {"other"}
    assert ours - set(body["sampling_params"]) == set()


def test_misspelt_knob_reaches_the_user_with_the_words_of_the_server(engine):
    with pytest.raises(RolloutFailed, match=r"answered 400.*unknown field `temp`"):
        engine.generate(make_requests((3,)), Sampling(max_new_tokens=2, other={"temp": 2.0}))


def test_wrong_ids_are_refused_before_they_are_sent_and_the_server_lives(engine, server):
    requests = [*make_requests((3,)), Request("wrong", (5, VOCABULARY), 0)]
    with pytest.raises(ValueError, match=r"'wrong'.*\[0, 512\), got 512 at position 1"):
        engine.generate(requests, Sampling(max_new_tokens=2))
    assert server.is_alive()


def test_response_that_the_server_would_cut_is_refused(engine, server):
    # asked directly it cuts: its cache holds 4096 tokens, two of them for itself
    asked = server.post("/generate", input_ids=[1] * 4080, sampling_params={"max_new_tokens": 100, "ignore_eos": True})
    assert asked.json()["meta_info"]["finish_reason"] == {"type": "length", "length": 14}
    with pytest.raises(ValueError, match=r"4080 prompt tokens and max_new_tokens 100 are 4180"):
        engine.generate(make_requests((4080,)), Sampling(max_new_tokens=100))


def test_d10_abort_keeps_what_was_sampled(engine, server, models):
    requests = make_requests((3, 9, 20))
    thread, outcome = in_background(lambda: engine.generate(requests, LONG))
    server.wait_for(3)
    time.sleep(MIDWAY_S)
    engine.abort()
    thread.join()
    for request, response in zip(requests, outcome[0], strict=True):
        assert response.recording.finish_reason == "abort"
        assert 0 < len(response.token_ids) < LONG.max_new_tokens
        assert largest_difference(log_probs(models[0], request, response), response) < 1e-4
    assert engine.dropped == 0


def test_d10_response_aborted_without_tokens_is_dropped_and_counted(engine, server):
    """A retracted request waits, and of a waiting one the server keeps multiples of 50 tokens: here none."""
    thread, outcome = in_background(lambda: engine.generate(make_requests((3, 9)), LONG))
    server.wait_for(2)
    server.post("/pause_generation", mode="retract")
    engine.abort()
    server.post("/continue_generation")
    thread.join()
    assert isinstance(outcome[0], RolloutFailed)
    assert "2 of 2 requests were not answered" in str(outcome[0])
    assert engine.dropped == 2


def test_d11_output_log_probs_come_without_input_log_probs(server):
    body = generate_body(make_requests((3,))[0], Sampling(max_new_tokens=4), rid="d11")
    meta = server.post("/generate", **body).json()["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert len(meta["output_token_logprobs"]) == 4


def test_d16_log_probs_leave_the_prefix_cache_alone(server):
    request = make_requests((200,), first=100)[0]
    asked = [
        server.post("/generate", **generate_body(request, Sampling(max_new_tokens=1), rid=f"d16-{index}")).json()
        for index in range(2)
    ]
    assert [answer["meta_info"]["cached_tokens"] for answer in asked] == [0, 199]


@pytest.fixture(scope="module")
def second(model_path, tmp_path_factory):
    with running(
        model_path, tmp_path_factory.mktemp("second") / "log.txt", SGLANG_RETURN_ORIGINAL_LOGPROB="1"
    ) as started:
        yield started


def test_server_that_returns_original_log_probs_records_raw_ones(second, make_engine, models):
    requests = make_requests((5, 20))
    engine = make_engine(second.url, returns_original=True)
    for request, response in zip(requests, engine.generate(requests, Sampling(8, temperature=0.6)), strict=True):
        assert response.recording.log_prob_kind == "raw"
        assert largest_difference(log_probs(models[0], request, response), response) < 1e-4


def test_server_killed_while_sampling_is_named_and_the_rest_is_kept(server, second, make_engine):
    engine = make_engine(server.url, second.url, attempts=2)
    thread, outcome = in_background(lambda: engine.generate(make_requests((5,) * 6), Sampling(max_new_tokens=300)))
    second.wait_for(3)
    second.kill()
    thread.join()
    assert isinstance(outcome[0], RolloutFailed)
    assert set(outcome[0].finished) == {0, 2, 4}
    assert {len(response.token_ids) for response in outcome[0].finished.values()} == {300}
    assert second.url in str(outcome[0]) and server.url not in str(outcome[0])
