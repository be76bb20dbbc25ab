"""The toy task: prompts that a resumed run asks again, and rewards worked out by hand."""

import pytest

from p3o_train.tasks import Prompt, ReverseDigits

TASK = ReverseDigits(digits=3)
END = TASK.end_token_id


def test_a_prompt_and_its_answer():
    for prompt in TASK.prompts(0, 20):
        *digits, equals = prompt.token_ids
        assert len(digits) == 3 and all(0 <= digit <= 9 for digit in digits) and equals == 10
        assert prompt.answer == (*reversed(digits), END)


def test_a_rollout_asks_the_same_again_and_another_asks_others():
    assert TASK.prompts(4, 8) == TASK.prompts(4, 8)
    assert TASK.prompts(4, 8) != TASK.prompts(5, 8)
    assert TASK.prompts(4, 8) != ReverseDigits(digits=3, seed=1).prompts(4, 8)


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
    prompt = Prompt((3, 1, 4, 10), (4, 1, 3, END))
    assert TASK.reward(prompt, response) == pytest.approx(reward)
