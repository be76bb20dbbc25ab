"""Recorded log-probs against those computed again: temperature, alignment, distance."""

import math

import pytest
import torch

from p3o_train.contract import ContractViolation
from p3o_train.probe import Mismatch, best_lag, check_alignment, mismatch_summary, probe_temperature
from tests.train.recordings import sampled


def made(length, seed=0, temperature=1.0, vocab=40):
    """Log-probs of sampled tokens of a flat-ish model; the tokens are those of temperature 0.7, whatever is asked."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(length, vocab, generator=generator, dtype=torch.float64) * 2
    chosen = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)
    return (logits / temperature).log_softmax(-1).gather(-1, chosen).squeeze(-1).float()


COOL = {"scaled": made(64, temperature=0.7), "raw": made(64)}


def test_the_declared_kind_fits():
    noise = torch.linspace(-1, 1, 64) * 5e-3
    for kind in ("scaled", "raw"):
        probe = probe_temperature(COOL[kind] + noise, COOL, kind, temperature=0.7)
        assert probe.is_decisive
        # linspace has the mean magnitude 0.5 n / (n - 1)
        assert probe.errors[kind] == pytest.approx(5e-3 * 0.5 * 64 / 63, rel=1e-3)
        other = "raw" if kind == "scaled" else "scaled"
        want = float((COOL[kind].double() + noise.double() - COOL[other].double()).abs().mean())
        assert probe.errors[other] == pytest.approx(want, rel=1e-6)


def test_at_temperature_1_both_are_one():
    probe = probe_temperature(made(8), {"scaled": made(8), "raw": made(8)}, "raw", temperature=1.0)
    assert not probe.is_decisive and probe.errors == {"scaled": 0.0, "raw": 0.0}


def test_tokens_that_are_certain_decide_nothing():
    one = torch.full((20,), -1e-5)
    assert not probe_temperature(one, {"scaled": one * 0.1, "raw": one}, "scaled", temperature=0.5).is_decisive


def test_another_kind_than_declared():
    with pytest.raises(ContractViolation, match=r"declared 'raw'.*64 tokens at temperature 0\.7.*they are 'scaled'"):
        probe_temperature(COOL["scaled"], COOL, "raw", temperature=0.7)
    with pytest.raises(ContractViolation, match=r"they are 'raw'; declare that, or let the engine return 'scaled'"):
        probe_temperature(COOL["raw"], COOL, "scaled", temperature=0.7)


def test_divided_log_probs_are_recognised():
    with pytest.raises(ContractViolation, match=r"divided by the temperature \(difference [0-9.e-]+\)"):
        probe_temperature(COOL["raw"] / 0.7, COOL, "scaled", temperature=0.7)


def test_kept_mass_is_recognised():
    mass = torch.linspace(0.8, 0.95, 64)
    for constant in (torch.tensor(0.895), mass):
        with pytest.raises(ContractViolation, match=rf"kept tokens with {constant.mean().item():.3g} of"):
            probe_temperature(COOL["scaled"] - constant.log(), COOL, "scaled", temperature=0.7)


def test_nothing_fits():
    for wrong in (made(64, seed=5), COOL["scaled"] - 0.3, COOL["scaled"] * torch.nan):
        with pytest.raises(ContractViolation, match="none of them fits"):
            probe_temperature(wrong, COOL, "scaled", temperature=0.7)


def test_a_tolerance_for_coarse_engines():
    coarse = COOL["scaled"] + torch.tensor([0.03, -0.03]).repeat(32)
    with pytest.raises(ContractViolation):
        probe_temperature(coarse, COOL, "scaled", temperature=0.7)
    assert probe_temperature(coarse, COOL, "scaled", temperature=0.7, tolerance=5e-2).is_decisive


def test_what_cannot_be_probed():
    with pytest.raises(ValueError, match=r"'truncated' is not among the candidates \['raw', 'scaled'\]"):
        probe_temperature(COOL["raw"], COOL, "truncated", temperature=0.7)
    for values in (COOL["raw"][:3], COOL["raw"][:0]):
        with pytest.raises(ValueError, match="must have one shape"):
            probe_temperature(values, COOL, "raw", temperature=0.7)
    with pytest.raises(ValueError, match="a token at least"):
        probe_temperature(torch.zeros(0), {"raw": torch.zeros(0)}, "raw", temperature=0.7)


@pytest.mark.parametrize("lag", [-2, -1, 0, 1, 2])
def test_best_lag(lag):
    values = made(40)
    assert best_lag(values.roll(lag), values) == lag


def test_best_lag_of_what_fits_everywhere_or_nowhere():
    same = torch.full((10,), -1.0)
    assert best_lag(same, same) == 0
    assert best_lag(torch.zeros(0), torch.zeros(0)) == best_lag(same[:1], same[:1]) == 0
    values = made(3)
    assert best_lag(values, values) == 0
    assert best_lag(made(12).roll(3), made(12), max_lag=3) == 3


def test_best_lag_without_masked_tokens():
    values = made(40)
    recorded, mask = values.roll(1), torch.ones(40, dtype=torch.bool)
    recorded[10:20], mask[10:20] = torch.nan, False
    assert best_lag(recorded, values, mask=mask) == 1


def shifted(lag, length=30, count=3, **fields):
    values = [made(length, seed=seed) for seed in range(count)]
    samples = [
        sampled(range(3, 3 + length), value.roll(lag), sample_id=f"s{seed}", **fields)
        for seed, value in enumerate(values)
    ]
    return samples, values


def test_aligned_responses_pass():
    check_alignment(*shifted(0))
    check_alignment(*shifted(0, length=2, count=40))
    check_alignment([], [])


@pytest.mark.parametrize(("lag", "words"), [(1, "1 token too late"), (-1, "1 token too early"), (2, "2 tokens")])
def test_a_shift_is_refused(lag, words):
    with pytest.raises(ContractViolation, match=rf"sample 's0': behavior_log_probs come {words}.* shifted"):
        check_alignment(*shifted(lag))


def test_one_shifted_response_among_others():
    samples, values = shifted(0)
    samples[2].behavior_log_probs.copy_(values[2].roll(1))
    with pytest.raises(ContractViolation, match="sample 's2'"):
        check_alignment(samples, values)


def test_short_responses_are_judged_together():
    with pytest.raises(ContractViolation, match=r"20 short samples, 's0' the first: .*1 token too late"):
        check_alignment(*shifted(1, length=6, count=20))
    # at lag 2 each has 4 pairs, and 12 are not enough
    check_alignment(*shifted(1, length=6, count=3))
    check_alignment(*shifted(1, length=1, count=50))


def test_weights_that_moved_raise_no_alarm():
    """Log-ratios with a deviation of 0.3 or 3 nats, and a repetition that fits any shift."""
    for size in (0.3, 3.0):
        samples, values = shifted(0, count=20)
        moved = [value + torch.randn(30, generator=torch.Generator().manual_seed(9)) * size for value in values]
        check_alignment(samples, moved)
    check_alignment([sampled(range(3, 33), [-0.5] * 30)], [torch.full((30,), -0.9)])
    # probabilities above 0.9: no shift of them differs by 0.1 nats
    sure = -torch.rand(30, generator=torch.Generator().manual_seed(1)) * 0.1
    check_alignment([sampled(range(3, 33), sure.roll(1))], [sure])


def test_masked_tokens_are_left_out():
    mask = [1] * 10 + [0] * 10 + [1] * 20
    samples, values = shifted(0, length=40, mask=mask)
    samples[0].behavior_log_probs[10:20] = torch.nan
    check_alignment(samples, values)
    samples, values = shifted(1, length=40, mask=mask)
    values[0][12] = torch.nan
    with pytest.raises(ContractViolation, match="1 token too late"):
        check_alignment(samples, values)


def test_tensors_that_do_not_belong_to_the_samples():
    samples, values = shifted(0)
    with pytest.raises(ValueError, match="one tensor for each of 3 samples, got 2"):
        check_alignment(samples, values[:2])
    with pytest.raises(ValueError, match=r"'s0': recomputed must have shape \(30,\), got \(29,\)"):
        check_alignment(samples, [value[:29] for value in values])


def test_mismatch_summary():
    recorded, recomputed = torch.tensor([-1.0, -2.0, math.nan]), torch.tensor([-1.5, -1.0, -9.0])
    mask = torch.tensor([True, True, False])
    assert mismatch_summary(recorded, recomputed, mask) == Mismatch(0.75, 1.0, 2)
    assert mismatch_summary(recorded, recomputed, ~mask).num_tokens == 1
    assert math.isnan(mismatch_summary(recorded, recomputed).mean)
    assert mismatch_summary(recorded, recomputed, mask & False) == Mismatch(0.0, 0.0, 0)
    assert mismatch_summary(torch.zeros(2, 3), torch.ones(2, 3)) == Mismatch(1.0, 1.0, 6)
    with pytest.raises(ValueError, match="must have one shape"):
        mismatch_summary(recorded, recomputed[:2])
