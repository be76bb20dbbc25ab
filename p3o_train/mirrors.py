"""Numbers of a step under the names that dashboards of other frameworks have for them, beside our own."""

from __future__ import annotations

from collections.abc import Mapping

# {p} stands for the prefix of the estimator. Only what is the same quantity: e of tokens, not of sequences, as verl's
# rollout correction has with token weights.
_NAMES: dict[str, dict[str, str]] = {
    "verl": {
        "train/reward_mean": "critic/rewards/mean",
        "train/response_length_mean": "response_length/mean",
        "train/grad_norm": "actor/grad_norm",
        "train/lr": "actor/lr",
        "{p}score_loss": "actor/pg_loss",
        "{p}clip_fraction": "actor/pg_clipfrac",
        "{p}entropy": "actor/entropy",
        "{p}reference_kl": "actor/kl_loss",
        "{p}ratio_mean": "rollout_corr/rollout_is_mean",
        "{p}ratio_std": "rollout_corr/rollout_is_std",
        "{p}normalized_ess": "rollout_corr/rollout_is_eff_sample_size",
    },
    "slime": {
        "train/reward_mean": "rollout/raw_reward",
        "train/response_length_mean": "rollout/response_len/mean",
        "{p}total_loss": "train/loss",
        "{p}score_loss": "train/pg_loss",
        "{p}clip_fraction": "train/pg_clipfrac",
        "{p}entropy": "train/entropy_loss",
        "{p}reference_kl": "train/kl_loss",
        "{p}log_ratio_abs_mean": "train/train_rollout_logprob_abs_diff",
    },
}
MIRRORS = ("none", *_NAMES)


def mirrored(row: Mapping[str, float], framework: str, prefix: str) -> dict[str, float]:
    """The numbers of ``row`` that ``framework`` has a name for, under that name; nothing for "none".

    Args:
        prefix: of the names that belong to the estimator, such as "train/p3o/".
    """
    names = {ours.replace("{p}", prefix): theirs for ours, theirs in _NAMES.get(framework, {}).items()}
    return {theirs: row[ours] for ours, theirs in names.items()}
