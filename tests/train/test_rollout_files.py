"""A rollout comes back from its file bit for bit, and a file that is not whole is refused."""

import dataclasses
import json
import math
import tempfile

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import PROPERTY, make_sample

from p3o_train import rollout_files
from p3o_train.recording import FINISH_REASONS, LOG_PROB_KINDS, PAUSE_MODES, Recording, Sampling, VersionSpan
from p3o_train.rollout_files import (
    RolloutFileError,
    has_rollout,
    partial_rollouts,
    read_rollout,
    rollout_ids,
    write_rollout,
)
from p3o_train.types import Sample

SAMPLING = Sampling(
    8,
    (2, 198),
    0.6,
    0.95,
    20,
    0.05,
    0.1,
    0.2,
    1.1,
    1,
    {"5": -math.inf, "6": 0.1},
    {"typical_p": 0.9, "stop": ["a", "\u00e4"], "deep": {"x": None}},
)
RECORDING = Recording(
    "sglang",
    "0.5.23",
    SAMPLING,
    "truncated",
    (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3)),
    "stop",
    "retract",
    ((1, 2), (), (2**40,)),
    "input",
)
TOKEN = st.integers(0, 2**63 - 1)
ANY = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
DOUBLE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | DOUBLE | st.text(),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=4,
)
SAMPLINGS = st.builds(
    Sampling,
    st.integers(0, 99),
    st.lists(TOKEN, max_size=3).map(tuple),
    *([DOUBLE, DOUBLE, st.integers(-1, 99)] + [DOUBLE] * 4),
    st.integers(0, 9),
    st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3),
    st.dictionaries(st.text(), JSON, max_size=3),
)


@st.composite
def recordings(draw, length):
    return Recording(
        draw(st.text()),
        draw(st.text()),
        draw(SAMPLINGS),
        draw(st.sampled_from(LOG_PROB_KINDS)),
        tuple(VersionSpan(draw(TOKEN), place, place + 1) for place in range(length)),
        draw(st.sampled_from(FINISH_REASONS)),
        draw(st.sampled_from((None, *PAUSE_MODES))),
        draw(st.none() | st.tuples(*[st.lists(TOKEN, max_size=3).map(tuple)] * length)),
        draw(st.sampled_from(("output", "input"))),
    )


@st.composite
def any_samples(draw):
    """Every field takes every value that a sample allows: no more than finite log-probs at valid tokens."""
    prompt, length = draw(st.lists(TOKEN, min_size=1, max_size=4)), draw(st.integers(0, 5))
    is_dummy = draw(st.booleans())
    mask = draw(st.lists(st.just(False) if is_dummy else st.booleans(), min_size=length, max_size=length))
    pairing = draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
    valid = mask if pairing is None else [a and b for a, b in zip(mask, pairing, strict=True)]
    return Sample(
        draw(st.text()),
        torch.tensor([*prompt, *draw(st.lists(TOKEN, min_size=length, max_size=length))], dtype=torch.int64),
        length,
        torch.tensor([draw(FINITE if one else ANY) for one in valid], dtype=torch.float32),
        torch.tensor(mask, dtype=torch.bool),
        None if pairing is None else torch.tensor(pairing, dtype=torch.bool),
        draw(st.floats() | st.integers(-5, 5)),
        draw(st.integers(-(2**62), 2**62)),
        draw(st.none() | recordings(length)),
        is_dummy,
    )


def bits(sample):
    """Fields of a sample as values that compare equal only if every bit is; one NaN is as good as another."""
    found = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    log_probs = found["behavior_log_probs"]
    canonical = torch.where(log_probs.isnan(), torch.full_like(log_probs, math.nan), log_probs)
    found["behavior_log_probs"] = canonical.view(torch.int32)
    found["reward"] = (type(sample.reward), repr(sample.reward))
    found["recording"] = repr(sample.recording)
    return {
        name: (value.dtype, tuple(value.shape), value.tolist()) if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
    }


@given(samples=st.lists(any_samples(), max_size=3), header=st.dictionaries(st.text(max_size=3), JSON, max_size=2))
@PROPERTY
def test_what_is_read_is_what_was_written(samples, header):
    with tempfile.TemporaryDirectory() as folder:
        write_rollout(folder, 5, samples, header)
        found, read = read_rollout(folder, 5)
    assert [bits(sample) for sample in read] == [bits(sample) for sample in samples]
    own = {"format": "p3o-rollout", "format_version": 1, "rollout_id": 5, "num_samples": len(samples), "partial": False}
    assert found == own | header


def full_sample():
    sample = make_sample(2, 3, valid=[1, 1, 0], pairing_mask=[True, False, True], reward=0.5, group_id=7)
    log_probs = torch.tensor([-0.1, math.nan, -math.inf])
    return dataclasses.replace(sample, behavior_log_probs=log_probs, recording=RECORDING)


def test_the_lines_of_a_file(tmp_path):
    path = write_rollout(tmp_path / "new", 12, [full_sample(), make_sample(1, 0)], {"identity": "x"})
    assert path == tmp_path / "new" / "rollout_0000012.jsonl"
    header, first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert header["format"] == "p3o-rollout" and header["num_samples"] == 2 and header["identity"] == "x"
    assert first["prompt_token_ids"] == [100, 101]
    assert first["response_token_ids"] == [102, 103, 104]
    assert first["response_rollout_log_probs"] == [float(numpy.float32(-0.1)), None, "-inf"]
    assert first["response_rollout_log_probs_mask"] == [1, 0, 1]
    assert first["loss_mask"] == [1, 1, 0]
    assert (first["reward"], first["group_id"], first["sample_id"]) == (0.5, 7, "s100")
    assert first["recording"]["sampling"]["logit_bias"] == {"5": "-inf", "6": 0.1}
    assert "response_rollout_log_probs_mask" not in second
    assert second["recording"] is None and second["response_token_ids"] == []


def test_a_full_sample_comes_back(tmp_path):
    write_rollout(tmp_path, 0, [full_sample()], {})
    (read,) = read_rollout(tmp_path, 0)[1]
    assert read.recording == RECORDING
    assert isinstance(read.recording.version_spans[0], VersionSpan)
    assert bits(read) == bits(full_sample())


def test_other_kinds_of_rewards_are_numbers(tmp_path):
    rewards = [True, numpy.float32(0.25), numpy.float64(0.1)]
    write_rollout(tmp_path, 0, [make_sample(reward=reward) for reward in rewards], {})
    read = [sample.reward for sample in read_rollout(tmp_path, 0)[1]]
    assert read == [1.0, 0.25, 0.1] and {type(reward) for reward in read} == {float}


def test_partial_files_are_apart(tmp_path):
    assert rollout_ids(tmp_path / "absent") == partial_rollouts(tmp_path / "absent") == []
    path = write_rollout(tmp_path, 3, [make_sample()], {}, partial=True)
    assert path.name == "rollout_0000003.partial.jsonl"
    assert not has_rollout(tmp_path, 3) and rollout_ids(tmp_path) == [] and partial_rollouts(tmp_path) == [3]
    with pytest.raises(FileNotFoundError, match=r"rollout_0000003\.jsonl is not there; whole rollouts here: \[\]"):
        read_rollout(tmp_path, 3)
    header, samples = read_rollout(tmp_path, 3, partial=True)
    assert header["partial"] is True and len(samples) == 1
    for rollout_id in (12_345_678, 3, 0):
        write_rollout(tmp_path, rollout_id, [], {})
    (tmp_path / "rollout_0000009.jsonl.tmp").touch()
    assert rollout_ids(tmp_path) == [0, 3, 12_345_678] and has_rollout(tmp_path, 3)
    assert partial_rollouts(tmp_path) == []


def test_a_whole_file_is_not_taken_for_a_partial_one(tmp_path):
    write_rollout(tmp_path, 3, [], {}).rename(tmp_path / "rollout_0000003.partial.jsonl")
    with pytest.raises(ValueError, match="expected rollout_id 3, partial True, got 3, False"):
        read_rollout(tmp_path, 3, partial=True)


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path, monkeypatch):
    path = write_rollout(tmp_path, 0, [make_sample()], {"try": 1})
    before = path.read_bytes()
    monkeypatch.setattr(rollout_files.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_rollout(tmp_path, 0, [], {"try": 2})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_rollout(tmp_path, 0, [], {"try": 3})
    assert read_rollout(tmp_path, 0)[0]["try"] == 3


def with_other(**other):
    sampling = dataclasses.replace(SAMPLING, other=other)
    return dataclasses.replace(full_sample(), recording=dataclasses.replace(RECORDING, sampling=sampling))


@pytest.mark.parametrize(
    ("rollout_id", "samples", "header", "words"),
    [
        (-1, [], {}, ["rollout_id must be >= 0, got -1"]),
        (0, [], {"partial": 1, "format": 2}, ["header must not have ['format', 'partial']", "other names"]),
        (0, [], {"x": math.nan}, ["header", "JSON cannot hold it"]),
        (0, [], {"x": torch.zeros(1)}, ["header", "Tensor"]),
        (0, [make_sample(), with_other(x=object())], {}, ["sampling of sample 's100'", "JSON cannot hold it"]),
        (0, [with_other(x=(1, 2))], {}, ["sampling of sample 's100'", "does not come back", "lists for tuples"]),
    ],
)
def test_what_cannot_be_written_leaves_nothing(tmp_path, rollout_id, samples, header, words):
    with pytest.raises(ValueError) as error:
        write_rollout(tmp_path / "new", rollout_id, samples, header)
    assert [word for word in words if word not in str(error.value)] == []
    assert not (tmp_path / "new").exists()


def edited(text, old, new):
    assert text.count(old) >= 1
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: "", ["line 1", "not the header"]),
        (lambda text: text[:20], ["line 1", "not the header"]),
        (lambda text: "[]\n", ["line 1", "not the header"]),
        (lambda text: edited(text, "p3o-rollout", "other"), ["line 1", "got 'other', version 1"]),
        (lambda text: edited(text, '"format_version": 1', '"format_version": 2'), ["got 'p3o-rollout', version 2"]),
        (lambda text: edited(text, '"rollout_id": 4', '"rollout_id": 5'), ["line 1", "expected rollout_id 4", "got 5"]),
        (lambda text: edited(text, '"num_samples": 2, ', ""), ["line 3", "header says None"]),
        (lambda text: text[:-20], ["line 3", "not a sample"]),
        (lambda text: "".join(text.splitlines(True)[:2]), ["line 2", "after 1 samples", "says 2", "truncated"]),
        (lambda text: text + text.splitlines(True)[1], ["line 4", "after 3 samples", "says 2"]),
        (lambda text: edited(text, '"loss_mask": [1', '"loss_mask": [2'), ["line 2", "list of 0 and 1"]),
        (lambda text: edited(text, "[102, ", "[102.5, "), ["line 2", "list of integers"]),
        (lambda text: edited(text, "[102, ", f"[{2**70}, "), ["line 2", "not a sample"]),
        (lambda text: edited(text, "[102, ", "["), ["line 2", "'s100'", "length"]),
        (lambda text: edited(text, '"reward": 0.5', '"reward": "high"'), ["line 2", "expected a number", "'high'"]),
        (lambda text: edited(text, '"reward"', '"rewarded"'), ["line 2", "['reward']", "['rewarded']"]),
        (lambda text: edited(text, '"min_p"', '"min_q"'), ["line 2", "['min_p']", "['min_q']"]),
        (lambda text: edited(text, '"source"', '"sauce"'), ["line 2", "['source']", "['sauce']"]),
        (lambda text: edited(text, '"engine": "sglang"', '"engine": [null]'), ["line 2", "texts in the recording"]),
        (lambda text: edited(text, '"pause_mode": "retract"', '"pause_mode": 3'), ["line 2", "texts in the recording"]),
        (lambda text: edited(text, '"top_k": 20', '"top_k": "20"'), ["line 2", "numbers in the sampling"]),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path, edit, words):
    path = write_rollout(tmp_path, 4, [full_sample(), make_sample(1, 1, first_token=7)], {})
    path.write_text(edit(path.read_text()))
    with pytest.raises(RolloutFileError) as error:
        read_rollout(tmp_path, 4)
    assert [word for word in [str(path), *words] if word not in str(error.value)] == []
