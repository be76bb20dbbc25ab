"""What responses are worth, by hand, and names of rewards that lead nowhere."""

import sys

import pytest

from p3o_train import rewards
from p3o_train.rewards import exact_match, first_integer, resolve_reward


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [("yes", "yes", 1), (" yes\n", "yes", 1), ("yes", "yes ", 1), ("Yes", "yes", 0), ("yes.", "yes", 0), ("", "", 1)],
)
def test_exact(response, label, value):
    assert exact_match(response, label) == value


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("7", "7", 1),
        (" 7\n5+1=6", "7", 1),
        ("the sum is 7.", "7", 1),
        ("17", "7", 0),
        ("71", "7", 0),
        ("6 or 7", "7", 0),
        ("7.5", "7", 0),
        ("1,000", "1", 1),
        ("-7", "7", 0),
        ("-7", "-7", 1),
        ("10-7", "10", 1),
        ("+7", "7", 1),
        ("007", "7", 1),
        ("-0", "0", 1),
        ("000", "0", 1),
        ("70", "7", 0),
        ("7", " 07 ", 1),
        ("seven", "7", 0),
        ("", "7", 0),
        ("\u0667", "7", 0),
    ],
)
def test_first_integer(response, label, value):
    assert first_integer(response, label) == value


def test_first_integer_takes_numbers_that_int_refuses():
    number = "1" * 100_000
    with pytest.raises(ValueError):
        int(number)
    assert first_integer(number, number) == 1.0
    assert first_integer(number, "1") == 0.0


@pytest.mark.parametrize("label", ["", "seven", "7.5", "7 apples"])
def test_first_integer_needs_an_integer_in_the_label(label):
    with pytest.raises(ValueError, match=f"label must be an integer.*got {label!r}"):
        first_integer("7", label)


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("so the answer is $\\boxed{\\frac{1}{2}}$", "0.5", 1),
        ("0.5", "\\frac{1}{2}", 1),
        ("it is $x^2+2x+1$", "(x+1)^2", 1),
        ("$(1, 2)$", "(1,2)", 1),
        ("$(2, 1)$", "(1,2)", 0),
        ("\\boxed{3}", "\\boxed{3}", 1),
        ("\\boxed{3}", "$3$", 1),
        ("\\boxed{4}", "3", 0),
        ("no idea", "3", 0),
        ("", "3", 0),
    ],
)
def test_math(response, label, value):
    pytest.importorskip("math_verify")
    assert rewards.math_verify(response, label) == value


def test_math_works_outside_the_main_thread():
    """Where the library's own limit, a signal, would raise."""
    pytest.importorskip("math_verify")
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(rewards.math_verify, "\\boxed{3}", "3").result() == 1.0


def test_math_needs_mathematics_in_the_label():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match=r"label must be mathematics.*got ''"):
        rewards.math_verify("3", "")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module ``own_rewards`` of a user."""
    (tmp_path / "own_rewards.py").write_text(
        "import numpy\n"
        "WEIGHT = 2.0\n"
        "def length(response_text, label): return len(response_text) - len(label)\n"
        "def same(response_text, label): return response_text == label\n"
        "def single(response_text, label): return numpy.float32(0.25)\n"
        "def text(response_text, label): return '1.0'\n"
        "def nothing(response_text, label): pass\n"
        "def nan(response_text, label): return float('nan')\n"
        "def infinite(response_text, label): return float('inf')\n"
    )
    (tmp_path / "broken_rewards.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "needy_rewards.py").write_text("import absent_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("own_rewards", "broken_rewards", "needy_rewards"):
        sys.modules.pop(name, None)


def test_a_name_of_ours():
    assert resolve_reward("digits")("7\n", "7") == 1.0
    assert resolve_reward("exact")("7\n", "7.") == 0.0


@pytest.mark.parametrize(("name", "value"), [("length", 2.0), ("same", 0.0), ("single", 0.25)])
def test_a_function_of_the_user(own, name, value):
    result = resolve_reward(f"own_rewards:{name}")("abc", "d")
    assert type(result) is float
    assert result == value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exactly", ["'digits', 'exact', 'math'", "module:function", "'exactly'"]),
        ("own_rewards:", ["module:function"]),
        (":length", ["module:function"]),
        ("absent_rewards:length", ["'absent_rewards'", "ModuleNotFoundError", "PYTHONPATH"]),
        ("broken_rewards:length", ["'broken_rewards'", "RuntimeError: no licence"]),
        ("needy_rewards:length", ["'needy_rewards'", "absent_package"]),
        ("own_rewards:size", ["'own_rewards' has no function 'size'"]),
        ("own_rewards:WEIGHT", ["'WEIGHT' must be a function", "float"]),
    ],
)
def test_a_name_that_leads_nowhere(own, name, words):
    with pytest.raises(ValueError) as error:
        resolve_reward(name)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("text", TypeError, "must return a float, got '1.0' of type str"),
        ("nothing", TypeError, "got None"),
        ("nan", ValueError, "finite number, got nan"),
        ("infinite", ValueError, "finite number, got inf"),
    ],
)
def test_a_result_that_is_no_number(own, name, kind, text):
    with pytest.raises(kind, match=text):
        resolve_reward(f"own_rewards:{name}")("abc", "d")


def test_math_without_its_package(monkeypatch):
    monkeypatch.setattr(rewards.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        resolve_reward("math")
