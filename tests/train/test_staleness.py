"""Ages of tokens, in rollouts, and tokens that are too old."""

import pytest

from p3o_train.recording import Recording, Sampling, VersionSpan
from p3o_train.staleness import age_row, mask_stale, sampled_by
from tests.train.samples import make_sample


def sample(*spans, valid=None, **fields):
    """A response that these (version, tokens) sampled."""
    begin, made = 0, []
    for version, tokens in spans:
        made.append(VersionSpan(version, begin, begin + tokens))
        begin += tokens
    recording = Recording("sglang", "0.5.23", Sampling(8), "scaled", tuple(made), "stop", "retract")
    return make_sample(2, begin, valid=valid, recording=recording, **fields)


def test_each_token_has_the_age_of_its_weights():
    """A partial rollout: two tokens of version 3, one of version 5, trained on in rollout 5."""
    samples = [sample((3, 2), (5, 1)), sample((4, 3), valid=[1, 0, 0])]
    assert sampled_by(samples) == [3, 4, 5]
    row = age_row(samples, 5, {3: 0.5, 4: 0.75, 5: 1.0}, "x/")
    expected = {"x/policy_age_mean": (2 + 2 + 0 + 1) / 4, "x/policy_age_max": 2}
    assert row == expected | {"x/ess_age_2": 0.5, "x/ess_age_1": 0.75, "x/ess_age_0": 1.0}


def test_masked_tokens_have_no_age():
    samples = [sample((1, 1), (5, 1), valid=[0, 1])]
    assert sampled_by(samples) == [5]
    assert age_row(samples, 5, {}, "")["policy_age_max"] == 0
    assert age_row([sample((1, 1), valid=[0])], 5, {}, "") == {"policy_age_mean": 0, "policy_age_max": 0}


@pytest.mark.parametrize(
    ("limit", "mask"), [(-1, [1, 0, 1, 1]), (2, [1, 0, 1, 1]), (1, [0, 0, 1, 1]), (0, [0, 0, 0, 1])]
)
def test_what_is_too_old_is_masked(limit, mask):
    before = sample((3, 2), (4, 1), (5, 1), valid=[1, 0, 1, 1])
    (after,) = mask_stale([before], 5, limit)
    assert after.valid_mask.int().tolist() == mask
    assert before.valid_mask.int().tolist() == [1, 0, 1, 1]


def test_what_was_unpaired_stays_so():
    (after,) = mask_stale([sample((3, 1), (5, 2), pairing_mask=[1, 1, 0])], 5, 0)
    assert after.pairing_mask.tolist() == [False, True, False]
