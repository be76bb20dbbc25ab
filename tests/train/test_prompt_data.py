"""Prompts from a file: what is refused and where, and an order that depends on seed and rollout alone."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import PROPERTY

from p3o_train.prompt_data import PromptRecord, PromptStream, read_prompts

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+3?", "name": "Ada"}]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompts.jsonl"


def records(count, prefix="p"):
    return [PromptRecord(f"{prefix}{number}", str(number), f"line {number}") for number in range(count)]


def labels(found):
    return [int(record.label) for record in found]


def test_texts_and_chats_are_read_in_order(path):
    rows = [{"prompt": "2+3=", "label": "5", "level": 3}, {"prompt": CHAT, "label": ""}]
    path.write_bytes(b"\r\n".join(json.dumps(row).encode() for row in rows))
    assert read_prompts(path) == [
        PromptRecord("2+3=", "5", f"{path}, line 1"),
        PromptRecord(tuple(CHAT), "", f"{path}, line 2"),
    ]


def test_text_is_utf8_and_other_line_ends_belong_to_it(path):
    text = "\u00e4\u2028\u4f60\U0001f600"
    path.write_bytes(json.dumps({"prompt": text, "label": text}, ensure_ascii=False).encode("utf-8") + b"\n")
    assert read_prompts(str(path)) == [PromptRecord(text, text, f"{path}, line 1")]


def test_keys_have_other_names(path):
    path.write_text('{"question": "2+3=", "answer": "5", "label": 7}\n')
    assert read_prompts(path, input_key="question", label_key="answer")[0][:2] == ("2+3=", "5")


GOOD = b'{"prompt": "a", "label": "b"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty", "'prompt' and 'label'"]),
        (GOOD + b"\n", ["line 2", "one JSON object"]),
        (GOOD + GOOD[:-3], ["line 2", "one JSON object", "repair"]),
        (GOOD + b'["a"]\n', ["line 2", "one JSON object", '["a"]']),
        (GOOD + GOOD + b"\xff\n", ["line 3", "not UTF-8", "byte 0", "convert"]),
        (GOOD + b'{"prompt": "a"}\n', ["line 2", "'label' is missing", "['prompt']"]),
        (GOOD + b'{"label": "a"}\n', ["line 2", "'prompt' is missing", "['label']"]),
        (b'{"prompt": "a", "label": "b", "label": "c"}', ["line 1", "'label' is there twice"]),
        (b'{"prompt": [{"role": "a", "role": "b", "content": ""}], "label": ""}', ["'role' is there twice"]),
        (b'{"prompt": "a", "label": 5}', ["line 1", "'label' must be text, got 5", "quotation marks"]),
        (b'{"prompt": "a", "label": null}', ["'label' must be text, got null"]),
        (b'{"prompt": " \\n", "label": "b"}', ["line 1", "'prompt' must be a text that is not blank"]),
        (b'{"prompt": [], "label": "b"}', ["'prompt' must be", "got []"]),
        (b'{"prompt": ["a"], "label": "b"}', ["'prompt' must be", '["a"]']),
        (b'{"prompt": [{"role": "user"}], "label": "b"}', ["'prompt' must be", "content"]),
        (b'{"prompt": [{"role": "user", "content": 1}], "label": "b"}', ["'prompt' must be"]),
    ],
)
def test_what_cannot_be_asked_is_named(path, content, words):
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_prompts(path)
    assert [word for word in [str(path), *words] if word not in str(error.value)] == []


def test_a_file_that_is_not_there(path):
    with pytest.raises(FileNotFoundError):
        read_prompts(path)


@given(size=st.integers(1, 12), count=st.integers(1, 30), rollouts=st.integers(1, 8), seed=st.integers(0, 9))
@PROPERTY
def test_every_epoch_asks_each_prompt_once(size, count, rollouts, seed):
    stream = PromptStream(records(size), seed)
    asked = [label for number in range(rollouts) for label in labels(stream.prompts(number, count))]
    assert len(asked) == rollouts * count
    epochs = [asked[begin : begin + size] for begin in range(0, len(asked), size)]
    assert all(Counter(epoch) == Counter(range(size)) for epoch in epochs if len(epoch) == size)
    assert len(set(epochs[-1])) == len(epochs[-1])


def test_a_resumed_run_asks_what_an_uninterrupted_one_does():
    stream, resumed = (PromptStream(records(7), seed=3) for _ in range(2))
    asked = [stream.prompts(number, 5) for number in range(6)]
    assert [resumed.prompts(number, 5) for number in (4, 5)] == asked[4:]


def test_the_size_of_a_rollout_does_not_change_the_order():
    stream = PromptStream(records(7), seed=3)
    assert stream.prompts(0, 6) + stream.prompts(1, 6) == stream.prompts(0, 12)


def test_seeds_and_epochs_have_orders_of_their_own():
    stream, other = PromptStream(records(20), seed=3), PromptStream(records(20), seed=4)
    first, second = labels(stream.prompts(0, 20)), labels(stream.prompts(1, 20))
    assert len({tuple(first), tuple(second), tuple(labels(other.prompts(0, 20))), tuple(range(20))}) == 4


def test_evaluation_is_always_the_same():
    stream = PromptStream(records(7), seed=3, evaluation=records(4, "e"))
    assert stream.evaluation_prompts(3) == records(4, "e")[:3]
    assert stream.evaluation_prompts(4) == records(4, "e")


@pytest.mark.parametrize(("given", "count"), [(4, 5), (4, 0), (0, 1)])
def test_no_more_evaluation_than_there_is(given, count):
    stream = PromptStream(records(7), seed=3, evaluation=records(given, "e"))
    with pytest.raises(ValueError, match=rf"count must be in \[1, {given}\].*got {count}"):
        stream.evaluation_prompts(count)


def test_evaluation_does_not_ask_what_training_asks():
    chat = PromptRecord(tuple(CHAT), "5", "train, line 9")
    again = PromptRecord(tuple(dict(reversed(message.items())) for message in CHAT), "5", "eval, line 2")
    with pytest.raises(ValueError, match=r"eval, line 2: .* in training as well, train, line 9"):
        PromptStream([*records(3), chat], seed=0, evaluation=[*records(2, "e"), again])


def test_a_stream_needs_prompts():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], seed=0)


@pytest.mark.parametrize("arguments", [(-1, 4), (0, 0)])
def test_arguments_are_checked(arguments):
    with pytest.raises(ValueError, match="rollout_id must be >= 0 and count >= 1, got {} and {}".format(*arguments)):
        PromptStream(records(3), seed=0).prompts(*arguments)
