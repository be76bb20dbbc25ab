"""The engine against a local server that answers as SGLang 0.5.23 did."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import pytest

from p3o_train.engine import RolloutFailed
from p3o_train.recording import Request, Sampling
from p3o_train.sglang_client import ServerError
from tests.train.replay_server import RECORDED, SAMPLING, in_background, make_requests

FAILURE = (503, {"error": "loading"})


def closed_url():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_requests_alternate_between_servers_and_answers_keep_their_order(make_engine, server, second):
    second.version = "5"
    responses = make_engine(server, second).generate(make_requests(5), SAMPLING)
    assert [response.recording.version_spans[0].version for response in responses] == [0, 5, 0, 5, 0]
    assert sorted(body["input_ids"][0] for body in server.bodies("/generate")) == [1, 3, 5]
    assert sorted(body["input_ids"][0] for body in second.bodies("/generate")) == [2, 4]


def test_no_more_requests_at_once_than_allowed(make_engine, server):
    make_engine(server, max_concurrency=3).generate(make_requests(12), SAMPLING)
    assert server.peak == 3


def test_nothing_to_sample_is_no_request(make_engine, server):
    assert make_engine(server).generate([], SAMPLING) == []
    assert server.calls == []


def test_5xx_is_tried_again_under_another_name(make_engine, server):
    server.script["/generate"] = [FAILURE]
    assert len(make_engine(server).generate(make_requests(1), SAMPLING)) == 1
    names = [body["rid"] for body in server.bodies("/generate")]
    assert len(names) == len(set(names)) == 2


def test_attempts_are_bounded(make_engine, server):
    server.script["/generate"] = [FAILURE] * 3
    with pytest.raises(RolloutFailed, match=rf"{server.url}: /generate answered 503.*loading"):
        make_engine(server).generate(make_requests(1), SAMPLING)
    assert len(server.calls) == 2


def test_4xx_is_not_tried_again_and_its_text_reaches_the_user(make_engine, server):
    server.script["/generate"] = [(RECORDED["misspelt"]["status"], RECORDED["misspelt"]["answer"])]
    with pytest.raises(RolloutFailed, match=r"answered 400: .*unknown field `temp`"):
        make_engine(server).generate(make_requests(1), SAMPLING)
    assert len(server.calls) == 1


def test_slow_answer_is_not_asked_for_again(make_engine, server):
    engine = make_engine(server, timeout_s=0.3)
    server.gate.clear()
    with pytest.raises(RolloutFailed, match=r"/generate did not answer within 0\.3 s; raise timeout_s"):
        engine.generate(make_requests(1), SAMPLING)
    assert len(server.calls) == 1


def test_an_answer_that_trickles_in_ends_at_the_limit(make_engine, server):
    """httpx's own limit is for each read, which such an answer never meets."""

    def trickle(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                handler.wfile.write(b" ")
                time.sleep(0.05)

    server.script["/generate"] = [(200, trickle)]
    with pytest.raises(RolloutFailed, match=r"/generate did not answer within 0\.4 s; raise timeout_s"):
        make_engine(server, timeout_s=0.4).generate(make_requests(1), SAMPLING)


def test_answer_that_is_not_json_names_the_server(make_engine, server):
    server.script["/generate"] = [(200, b"<html>welcome")]
    with pytest.raises(
        RolloutFailed, match=rf"{server.url}: /generate did not answer with JSON but with '<html>welcome'"
    ):
        make_engine(server).generate(make_requests(1), SAMPLING)


def test_dead_server_is_named_and_finished_responses_are_kept(make_engine, server, second):
    engine = make_engine(server, second)
    second.close()
    with pytest.raises(RolloutFailed) as caught:
        engine.generate(make_requests(4), SAMPLING)
    assert set(caught.value.finished) == {0, 2}
    assert "2 of 4 requests were not answered, the first is 'r1'" in str(caught.value)
    assert f"{second.url}: /generate failed with ConnectError" in str(caught.value)
    assert server.url not in str(caught.value)


def test_nothing_more_is_sent_after_a_failure(make_engine, server):
    server.script["/generate"] = [(400, {"error": "no"})]
    with pytest.raises(RolloutFailed, match="6 of 6"):
        make_engine(server, max_concurrency=1).generate(make_requests(6), SAMPLING)
    assert len(server.calls) == 1


def test_faulty_log_prob_fails_its_request_alone(make_engine, server):
    broken = RECORDED["scaled"]["answer"] | {"output_ids": [1, 2, 3, 4]}
    server.script["/generate"] = [(200, broken)]
    with pytest.raises(RolloutFailed, match="its log-prob is that of token") as caught:
        make_engine(server).generate(make_requests(3), SAMPLING)
    assert len(caught.value.finished) == 2


def test_wrong_request_is_refused_before_any_is_sent(make_engine, server):
    with pytest.raises(ValueError, match=r"got 512 at position 0"):
        make_engine(server).generate([*make_requests(2), Request("wrong", (512,), 0)], SAMPLING)
    with pytest.raises(ValueError, match="top_k must be in"):
        make_engine(server).generate(make_requests(2), Sampling(4, top_p=0.5))
    assert server.calls == []


def test_d10_dropped_response_is_counted_and_not_answered(make_engine, server):
    engine = make_engine(server)
    server.script["/generate"] = [(200, RECORDED["empty"]["answer"])]
    with pytest.raises(RolloutFailed, match=r"1 of 3 .*aborted before they had tokens") as caught:
        engine.generate(make_requests(3), SAMPLING)
    assert (len(caught.value.finished), engine.dropped) == (2, 1)


def test_abort_names_what_is_in_flight_and_sends_nothing_more(make_engine, server):
    engine = make_engine(server, max_concurrency=2)
    server.gate.clear()
    thread, outcome = in_background(lambda: engine.generate(make_requests(5), SAMPLING))
    server.wait_for_calls("/generate", 2)
    aborting, _ = in_background(engine.abort)
    server.wait_for_calls("/abort_request", 4)
    assert aborting.is_alive()
    server.gate.set()
    thread.join()
    aborting.join()
    names = {body["rid"] for body in server.bodies("/generate")}
    assert len(names) == 2
    assert {(body["rid"], body["abort_all"]) for body in server.bodies("/abort_request")} == {(n, False) for n in names}
    assert set(outcome[0].finished) == {0, 1}
    engine.abort()
    assert len(engine.generate(make_requests(1), SAMPLING)) == 1


def test_request_is_not_tried_again_once_aborted(make_engine, server):
    engine = make_engine(server)
    server.script["/generate"] = [FAILURE]
    thread, outcome = in_background(lambda: engine.generate(make_requests(1), SAMPLING))
    server.wait_for_calls("/generate", 1)
    engine.abort()
    thread.join()
    assert "'r0' was aborted before it was sent" in str(outcome[0])
    assert len(server.bodies("/generate")) == 1


def test_older_names_of_paths_are_tried(make_engine, server):
    server.script["/server_info"] = [(404, {"detail": "Not Found"})]
    with pytest.raises(ServerError, match=r"/get_server_info answered 404"):
        make_engine(server)
    assert [path for path, _ in server.calls] == ["/server_info", "/get_server_info"]


@pytest.mark.parametrize(
    "info, options, message",
    [
        ({"version": "0.4.6"}, {}, "use 0.4.7 or later"),
        ({"enable_deterministic_inference": True}, {}, "copies of each other: pass send_seeds=True"),
        ({}, {"send_seeds": True}, "ignores seeds"),
        ({"version": "0.5.18"}, {"pause_mode": "in_place"}, "would reuse keys and values of old weights"),
    ],
)
def test_server_that_does_not_fit_is_refused(make_engine, server, info, options, message):
    server.info = server.info | info
    with pytest.raises(ValueError, match=message) as caught:
        make_engine(server, **options)
    assert server.url in str(caught.value)


def test_seeds_are_sent_to_deterministic_servers(make_engine, server):
    server.info = server.info | {"enable_deterministic_inference": True}
    make_engine(server, send_seeds=True).generate(make_requests(3), SAMPLING)
    assert sorted(body["sampling_params"]["sampling_seed"] for body in server.bodies("/generate")) == [0, 1, 2]


@pytest.mark.parametrize(
    "urls, options, message",
    [
        ((), {}, "urls must be a sequence"),
        (("localhost:30000",), {}, "urls must be a sequence"),
        (("http://a:1", "http://a:1/"), {}, "urls must differ"),
        (("http://a:1",), {"pause_mode": "wait"}, "pause_mode must be one of"),
        (("http://a:1",), {"max_concurrency": 0}, "max_concurrency must be >= 1, got 0"),
        (("http://a:1",), {"attempts": 0}, "attempts must be >= 1, got 0"),
        (("http://a:1",), {"timeout_s": 0}, "timeout_s must be > 0, got 0"),
    ],
)
def test_arguments_are_checked(make_engine, urls, options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(*urls, **options)


def test_server_that_is_not_there_is_named(make_engine):
    url = closed_url()
    with pytest.raises(ServerError, match=rf"{url}: /server_info failed with ConnectError.*is the server running"):
        make_engine(url)


def test_errors_survive_pickling(make_engine):
    error = pickle.loads(pickle.dumps(ServerError("http://a:1", "did not answer")))
    assert (str(error), error.url, error.reason) == ("http://a:1: did not answer", "http://a:1", "did not answer")


@pytest.mark.host_only
def test_ctrl_c_ends_generate(server, tmp_path):
    code = (
        "import sys; from p3o_train.sglang_engine import SGLangEngine; from p3o_train.recording import *\n"
        f"e = SGLangEngine([{server.url!r}], 512, weights_dir={str(tmp_path)!r}, save=None)\n"
        "e.generate([Request('a', (1,), 0)], Sampling(4))"
    )
    server.gate.clear()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # a shell starts background jobs, such as a test run, with Ctrl-C ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    server.wait_for_calls("/generate", 1)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - begin < 5
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
