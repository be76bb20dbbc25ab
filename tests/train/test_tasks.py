"""Tasks: prompts that a resumed run asks again, tokens of a real tokenizer, and rewards worked out by hand."""

import re

import pytest

from p3o_train.prompt_data import PromptRecord, PromptStream
from p3o_train.reward_workers import RewardFailed, RewardWorkers
from p3o_train.tasks import DigitSums, Prompt, ReverseDigits, Task, TextTask

TASK = ReverseDigits(digits=3)
END = TASK.end_token_id
EARLIER = [(2, 3, 10), (3, 4, 10), (0, 8, 10), (8, 1, 10)]


def test_a_prompt_and_its_answer():
    for prompt in TASK.prompts(0, 20):
        *digits, equals = prompt.token_ids
        assert len(digits) == 3 and all(0 <= digit <= 9 for digit in digits) and equals == 10
        assert prompt.label == "".join(str(digit) for digit in reversed(digits))
        assert TASK.reward(prompt, [*reversed(digits), END]) == 1.0


def test_a_rollout_asks_the_same_again_and_another_asks_others():
    assert TASK.prompts(4, 8) == TASK.prompts(4, 8)
    assert TASK.prompts(4, 8) != TASK.prompts(5, 8)
    assert TASK.prompts(4, 8) != ReverseDigits(digits=3, seed=1).prompts(4, 8)
    assert TASK.evaluation_prompts(8) == TASK.evaluation_prompts(8)
    assert TASK.evaluation_prompts(8) != ReverseDigits(digits=3, seed=1).evaluation_prompts(8)
    assert TASK.evaluation_prompts(8) != TASK.prompts(0, 8)


def test_the_numbers_are_those_that_earlier_runs_were_asked():
    assert [prompt.token_ids for prompt in ReverseDigits(seed=0).prompts(0, 4)] == EARLIER


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ((4, 1, 3, END), 1.0),
        ((4, 1, 3), 0.75),
        ((4, 2, 3, END), 0.75),
        ((END,), 0.0),
        ((), 0.0),
        ((4, END), 0.25),
        ((4, 1, 3, 5, END), 3 / 5),
    ],
)
def test_reward(response, reward):
    prompt = Prompt((3, 1, 4, 10), "413")
    assert TASK.reward(prompt, response) == pytest.approx(reward)
    assert TASK.rewards([prompt, prompt], [(), response], ["a", "b"]) == [0.0, pytest.approx(reward)]


SPECIAL = ["<end>", "<user>", "<model>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One of transformers with a token for every byte."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", chat_template=TEMPLATE)


def text_task(tokenizer, inputs, *, reward="exact", chat=False, evaluation=(), **options):
    records = [PromptRecord(one, "7", f"data, line {number}") for number, one in enumerate(inputs, 1)]
    held_out = [PromptRecord(one, "8", f"held out, line {number}") for number, one in enumerate(evaluation, 1)]
    stream = PromptStream(records, 0, held_out)
    return TextTask(stream, tokenizer, RewardWorkers(reward), apply_chat_template=chat, **options)


def shown(tokenizer, prompt):
    return tokenizer.decode(list(prompt.token_ids))


def test_a_text_is_asked_as_it_is(tokenizer):
    task = text_task(tokenizer, ["3+4=", "\u00e4"], evaluation=["5+3="])
    assert sorted(shown(tokenizer, prompt) for prompt in task.prompts(0, 2)) == ["3+4=", "\u00e4"]
    (prompt,) = task.evaluation_prompts(1)
    assert (shown(tokenizer, prompt), prompt.label) == ("5+3=", "8")
    assert task.prompts(7, 2) == task.prompts(7, 2)


def test_a_chat_is_asked_through_the_template(tokenizer):
    messages = ({"role": "model", "content": "hello"}, {"role": "user", "content": "2?"})
    task = text_task(tokenizer, ["1?", messages], chat=True)
    asked = sorted(shown(tokenizer, prompt) for prompt in task.prompts(0, 2))
    assert asked == ["<model>hello<end><user>2?<end><model>", "<user>1?<end><model>"]


def test_a_chat_needs_the_template(tokenizer):
    task = text_task(tokenizer, [({"role": "user", "content": "1?"},)])
    with pytest.raises(ValueError, match="data, line 1: the prompt is a chat; set apply_chat_template=True"):
        task.prompts(0, 1)


def test_what_a_text_task_says_of_its_tokens(tokenizer):
    task = text_task(tokenizer, ["1?"])
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert (task.vocab_size, task.stop_token_ids, task.pad_token_id) == (259, (end,), end)
    task = text_task(tokenizer, ["1?"], stop_token_ids=[5, end])
    assert (task.stop_token_ids, task.pad_token_id) == ((5, end), 5)
    padded = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>", pad_token="<user>")
    assert text_task(padded, ["1?"]).pad_token_id == padded.pad_token_id != end


def test_rewards_see_the_text_without_special_tokens(tokenizer):
    task = text_task(tokenizer, ["3+4="], reward="exact")
    prompts = [Prompt((1,), "7"), Prompt((1,), "8"), Prompt((1,), "8")]
    responses = [tokenizer.encode(text) for text in ("7<end>", "<model>8", "7")]
    assert task.rewards(prompts, responses, ["a", "b", "c"]) == [1.0, 1.0, 0.0]


def test_the_sample_of_a_reward_that_fails_is_named(tokenizer):
    task = text_task(tokenizer, ["3+4="], reward="digits")
    with pytest.raises(RewardFailed, match="sample 'b'"):
        task.rewards([Prompt((1,), "7"), Prompt((1,), "x")], [[1], [2]], ["a", "b"])


def test_closing_a_task_closes_its_workers(tokenizer):
    task, closed = text_task(tokenizer, ["3+4="]), []
    task._workers.close = lambda: closed.append(True)
    task.close()
    assert closed == [True]


def test_a_tokenizer_must_have_what_is_asked_of_it(tokenizer):
    bare = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=r"no end token .* pass stop_token_ids"):
        text_task(bare, ["1?"])
    assert text_task(bare, ["1?"], stop_token_ids=[3]).stop_token_ids == (3,)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        text_task(bare, ["1?"], chat=True, stop_token_ids=[3])


def test_sums_and_their_answers(tokenizer):
    task = DigitSums(tokenizer, seed=1)
    asked = [*task.prompts(0, 100), *task.evaluation_prompts(20)]
    for prompt in asked:
        *examples, question = shown(tokenizer, prompt).split("\n")
        assert len(examples) == 2
        for line in [*examples, question + prompt.label]:
            one, other, total = map(int, re.fullmatch(r"(\d)\+(\d)=(\d+)", line).groups())
            assert one + other == total
    assert {len(prompt.label) for prompt in asked} == {1, 2}


def test_sums_of_a_rollout_are_its_own(tokenizer):
    task = DigitSums(tokenizer, seed=1)
    streams = [task.prompts(0, 8), task.prompts(1, 8), task.evaluation_prompts(8), DigitSums(tokenizer).prompts(0, 8)]
    assert task.prompts(0, 8) == streams[0] and task.evaluation_prompts(8) == streams[2]
    assert len({tuple(stream) for stream in streams}) == 4


def test_a_sum_ends_with_its_line_and_the_first_number_counts(tokenizer):
    task = DigitSums(tokenizer)
    assert [tokenizer.decode([token]) for token in task.stop_token_ids] == ["\n", "<end>"]
    responses = [tokenizer.encode(text) for text in ("7\n", "7<end>", "17\n", "7+", "")]
    assert task.rewards([Prompt((1,), "7")] * 5, responses, list("abcde")) == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_the_end_of_a_line_must_be_a_token(tokenizer):
    class Split:
        eos_token_id = 0

        def encode(self, text, add_special_tokens):
            return [1, 2]

    with pytest.raises(ValueError, match=r"end of a line must be one token, got \[1, 2\]"):
        DigitSums(Split())


def test_all_have_what_a_trainer_uses(tokenizer):
    wanted = {name for name in vars(Task) if not name.startswith("_")}
    assert len(wanted) == 8
    for task in (TASK, text_task(tokenizer, ["1?"]), DigitSums(tokenizer)):
        assert [name for name in wanted if not hasattr(task, name)] == []
        task.close()
