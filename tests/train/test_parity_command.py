"""The comparison with other implementations: known values, known differences, and what a user is told."""

import argparse

import pytest
import torch

from p3o_train import parity
from p3o_train.parity import (
    AGAINST,
    TOLERANCE,
    TokenBatch,
    add_parity_arguments,
    compare,
    load_batch,
    run_parity,
    seeded_batch,
)
from p3o_train.rollout_files import write_rollout
from p3o_train.types import Sample

RATIOS = torch.tensor([1.0, 2.0, 0.5, 4.0])


def golden() -> TokenBatch:
    behavior = torch.full((4,), -2.0)
    return TokenBatch(behavior + RATIOS.log(), behavior, torch.tensor([1.0, -1, 2, -0.5]), torch.ones(4).bool())


def rows_of(batch: TokenBatch, against: str, **options: str) -> dict[str, tuple[float, ...]]:
    return {row.quantity: tuple(row)[1:] for row in compare(batch, against, **options)}


def command(*flags: object) -> int:
    return run_parity(add_parity_arguments(argparse.ArgumentParser()).parse_args([str(flag) for flag in flags]))


@pytest.mark.parametrize("against", AGAINST)
def test_both_sides_give_the_published_numbers(against):
    rows = rows_of(golden(), against)
    gradient = torch.tensor([-0.66176471, 0.83088235, -1.33823531, 0.58455882]) / 4
    # printed with 7 to 9 digits
    for side in (0, 1):
        assert rows["loss"][side] == pytest.approx(0.8332795, abs=2e-7)
        assert rows["gradient"][side] == pytest.approx(gradient.norm().item(), rel=1e-6)
        if against != "trl":
            assert rows["ess"][side] == pytest.approx(0.6617647055709343, rel=1e-7)


@pytest.mark.parametrize("against", AGAINST)
def test_a_large_batch_agrees_to_float32(against, capsys):
    assert command("--against", against, "--seed", 3) == 0
    text = capsys.readouterr().out
    assert against in text and "gradient" in text and "valid tokens of 4096" in text


def test_squares_in_float32_overflow_and_their_ess_falls_back_to_one():
    batch = golden()._replace(log_probs=torch.tensor([43.0, -2.0, -2.0, -2.0]))
    ess = rows_of(batch, "feynrl")["ess"]
    assert ess[0] == pytest.approx(0.25, rel=1e-6)  # one token of four carries everything
    assert ess[1] == 1.0


def test_the_pull_back_points_the_other_way_below_minus_ten():
    batch = golden()._replace(log_probs=torch.tensor([-22.0, -2.0, -2.0, -2.0]))
    assert rows_of(batch, "relax")["gradient"][3] < TOLERANCE
    assert rows_of(batch, "feynrl", kl_mode="proxy")["gradient"][3] < TOLERANCE
    ours, theirs, apart, _ = rows_of(batch, "feynrl")["gradient"]
    away = 1 - 3**2 / (4 * 3)  # 1 - e
    assert ours == pytest.approx(22025.47 * away / 4, rel=1e-5) and theirs < 1
    # opposite signs: the distance is the sum of both slopes
    assert apart == pytest.approx(22026.47 * away / 4, rel=1e-5)


@pytest.mark.parametrize("against", AGAINST)
def test_a_masked_nan_reaches_their_gradient_alone(against):
    batch = golden()._replace(mask=torch.tensor([True, True, True, False]))
    batch.advantages[3] = float("nan")
    ours, theirs, *_ = rows_of(batch, against)["gradient"]
    assert ours == ours and theirs != theirs


def test_gradients_of_equal_norm_are_told_apart(monkeypatch, tmp_path):
    turned = golden()._replace(advantages=-golden().advantages)

    def opposite(batch, ess):
        """The gradient of the published numbers with every sign turned."""
        slopes = torch.tensor([0.66176471, -0.83088235, 1.33823531, -0.58455882])
        return parity._Theirs(None, (slopes * batch.log_probs).sum())

    monkeypatch.setattr(parity, "_trl", opposite)
    ours, theirs, apart, _ = rows_of(golden(), "trl")["gradient"]
    assert ours == pytest.approx(theirs, rel=1e-6) and apart == pytest.approx(2 * ours, rel=1e-6)
    torch.save(turned._asdict(), (file := tmp_path / "turned.pt"))
    assert command("--against", "trl", "--batch", file) == 1


def test_a_dumped_batch_is_compared(tmp_path, capsys):
    batch = seeded_batch(tokens=60)
    shaped = {name: tensor.view(6, 10) for name, tensor in batch._asdict().items()}
    torch.save(shaped | {"mask": shaped["mask"].int()}, tmp_path / "dump.pt")
    assert command("--against", "relax", "--batch", tmp_path / "dump.pt") == 0
    assert f"{int(batch.mask.sum())} valid tokens of 60" in capsys.readouterr().out


def test_a_rollout_moves_by_the_drift(tmp_path):
    samples = [
        Sample.from_lists([1, 2, 3, 4], 3, [-1.0, None, -0.5], [1, 0, 1], sample_id="a", reward=1.0),
        Sample.from_lists([1, 5, 6], 2, [-2.0, -3.0], sample_id="b", reward=0.0),
    ]
    path = write_rollout(tmp_path, 7, samples, {})
    batch = load_batch(path, drift=0.25, seed=1)
    moved = (batch.log_probs - batch.behavior_log_probs)[batch.mask]
    noise = torch.randn(5, generator=torch.Generator().manual_seed(1))[batch.mask]
    torch.testing.assert_close(moved, 0.25 * noise, rtol=0, atol=1e-6)  # float32 sums of numbers near 3
    assert batch.mask.tolist() == [True, False, True, True, True]
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert batch.advantages.tolist() == pytest.approx([half] * 3 + [-half] * 2)
    assert command("--against", "feynrl", "--batch", path) == 0


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"log_probs": torch.zeros(2)}, "behavior_log_probs, advantages, mask missing"),
        (
            {name: torch.zeros(2 + (name == "mask")) for name in TokenBatch._fields},
            r"shapes must be equal, got log_probs \(2,\).*mask \(3,\)",
        ),
    ],
)
def test_a_dump_that_does_not_fit_is_refused(tmp_path, content, text):
    torch.save(content, tmp_path / "dump.pt")
    with pytest.raises(ValueError, match=text):
        load_batch(tmp_path / "dump.pt")


def test_refusals_are_told_on_stderr(tmp_path, capsys):
    assert command("--against", "relax", "--batch", tmp_path / "none.pt") == 2
    assert command("--against", "relax", "--batch", tmp_path / "batch.npz") == 2
    torch.save(golden()._replace(log_probs=torch.full((4,), 900.0))._asdict(), tmp_path / "wild.pt")
    assert command("--against", "feynrl", "--batch", tmp_path / "wild.pt") == 2
    text = capsys.readouterr().err
    assert "none.pt" in text and "must be a .pt file" in text and "invalid" in text
    with pytest.raises(ValueError, match="against must be one of feynrl, relax, trl; got 'verl'"):
        compare(golden(), "verl")
