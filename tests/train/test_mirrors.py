"""Names of other frameworks' dashboards."""

import pytest

from p3o_kernels import P3OMetrics
from p3o_train.mirrors import MIRRORS, mirrored

OURS = ("train/reward_mean", "train/response_length_mean", "train/grad_norm", "train/lr")


def row(prefix):
    """A number of its own under every name of ours."""
    names = [*OURS, *(prefix + name for name in P3OMetrics.zeros().means())]
    return {name: float(index) for index, name in enumerate(names)}


@pytest.mark.parametrize("prefix", ["train/p3o/", "train/grpo/"])
def test_every_mirrored_number_is_one_of_ours(prefix):
    numbers = row(prefix)
    verl, slime = (mirrored(numbers, name, prefix) for name in ("verl", "slime"))
    assert verl["critic/rewards/mean"] == slime["rollout/raw_reward"] == numbers["train/reward_mean"]
    assert verl["actor/pg_loss"] == slime["train/pg_loss"] == numbers[f"{prefix}score_loss"]
    assert verl["rollout_corr/rollout_is_eff_sample_size"] == numbers[f"{prefix}normalized_ess"]
    assert slime["train/train_rollout_logprob_abs_diff"] == numbers[f"{prefix}log_ratio_abs_mean"]
    assert (len(verl), len(slime)) == (11, 8)
    assert len(set(verl.values())) == len(verl) and len(set(slime.values())) == len(slime)
    assert not (set(verl) | set(slime)) & set(numbers)


def test_none_mirrors_nothing():
    assert mirrored(row("train/p3o/"), "none", "train/p3o/") == {}
    assert MIRRORS == ("none", "verl", "slime")
