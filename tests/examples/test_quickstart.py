"""The quickstart and the drop-in example: they run, and what they compare P3O with is what it claims to be."""

import csv
import functools
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = ["--steps", "2", "--seeds", "1", "--lag", "1", "--updates-per-rollout", "2", "--on-policy-steps", "1"]


def load(name: str) -> ModuleType:
    """Import a script the way Python sees it when it is run: with its folder on the path."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


toy = load("toy_task")


@pytest.fixture
def quickstart() -> Iterator[ModuleType]:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    threads = torch.get_num_threads()
    yield load("quickstart")
    torch.set_num_threads(threads)


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def rollout() -> tuple[torch.nn.Module, "toy.Rollout"]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = toy.TinyTransformer()
    return model, toy.sample(model, toy.make_prompts(4, generator), generator)


def test_a_short_run_writes_every_step_and_the_curves(
    quickstart: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "train", functools.partial(quickstart.train, prompts=4))
    (tmp_path / "notes.txt").write_text("not the demo's")
    assert quickstart.main([*SHORT, "--out", str(tmp_path)]) == 0

    rows = read_rows(tmp_path / "quickstart.csv")
    assert tuple(rows[0]) == quickstart.COLUMNS
    steps = [(row["scenario"], row["method"], int(row["step"])) for row in rows]
    expected = [("on-policy", method, 0) for method in toy.METHODS]
    assert steps == expected + [("stale", method, step) for method in toy.METHODS for step in range(2)]
    assert all(0 < float(row["ess"]) <= 1 and 0 <= float(row["reward"]) <= 1 for row in rows)

    assert (tmp_path / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "quickstart.csv", "quickstart.png"}
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n{label}") == 2 for label in toy.METHODS.values())


def test_on_policy_the_ess_is_one_and_the_methods_agree(quickstart: ModuleType) -> None:
    scenario = quickstart.Scenario("on-policy", lag=0, updates_per_rollout=1, steps=3, seeds=1)
    runs = {method: list(quickstart.train(method, 0, scenario, prompts=4)) for method in toy.METHODS}
    for numbers in runs.values():
        assert [step["ess"] for step in numbers] == pytest.approx([1.0] * 3, abs=1e-5)
        assert [step["ratio_mean"] for step in numbers] == pytest.approx([1.0] * 3, abs=1e-5)
        assert [step["reward"] for step in numbers] == [step["reward"] for step in runs["p3o"]]


def test_rollouts_wait_for_lag_newer_ones(quickstart: ModuleType) -> None:
    scenario = quickstart.Scenario("stale", lag=2, updates_per_rollout=1, steps=4, seeds=1)
    drift = [abs(step["ratio_mean"] - 1) + 1 - step["ess"] for step in quickstart.train("pg", 0, scenario, prompts=4)]
    assert drift[0] < 1e-5  # the first update meets data of the initial weights
    assert all(later > 1e-4 for later in drift[1:])


def test_interruption_keeps_the_rows_so_far(
    quickstart: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(method: str, seed: int, scenario: object) -> Iterator[dict[str, float]]:
        yield {"reward": 0.5, "ess": 1.0, "cap": 1.0, "ratio_mean": 1.0, "loss": 0.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart, "train", interrupted)
    assert quickstart.main([*SHORT, "--out", str(tmp_path)]) == 130
    assert [row["reward"] for row in read_rows(tmp_path / "quickstart.csv")] == ["0.5"]
    assert str(tmp_path / "quickstart.csv") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps: must be at least 1"),
        (["--lag", "-1"], "--lag: must be at least 0"),
        (["--seeds", "two"], "--seeds: invalid"),
        (["--methods", "ppo"], "--methods: invalid choice: 'ppo'"),
        (["--out", __file__], "--out: File exists"),
    ],
)
def test_a_wrong_flag_is_named(
    quickstart: ModuleType, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        quickstart.main(flags)
    assert message in capsys.readouterr().err


def test_recorded_log_probs_are_those_of_a_full_forward(rollout: tuple[torch.nn.Module, "toy.Rollout"]) -> None:
    model, sampled = rollout
    assert sampled.behavior_log_probs.dtype == torch.float32
    with torch.no_grad():
        recomputed = toy.answer_log_probs(model, sampled.tokens)
    torch.testing.assert_close(sampled.behavior_log_probs, recomputed, rtol=1e-5, atol=1e-5)


def test_a_group_shares_its_prompt_and_the_verifier_counts_digits(
    rollout: tuple[torch.nn.Module, "toy.Rollout"],
) -> None:
    prompts = rollout[1].tokens[:, : toy.PROMPT_LENGTH]
    groups = prompts.view(4, toy.GROUP_SIZE, toy.PROMPT_LENGTH)
    assert (groups == groups[:, :1]).all() and (prompts[:, -1] == toy.SEPARATOR).all()
    prompt = torch.tensor([[1, 2, 3, 4, 5, toy.SEPARATOR]])
    assert toy.verify(prompt, torch.tensor([[5, 4, 3, 2, 1]])).tolist() == [1.0]
    assert toy.verify(prompt, torch.tensor([[5, 4, 0, 0, 0]])).tolist() == pytest.approx([0.4])


def test_group_advantages() -> None:
    advantages = toy.group_advantages(torch.tensor([[0.0, 1.0], [0.5, 0.5]]))
    torch.testing.assert_close(advantages, torch.tensor([[-math.sqrt(0.5), math.sqrt(0.5)], [0.0, 0.0]]))


def test_baseline_losses_match_a_hand_computed_number() -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5 with advantages 2, 2, -1, -1: clipped terms 2.4, 1.0, -1.5, -0.8."""
    behavior = torch.tensor([-1.0, -1.0, -2.0, -2.0])
    log_probs = behavior + torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    advantages = torch.tensor([2.0, 2.0, -1.0, -1.0])
    assert toy.grpo_loss(log_probs, behavior, advantages).item() == pytest.approx(-(2.4 + 1.0 - 1.5 - 0.8) / 4)
    plain = 2 * (math.log(1.5) - 1) + 2 * (math.log(0.5) - 1) - (math.log(1.5) - 2) - (math.log(0.5) - 2)
    assert toy.policy_gradient_loss(log_probs, advantages).item() == pytest.approx(-plain / 4)


def test_drop_in_gives_the_eager_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    load("drop_in").main()
    printed = capsys.readouterr().out.split()
    assert float(printed[printed.index("eager") + 1]) == pytest.approx(float(printed[printed.index("fused") + 1]))
    assert float(printed[-1]) < 1e-8
