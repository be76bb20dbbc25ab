"""What behavior log-probs may be trained on: one test for each known way in which they were wrong."""

import math

import pytest
import torch

from p3o_kernels import ratio_stats
from p3o_train.contract import Contract, ContractViolation, check_response, drop_aborts
from p3o_train.probe import Mismatch, mismatch_summary, probe_temperature
from p3o_train.recording import Response, VersionSpan
from p3o_train.turns import Turn, accumulate_turns, check_turns, replace_placeholders
from p3o_train.types import Sample
from tests.train.recordings import COOL, SCALED, VOCAB, answer, check, recording, refuses, sampled

LOGITS = torch.linspace(-3, 3, 24, dtype=torch.float64).reshape(6, 4).sin() * 3


def log_probs(temperature, chosen=1):
    return (LOGITS / temperature).log_softmax(-1)[:, chosen].float()


def test_d01_raw_log_probs_with_a_trainer_at_the_temperature():
    refuses("'raw' at temperature 0.6", "needs 'scaled'", log_prob_kind="raw", temperature=0.6, contract=COOL)
    refuses("needs 'raw'", temperature=0.6, contract=Contract("raw", 0.6, VOCAB))
    both = {"scaled": log_probs(0.6), "raw": log_probs(1.0)}
    assert probe_temperature(both["scaled"], both, "scaled", temperature=0.6).is_decisive
    with pytest.raises(ContractViolation, match="they are 'raw'"):
        probe_temperature(both["raw"], both, "scaled", temperature=0.6)


def test_d02_dividing_log_probs_by_the_temperature_is_no_conversion():
    both = {"scaled": log_probs(0.6), "raw": log_probs(1.0)}
    assert abs(float((LOGITS.log_softmax(-1) / 0.6).exp().sum(-1)[0]) - 1) > 0.1
    with pytest.raises(ContractViolation, match=r"raw log-probs divided by the temperature.*only logits"):
        probe_temperature(both["raw"] / 0.6, both, "scaled", temperature=0.6)
    refuses("Dividing log-probs by the temperature", log_prob_kind="raw", temperature=0.6, contract=COOL)


KEPT = {"top_p": 0.8, "log_prob_kind": "truncated"}


def test_d03_truncated_sampling_needs_the_kept_tokens():
    refuses("'scaled' with top_p 0.8", "kept tokens alone", "set top_p 1", top_p=0.8)
    refuses("'scaled' with top_p 1.0, top_k 40", top_k=40)
    refuses("min_p 0.1", min_p=0.1)
    refuses("kept_token_ids are missing", **KEPT)
    refuses("kept_token_ids are given with log_prob_kind 'scaled'", kept_token_ids=((7,), (8,), (9,)))
    refuses("4 sets for 3 response tokens", "R + 1 offsets", kept_token_ids=((7,), (8,), (9,), (1,)), **KEPT)
    refuses("2 sets for 3 response tokens", kept_token_ids=((7,), (8,)), **KEPT)
    refuses("response token 1 are () (0), without the sampled token 8", kept_token_ids=((7,), (), (9,)), **KEPT)
    refuses("holds 50, ids are in [0, 50)", kept_token_ids=((7, 50), (8,), (9,)), **KEPT)
    refuses("repeats a token", kept_token_ids=((7, 4), (8, 4, 8), (9,)), **KEPT)
    report = check(sampled(kept_token_ids=((7, 4), (4, 8), (9, 7, 8)), **KEPT))
    assert report.truncated_samples == 1
    # tokens that do not count need no set
    check(sampled(mask=[1, 0, 1], kept_token_ids=((7, 4), (), (9,)), **KEPT))


def test_d03_neutral_truncation_passes():
    check(sampled(top_p=1.0, top_k=-1, min_p=0.0), sampled(top_k=VOCAB), sampled(top_k=0))


def test_d03_the_kept_mass_shows_in_the_numbers():
    scaled, raw = log_probs(0.6), log_probs(1.0)
    with pytest.raises(ContractViolation, match=r"kept tokens with 0\.895 of the probability"):
        probe_temperature(scaled - math.log(0.895), {"scaled": scaled, "raw": raw}, "scaled", temperature=0.6)


def test_d04_log_probs_of_the_whole_vocabulary_under_top_p():
    refuses("'scaled' with top_p 0.9", "higher probability", top_p=0.9, engine="sglang")
    full = log_probs(0.6)
    with pytest.raises(ContractViolation, match="they are 'scaled'"):
        probe_temperature(full, {"truncated": full - math.log(0.9), "scaled": full}, "truncated", temperature=0.6)


def test_d05_scores_of_a_prompt_ignore_the_temperature():
    refuses("source is 'input' at temperature 0.6", source="input", temperature=0.6, contract=COOL)
    check(sampled(source="input"))
    refuses("source must be one of ('output', 'input')", source="prompt")


@pytest.mark.parametrize("temperature", [0, -1, math.nan, math.inf, "0", True, None])
def test_d06_a_temperature_that_samples_nothing(temperature):
    with pytest.raises(ValueError, match="temperature must be a finite number > 0"):
        Contract("scaled", temperature, VOCAB)


def test_d06_a_response_of_another_temperature():
    for temperature in (0.0, math.nan, 0.61):
        refuses(f"temperature is {temperature}, the contract says 0.6", temperature=temperature, contract=COOL)
    check(sampled(temperature=0.6000000238418579), contract=COOL)  # 0.6 as float32


def test_d07_the_kind_is_mandatory():
    refuses("log_prob_kind must be one of", "got 'processed'", log_prob_kind="processed")
    refuses("got None", log_prob_kind=None)
    # an engine whose log-probs do not depend on the temperature
    both = {"scaled": log_probs(1.2), "raw": log_probs(1.0)}
    with pytest.raises(ContractViolation, match=r"declared 'scaled'.*they are 'raw'"):
        probe_temperature(log_probs(1.0), both, "scaled", temperature=1.2)


def test_d08_a_stop_token_in_one_list_alone():
    with pytest.raises(
        ContractViolation, match=r"'a': 4 log-probs for 3 response tokens after 2 of prompt.*stop token"
    ):
        check_response(*answer(log_probs=[-1.0] * 4), SCALED)
    # appended by hand: legal if masked, counted if not
    assert check(sampled(log_probs=[-1.1, -1.1, 0.0])).zero_log_prob_tokens == 1
    assert check(sampled(log_probs=[-1.1, -1.1, 0.0], mask=[1, 1, 0])).zero_log_prob_tokens == 0


def test_d09_short_log_probs_are_not_padded():
    with pytest.raises(
        ContractViolation, match=r"456 log-probs for 812 response tokens after 2 of prompt.*none is made"
    ):
        check_response(*answer([7] * 812, [-1.0] * 456), SCALED)


def test_d10_aborts_without_log_probs_are_counted_out():
    ways = [((), (), "abort"), ((7, 8), (), "abort"), ((7,), (None,), "abort"), ((7, 8), (-1.0, -2.0), "abort")]
    ways += [((), (), "stop"), ((7, 8), (), "stop")]
    responses = [Response(ids, values, recording(len(ids), finish_reason=why)) for ids, values, why in ways]
    assert drop_aborts(responses) == ([3, 4, 5], 1, 2)
    # only an abort explains it
    with pytest.raises(ContractViolation, match="0 log-probs for 2 response tokens"):
        check_response(*answer((7, 8), ()), SCALED)
    assert check(sampled(finish_reason="abort"), sampled((), sample_id="b")).aborted_samples == 1


ZEROS = [0.0] * 12


def test_d12_speculative_decoding():
    refuses("exactly 0 at all 12 valid tokens", "speculative", response=range(10, 22), log_probs=ZEROS)
    with pytest.raises(ContractViolation, match="1 log-probs for 3 response tokens"):
        check_response(*answer(log_probs=[-1.0]), SCALED)
    short = [sampled((7, 8), [0.0, 0.0], group_id=index, sample_id=f"s{index}") for index in range(4)]
    with pytest.raises(ContractViolation, match=r"'s0'.*at all 2 valid tokens.*4 of 4 samples"):
        check(*short)
    # certain tokens: a few, one nonzero among many, one alone that could be sampled
    assert check(*short[:3]).zero_log_prob_tokens == 6
    check(*short, sampled())
    check(sampled(range(10, 22), [0.0] * 11 + [-1e-7]))
    one = tuple((token,) for token in range(10, 22))
    check(sampled(range(10, 22), ZEROS, top_k=1, log_prob_kind="truncated", kept_token_ids=one))


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "None"), (math.nan, "nan"), (-math.inf, "-inf"), (math.inf, "inf")]
)
def test_d13_log_probs_that_are_none(value, shown):
    request_and_response = answer(log_probs=[-0.3, value, value])
    with pytest.raises(ContractViolation, match=rf"'a': log_probs\[1\] is {shown} \(2 such of 3 tokens\)"):
        check_response(*request_and_response, SCALED)
    check_response(*request_and_response, SCALED, loss_mask=[1, 0, 0])
    check(sampled(log_probs=[-0.3, value, value], mask=[1, 0, 0]))


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, torch.finfo(torch.float16).min])
def test_d13_minus_infinity_in_disguise(value):
    refuses("response token 2", "-inf in disguise", "mask it", log_probs=[-1.0, -1.0, value])
    assert check(sampled(log_probs=[-1.0, -1.0, value], pairing_mask=[1, 1, 0])).unpaired_tokens == 1


def test_d14_tokens_that_were_encoded_again():
    first = Turn([1, 2], [7, 8], [-1.0, -2.0])
    good = Turn([1, 2, 7, 8, 30, 31], [9], [-3.0])
    assert check_turns([first, good]) == [True, True]
    assert accumulate_turns([first, good]) == (
        [1, 2, 7, 8, 30, 31, 9],
        5,
        [-1.0, -2.0, None, None, -3.0],
        [True, True, False, False, True],
        [True] * 5,
    )
    merged = Turn([1, 2, 12, 30, 31], [9], [-3.0])  # 7, 8 have become 12
    assert check_turns([first, merged]) == [False, True]
    whole = accumulate_turns([first, merged])
    assert whole.pairing_mask == [False, False, True, True]
    sample = Sample.from_lists(*whole[:4], pairing_mask=whole.pairing_mask)
    assert sample.valid_mask.tolist() == [False, False, False, True]
    assert sample.behavior_log_probs[3] == -3.0


def test_d14_only_what_was_changed_is_masked():
    turns = [
        Turn([1], [2, 3], [-1.0, -2.0]),
        Turn([1, 2, 3, 30], [4, 5], [-3.0, -4.0], [True, False]),
        Turn([1, 2, 3, 30, 4, 6, 30], [7], [-5.0]),
    ]
    assert check_turns(turns) == [True, False, True]
    assert accumulate_turns(turns).pairing_mask == [True, True, True, False, False, True, True]
    assert accumulate_turns(turns[:2]).pairing_mask == [True, True, True, True, False]
    with pytest.raises(ContractViolation, match="2 prompt tokens of turn 0 are not the first of the 4 tokens"):
        accumulate_turns([Turn([1, 2], [3], [-1.0]), Turn([2, 3, 4], [5], [-1.0])])


def test_d14_a_turn_that_saw_less_than_the_first_prompt():
    turns = [
        Turn([1, 2, 3, 4], [7], [-1.0]),
        Turn([1], [9], [-2.0]),
        Turn([1, 2, 3, 4, 7, 30, 31], [8], [-3.0]),
    ]
    assert check_turns(turns) == [True, False, True]
    assert accumulate_turns(turns).loss_mask == [True, False, False, True]


def test_d15_placeholders_in_a_response():
    contract = Contract("scaled", 1.0, VOCAB, frozenset({8, 40}))
    refuses("response token 1 is the placeholder 8", "replace_placeholders", contract=contract)
    ids, pairing, counts = replace_placeholders([7, 8, 9], contract.placeholder_ids, 0)
    assert (ids.tolist(), pairing.tolist(), counts) == ([7, 0, 9], [True, False, True], {8: 1})
    report = check(sampled(ids.tolist(), pairing_mask=pairing), contract=contract)
    assert (report.unpaired_tokens, report.valid_tokens) == (1, 2)
    check(sampled(mask=[1, 0, 1]), contract=contract)  # output of a tool


def test_d16_a_missing_boundary_log_prob():
    """None at the first token, as engines give it where scoring starts: only where it does not count."""
    with pytest.raises(ContractViolation, match=r"log_probs\[0\] is None"):
        check_response(*answer(log_probs=[None, -1.0, -1.0]), SCALED)
    check_response(*answer(log_probs=[None, -1.0, -1.0]), SCALED, loss_mask=[0, 1, 1])


def test_d17_noise_of_the_engine():
    exact = log_probs(1.0)
    coarse = exact.bfloat16().float()
    mean, most, count = mismatch_summary(coarse, exact)
    want = (coarse.double() - exact.double()).abs()
    assert (mean, most, count) == (float(want.mean()), float(want.max()), 6)
    assert 0 < most < 0.03
    # all of them, against one in 2^16
    report = check(sampled(range(3, 9), coarse), sampled(range(3, 9), exact))
    assert report.bfloat16_tokens == 6


def test_d18_weights_that_changed_under_a_cache():
    spans = (VersionSpan(2, 0, 1), VersionSpan(3, 1, 3))
    for mode, wrong in (("in_place", True), ("retract", False), ("abort", False)):
        report = check(sampled(version_spans=spans, pause_mode=mode))
        assert report.recompute_is_wrong is wrong
        assert report.mixed_version_samples == 1
        assert report.to_dict()["rollout/recompute_is_wrong"] == float(wrong)
    # nothing changed inside
    assert not check(sampled(pause_mode="in_place")).recompute_is_wrong
    refuses("pause_mode must be None or one of", version_spans=spans, pause_mode="wait")
    refuses("pause_mode is missing", "(versions [2, 3])", version_spans=spans)


def test_d19_versions_of_a_response():
    spans = (VersionSpan(1, 0, 3), VersionSpan(3, 3, 7))
    sample = sampled(range(3, 10), version_spans=spans, pause_mode="retract", mask=[1] * 6 + [0])
    report = check(sample, version=4)
    assert sample.weight_versions.tolist() == [1, 1, 1, 3, 3, 3, 3]
    assert (report.age_mean, report.age_max) == (2.0, 3)  # ages 3 3 3 1 1 1, the last does not count


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(0, 0, 2)],
        [(0, 0, 4)],
        [(0, 1, 3)],
        [(0, 0, 1), (0, 2, 3)],
        [(0, 0, 2), (0, 1, 3)],
        [(0, 0, 0), (0, 0, 3)],
        [(0, 0, 3), (0, 3, 2)],
        [(0, 0, 3), (0, 3, 3)],
    ],
)
def test_d19_versions_must_cover_every_token_once(spans):
    spans = tuple(VersionSpan(*span) for span in spans)
    refuses("version_spans must cover tokens [0, 3) once and in order", f"({len(spans)} in all)", version_spans=spans)


def test_d19_an_age_is_not_negative():
    check(sampled(version=9))
    refuses("version 10 for tokens [0, 3), the trainer has 9", version=10)
    refuses("version -1", version=-1)
    with pytest.raises(ValueError, match="weight_version must be >= 0, got -1"):
        check(version=-1)


def clones(log_prob, groups=2, size=4, length=20, **fields):
    return [
        sampled([5 + group % 40] * length, [log_prob] * length, group_id=group, sample_id=f"g{group}.{index}", **fields)
        for group in range(groups)
        for index in range(size)
    ]


def test_d21_clones_of_one_seed():
    # 2 groups, 3 copies each, 20 tokens of log-prob -1: e^-120
    with pytest.raises(ContractViolation, match=r"'g0\.0': its group of 4 .*2 groups.*log-probability -120 .*seed"):
        check(*clones(-1.0))
    other = sampled([9] * 20, [-1.0] * 20, group_id=1)
    report = check(*clones(-1.0), other)
    assert (report.groups, report.duplicate_groups) == (2, 1)


def test_d21_a_converged_policy_is_no_clone():
    """64 groups of 8 responses of 2 tokens with probability 0.999: log-probability -0.9 in all."""
    report = check(*clones(-0.001, groups=64, size=8, length=2))
    assert (report.groups, report.duplicate_groups) == (64, 64)
    # 1e-12 is e^-27.6: 3 copies of 9 tokens
    check(*clones(-1.0, groups=1, length=9))
    with pytest.raises(ContractViolation):
        check(*clones(-1.0, groups=1, length=10))


def test_d21_only_log_probs_of_the_sampled_distribution_tell():
    fields = {"log_prob_kind": "raw", "temperature": 0.6}
    assert check(*clones(-1.0, **fields), contract=Contract("raw", 0.6, VOCAB)).duplicate_groups == 2


def test_d21_masked_log_probs_do_not_count():
    for sample in (samples := clones(-1.0, groups=1, length=10)):
        sample.loss_mask[5:] = False
        sample.behavior_log_probs[5:] = -9.0
    assert check(*samples).duplicate_groups == 1


def test_d22_a_token_that_the_distribution_never_gives():
    refuses("response token 1 is -700", "below -30", "sampler", log_probs=[-1.0, -700.0, -1.0])
    refuses("-60", "(2 such of 3 tokens)", log_probs=[-1.0, -60.0, -60.0])
    check(sampled(log_probs=[-1.0, -29.9, -1.0]))
    # log 248000 + 20 = 32.42
    big = Contract("scaled", 1.0, 248_000)
    assert abs(big.lowest_log_prob + math.log(248_000) + 20) < 1e-12
    check(sampled(log_probs=[-1.0, -32.0, -1.0]), contract=big)
    refuses("below -32.42", log_probs=[-1.0, -33.0, -1.0], contract=big)


def test_d23_the_sampled_token_is_among_the_kept():
    refuses("without the sampled token 8", kept_token_ids=((7, 13), (9, 13), (9,)), **KEPT)


def test_d25_a_log_prob_above_zero():
    refuses("response token 0 is 0.12", "above 0", log_probs=[0.12, -1.0, -1.0])
    refuses("above 0", log_probs=[1.1e-4, -1.0, -1.0])
    check(sampled(log_probs=[0.9e-4, -1.0, -1.0]), sampled(log_probs=[0.12, -1.0, -1.0], mask=[0, 1, 1]))


def test_d26_one_outlier_of_a_coarse_engine():
    trained, engine = torch.full((1000,), -3.0), torch.full((1000,), -3.0)
    engine[17] = -32.0
    assert mismatch_summary(engine, trained) == Mismatch(29 / 1000, 29.0, 1000)
    stats = ratio_stats(trained, engine)
    assert stats.invalid == 0
    # e^58 is no float32
    assert float(stats.sum_ratio_sq) == pytest.approx(math.exp(58) + 999, rel=1e-12)


def test_d27_a_masked_sample_counts_nothing():
    report = check(sampled(mask=[0, 0, 0]), sampled(), sampled(()))
    assert (report.samples, report.valid_tokens, report.masked_tokens) == (3, 3, 3)
    assert (report.all_masked_samples, report.empty_samples) == (1, 1)
    assert check(sampled(mask=[0, 0, 0])).valid_tokens == 0
