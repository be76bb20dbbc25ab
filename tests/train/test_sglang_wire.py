"""Bodies for SGLang and the meaning of its answers, on answers that a real server gave."""

import copy
import json
import math
from pathlib import Path

import pytest

from p3o_train.recording import Request, Sampling
from p3o_train.sglang_wire import (
    ServerFacts,
    check_request,
    check_sampling,
    generate_body,
    parse_response,
    parse_server_info,
)

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "sglang_0_5_23.json").read_text())
FACTS = ServerFacts("http://engine:30000", "0.5.23", 4090, 4096, False, False)
REQUEST = Request("first", (175, 196, 25, 502, 67), 3)
SCALED, LONG = Sampling(max_new_tokens=4, temperature=0.7), Sampling(max_new_tokens=300)
TRUNCATED = Sampling(4, top_k=5, top_p=0.3)


def answer(name):
    return copy.deepcopy(RECORDED[name]["answer"])


def parse(content, sampling=SCALED, facts=FACTS, *, pause_mode="retract", swapped=False):
    return parse_response(content, REQUEST, sampling, facts, pause_mode=pause_mode, swapped=swapped)


def refused(content, message, sampling=SCALED, **options):
    with pytest.raises(ValueError, match=message) as caught:
        parse(content, sampling, **options)
    assert "http://engine:30000" in str(caught.value) and "'first'" in str(caught.value)


@pytest.mark.parametrize(
    "name, sampling",
    [("scaled", SCALED), ("truncated", TRUNCATED), ("partial", LONG)],
    ids=["scaled", "truncated", "long"],
)
def test_body_is_the_one_that_a_real_server_took(name, sampling):
    assert generate_body(REQUEST, sampling, rid=name) == RECORDED[name]["body"]


def test_every_knob_is_sent_and_takes_its_field():
    sampling = Sampling(
        9, (2, 7), 0.5, 0.8, 40, 0.1, 0.2, 0.3, 1.1, 4, {"5": -2.0}, {"typical": 1, "custom_logit_processor": "p"}
    )
    body = generate_body(REQUEST, sampling, rid="r", send_seed=True, cache_salt="s")
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "stop_token_ids": [2, 7],
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 40,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_new_tokens": 4,
        "logit_bias": {"5": -2.0},
        "ignore_eos": False,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "typical": 1,
        "sampling_seed": 3,
    }
    assert (body["custom_logit_processor"], body["cache_salt"], body["return_sampling_mask"]) == ("p", "s", True)


@pytest.mark.parametrize("name", ["top_p", "no_stop_trim", "n", "sampling_seed"])
def test_other_knobs_cannot_replace_ours(name):
    with pytest.raises(ValueError, match=f"sampling.other must not hold {name}"):
        check_sampling(Sampling(4, other={name: 1}), FACTS)


@pytest.mark.parametrize("field", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 1}, {"top_k": 4097}])
def test_d04_truncation_without_a_mask_is_refused(field):
    with pytest.raises(ValueError, match=r"top_k must be in \[2, 4096\]"):
        check_sampling(Sampling(4, **field), FACTS)


def test_truncation_with_a_mask_passes_where_the_server_has_masks():
    check_sampling(TRUNCATED, FACTS)
    check_sampling(TRUNCATED, FACTS._replace(version="0.5.16"))
    check_sampling(Sampling(4, temperature=0.0, top_p=0.9), FACTS)
    with pytest.raises(ValueError, match=r"0\.5\.15\.post1 returns log-probs over the whole vocabulary"):
        check_sampling(TRUNCATED, FACTS._replace(version="0.5.15.post1"))


def test_request_that_ends_or_cuts_is_refused():
    check_request(REQUEST, SCALED, 503, FACTS)
    for prompt, message in (((), "empty"), ((1, -1), "got -1 at position 1"), ((9, 503), "got 503 at position 1")):
        with pytest.raises(ValueError, match=message):
            check_request(Request("bad", prompt, 0), SCALED, 503, FACTS)
    check_request(REQUEST, Sampling(4085), 503, FACTS)
    with pytest.raises(ValueError, match=r"5 prompt tokens and max_new_tokens 4086 are 4091.*holds 4090"):
        check_request(REQUEST, Sampling(4086), 503, FACTS)
    check_request(REQUEST, Sampling(4086), 503, FACTS._replace(max_tokens=None))


def test_server_info():
    assert parse_server_info("http://engine:30000", RECORDED["server_info"]) == FACTS
    assert parse_server_info("u", {"version": "0.4.7"}) == ServerFacts("u", "0.4.7", None, 4096, False, False)
    assert parse_server_info("u", {"version": "1.0.0rc1+cu"}, returns_original=True).returns_original
    for version in ("0.4.6.post5", "0.3.9"):
        with pytest.raises(ValueError, match=r"renormalised.*use 0\.4\.7 or later"):
            parse_server_info("u", {"version": version})
    for info in ({}, {"version": "unknown"}, ["0.5.23"], None):
        with pytest.raises(ValueError, match="no version"):
            parse_server_info("u", info)


def test_response_of_a_real_server():
    content = answer("scaled")
    response = parse(content)
    assert response.token_ids == tuple(content["output_ids"])
    assert response.log_probs == [triple[0] for triple in content["meta_info"]["output_token_logprobs"]]
    record = response.recording
    assert (record.engine, record.engine_version, record.sampling) == ("sglang", "0.5.23", SCALED)
    assert (record.log_prob_kind, record.finish_reason, record.source) == ("scaled", "length", "output")
    assert (record.version_spans, record.pause_mode, record.kept_token_ids) == (((0, 0, 4),), None, None)


def test_stop_token_is_kept():
    sampling = Sampling(200, stop_token_ids=tuple(range(0, 512, 8)))
    content = answer("stop")
    response = parse(content, sampling)
    assert response.recording.finish_reason == "stop"
    assert response.token_ids[-1] == content["meta_info"]["finish_reason"]["matched"]
    content["output_ids"].pop()
    refused(content, r"stopped at token \d+ but ends with", sampling)


@pytest.mark.parametrize(
    "sampling, original, kind", [(Sampling(4, temperature=0.0), False, "raw"), (SCALED, True, "raw")]
)
def test_kind_follows_sampling_and_server(sampling, original, kind):
    assert parse(answer("scaled"), sampling, FACTS._replace(returns_original=original)).recording.log_prob_kind == kind


def test_truncated_response_has_log_probs_over_the_kept_tokens():
    content = answer("truncated")
    meta = content["meta_info"]
    response = parse(content, TRUNCATED)
    assert response.recording.log_prob_kind == "truncated"
    assert response.log_probs == meta["output_token_sampling_logprobs"]
    assert response.recording.kept_token_ids == tuple(map(tuple, meta["output_token_sampling_mask"]))
    del meta["output_token_sampling_mask"][0]
    refused(
        content, "4 output_token_sampling_logprobs and output_token_sampling_mask are needed, got 4 and 3", TRUNCATED
    )
    meta["output_token_sampling_mask"].insert(0, [1, 2])
    refused(content, "which is not among its kept tokens", TRUNCATED)
    del meta["output_token_sampling_mask"]
    refused(content, "got 4 and None", TRUNCATED)


def test_d10_partial_response_is_kept_and_one_without_tokens_or_log_probs_is_dropped():
    response = parse(answer("partial"), LONG)
    assert response.recording.finish_reason == "abort"
    assert len(response.token_ids) == len(response.log_probs) == response.recording.version_spans[-1].end > 0
    assert parse(answer("empty"), LONG) is None
    for missing in ("output_token_logprobs", ("weight_version", "weight_versions")):
        content = answer("partial")
        for name in (missing,) if isinstance(missing, str) else missing:
            del content["meta_info"][name]
        assert parse(content, LONG) is None
    content = answer("partial")
    del content["output_ids"]
    assert parse(content, LONG) is None
    content = answer("partial")
    del content["meta_info"]["completion_tokens"], content["meta_info"]["prompt_tokens"]
    assert parse(content, LONG) == response


def test_d11_output_log_probs_are_read_whatever_the_input_ones_are():
    expected = parse(answer("scaled"))
    for value in (None, [[None, 175, None]]):
        content = answer("scaled")
        content["meta_info"]["input_token_logprobs"] = value
        assert parse(content) == expected
    del content["meta_info"]["input_token_logprobs"]
    assert parse(content) == expected


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, -3.4028234663852886e38, -1e5])
def test_d13_log_prob_that_is_none_is_an_error_with_its_index(value):
    content = answer("scaled")
    content["meta_info"]["output_token_logprobs"][2][0] = value
    refused(content, "output_token_logprobs must be finite.* at response token 2 of 4")
    content = answer("truncated")
    content["meta_info"]["output_token_sampling_logprobs"][1] = value
    refused(content, "output_token_sampling_logprobs must be finite.* at response token 1 of 4", TRUNCATED)


def test_d16_log_probs_are_asked_of_the_output_alone():
    assert generate_body(REQUEST, SCALED, rid="r")["logprob_start_len"] == -1


@pytest.mark.parametrize("change", ["ids", "triples", "count"])
def test_lengths_must_agree(change):
    content = answer("scaled")
    meta = content["meta_info"]
    if change == "ids":
        content["output_ids"].append(1)
    elif change == "triples":
        meta["output_token_logprobs"].pop()
    else:
        meta["completion_tokens"] = 5
    numbers = {"ids": (5, 4, 4), "triples": (4, 3, 4), "count": (4, 4, 5)}[change]
    refused(content, "{} output_ids, {} output_token_logprobs and completion_tokens {} must".format(*numbers))


def test_d23_log_prob_of_another_token_is_an_error():
    content = answer("scaled")
    content["meta_info"]["output_token_logprobs"][1][1] += 1
    refused(content, r"response token 1 is \d+, but its log-prob is that of token \d+")


@pytest.mark.parametrize("content", [{"output_ids": [1]}, {"text": "hello", "meta_info": None}, [], None])
def test_d24_answer_without_meta_info_names_the_hop(content):
    refused(content, "no meta_info with a finish_reason.*something between here and the engine")


@pytest.mark.parametrize("name", ["output_ids", "output_token_logprobs", "completion_tokens"])
def test_d24_missing_fields_are_named(name):
    content = answer("scaled")
    (content if name == "output_ids" else content["meta_info"]).pop(name)
    refused(content, name)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.update(output_ids=3),
        lambda content: content.update(output_ids=[1.5, 2, 3, 4]),
        lambda content: content["meta_info"].update(output_token_logprobs=[1, 2, 3, 4]),
        lambda content: content["meta_info"].update(finish_reason="stop"),
        lambda content: content["meta_info"].update(weight_versions=[{"start": 0}]),
        lambda content: content["meta_info"]["output_token_sampling_mask"].__setitem__(1, {}),
    ],
    ids=["no list", "no ids", "no triples", "no reason", "no end", "no mask"],
)
def test_fields_of_another_type_are_an_error_that_names_the_server(damage):
    content = answer("truncated")
    damage(content)
    refused(content, "response token|field of the answer|finish_reason|must", TRUNCATED)


def test_response_that_the_server_cut_is_an_error():
    refused(answer("scaled"), "cut the response at 4 tokens, max_new_tokens is 5", Sampling(5))


def test_unknown_finish_is_an_error():
    content = answer("scaled")
    content["meta_info"]["finish_reason"] = {"type": "paused"}
    refused(content, "finish_reason must be of type stop, length or abort")


def test_versions_of_a_change_inside_a_response():
    content, sampling = answer("versions"), Sampling(150)
    cut = content["meta_info"]["weight_versions"][0]["end"]
    record = parse(content, sampling, swapped=True).recording
    assert record.version_spans == ((0, 0, cut), (1, cut, 150))
    assert record.pause_mode == "retract"


def test_response_in_place_during_a_change_says_so_even_with_one_version():
    assert parse(answer("scaled"), pause_mode="in_place").recording.pause_mode is None
    assert parse(answer("scaled"), pause_mode="in_place", swapped=True).recording.pause_mode == "in_place"
    assert parse(answer("scaled"), pause_mode="retract", swapped=True).recording.pause_mode is None


@pytest.mark.parametrize(
    "spans", [[(0, 3)], [(1, 4)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(0, 0), (0, 4)], [(0, 5)], []]
)
def test_spans_must_tile_the_response(spans):
    content = answer("scaled")
    listed = [{"version": "1", "start": start, "end": end} for start, end in spans]
    content["meta_info"]["weight_versions"] = listed
    refused(content, r"weight_versions must cover \[0, 4\) once and in order")


def test_scalar_version_serves_only_while_weights_stay():
    content = answer("scaled")
    del content["meta_info"]["weight_versions"]
    content["meta_info"]["weight_version"] = "12"
    assert parse(content).recording.version_spans == ((12, 0, 4),)
    refused(content, "weights changed while it was sampled.*use 0.5.19", swapped=True)
    del content["meta_info"]["weight_version"]
    refused(content, "no weight_versions and no weight_version")


@pytest.mark.parametrize("version", ["default", "-1", "1.0", None])
def test_versions_must_be_whole_numbers(version):
    content = answer("scaled")
    content["meta_info"]["weight_versions"][0]["version"] = version
    refused(content, f"must be whole numbers, got {version!r}; call update_weights before generate")


def test_empty_response_has_no_spans():
    content = answer("scaled")
    content["output_ids"] = content["meta_info"]["output_token_logprobs"] = []
    content["meta_info"]["completion_tokens"] = 0
    assert parse(content, Sampling(0)).recording.version_spans == ()
