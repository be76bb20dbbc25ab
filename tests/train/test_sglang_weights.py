"""Weight changes against a local server that answers as SGLang 0.5.23 did."""

import threading

import pytest
import torch

from p3o_train.sglang_client import ServerError
from tests.train.replay_server import RECORDED, SAMPLING, ReplayServer, in_background, make_requests


@pytest.mark.parametrize("mode, flush", [("retract", True), ("abort", True), ("in_place", False)])
def test_d20_weights_change_in_a_pause_that_ends_and_aborts_nothing(make_engine, server, tmp_path, mode, flush):
    make_engine(server, pause_mode=mode).update_weights({"w": torch.ones(2)}, 3)
    path = tmp_path / "weights" / "version-3"
    body = {"model_path": str(path), "weight_version": "3", "flush_cache": flush, "abort_all_requests": False}
    assert server.calls == [
        ("/pause_generation", {"mode": mode}),
        ("/update_weights_from_disk", body),
        ("/model_info", None),
        ("/continue_generation", {}),
    ]
    assert torch.equal(torch.load(path / "weights.pt")["w"], torch.ones(2))


def test_only_the_newest_weights_stay(make_engine, server, tmp_path):
    engine = make_engine(server)
    (tmp_path / "weights" / "version-2" / "broken off").mkdir(parents=True)
    (tmp_path / "weights" / "notes").mkdir()
    for version in (1, 2, 2):
        engine.update_weights({}, version)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["notes", "version-2"]


def test_failing_save_reaches_no_server(make_engine, server):
    def save(directory, weights):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_engine(server, save=save).update_weights({}, 1)
    assert server.calls == []


REFUSALS = {
    "status": (400, RECORDED["unknown_directory"]["answer"]),
    # says what 0.5.23 says where the cache is in use: the weights are new, the cache is old
    "flush": (400, {"success": False, "message": "Weights were updated, but the cache was not flushed"}),
    "unconfirmed": (200, {"success": False, "message": "not now"}),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_d20_refused_weights_name_the_server_and_all_go_on(make_engine, server, second, name, tmp_path):
    engine = make_engine(server, second)
    engine.update_weights({}, 1)
    second.script["/update_weights_from_disk"] = [REFUSALS[name]]
    with pytest.raises(ServerError, match="did not change to weight version 2") as caught:
        engine.update_weights({}, 2)
    assert caught.value.url == second.url
    assert f"those that did: {server.url}. " in str(caught.value)
    assert REFUSALS[name][1]["message"][:30] in str(caught.value)
    assert [path for path, _ in server.calls + second.calls].count("/continue_generation") == 4
    assert (tmp_path / "weights" / "version-1").exists()


def test_version_that_the_server_does_not_report_is_an_error(make_engine, server):
    engine = make_engine(server)
    server.script["/model_info"] = [(200, {"weight_version": "default"})]
    with pytest.raises(ServerError, match="reports weight version 'default' after the change to 4"):
        engine.update_weights({}, 4)
    assert server.calls[-1][0] == "/continue_generation"


def test_server_that_dies_during_a_change_is_named_twice(make_engine, server, second):
    engine = make_engine(server, second)
    second.close()
    with pytest.raises(ServerError, match=r"did not pause; .*; then did not go on sampling") as caught:
        engine.update_weights({}, 1)
    assert caught.value.url == second.url
    assert server.bodies("/update_weights_from_disk") == []


@pytest.mark.parametrize("version", [-1, 1.0, True, "1"])
def test_versions_are_whole_numbers(make_engine, server, version):
    with pytest.raises(ValueError, match="version must be a whole number >= 0"):
        make_engine(server).update_weights({}, version)
    assert server.calls == []


def test_change_during_a_response_needs_spans(make_engine, server):
    """A server that says one version for the whole response does not know where it changed."""
    engine = make_engine(server)
    server.gate.clear()
    content = RECORDED["scaled"]["answer"]
    meta = {name: value for name, value in content["meta_info"].items() if name != "weight_versions"}

    def answer_late(body):
        server.gate.wait(30)
        return 200, content | {"meta_info": meta}

    server._generate = answer_late
    thread, outcome = in_background(lambda: engine.generate(make_requests(1), SAMPLING))
    server.wait_for_calls("/generate", 1)
    engine.update_weights({}, 1)
    server.gate.set()
    thread.join()
    assert "weights changed while it was sampled" in str(outcome[0])
    assert len(engine.generate(make_requests(1), SAMPLING)) == 1


def test_in_place_no_request_shares_keys_and_values_with_other_weights(make_engine, server):
    engine = make_engine(server, pause_mode="in_place")
    for version in (1, 2):
        engine.generate(make_requests(2), SAMPLING)
        engine.update_weights({}, version)
    salts = [body["cache_salt"] for body in server.bodies("/generate")]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    # a later run on the same server
    make_engine(server, pause_mode="in_place").generate(make_requests(1), SAMPLING)
    assert server.bodies("/generate")[0]["cache_salt"] not in salts


def test_in_place_requests_during_a_change_share_nothing(make_engine, server, tmp_path):
    held = threading.Event()

    class Slow(ReplayServer):
        def answer(self, path, body):
            if path == "/update_weights_from_disk":
                held.wait(30)
            return super().answer(path, body)

    slow = Slow()
    try:
        engine = make_engine(slow, pause_mode="in_place")
        thread, _ = in_background(lambda: engine.update_weights({}, 1))
        slow.wait_for_calls("/pause_generation", 1)
        responses = engine.generate(make_requests(2), SAMPLING)
        held.set()
        thread.join()
        salts = [body["cache_salt"] for body in slow.bodies("/generate")]
    finally:
        held.set()
        slow.close()
    assert len(set(salts)) == 2
    assert {response.recording.pause_mode for response in responses} == {"in_place"}


def test_retract_leaves_the_prefix_cache_shared(make_engine, server):
    make_engine(server).generate(make_requests(1), SAMPLING)
    assert server.bodies("/generate")[0]["cache_salt"] is None
