"""How far the policy that samples lags behind the one that is trained, in rollouts."""

from __future__ import annotations


def snapshot_tag(interval: int) -> str:
    """Which weights sample: "actor", the ones that are trained, or "rollout_policy", a snapshot of them.

    Raises:
        ValueError: an interval below 1.
    """
    return "actor" if _checked(interval) == 1 else "rollout_policy"


def refresh_after(rollout_id: int, interval: int, num_rollouts: int) -> bool:
    """Whether the snapshot is replaced when this rollout (counted from 0) has been trained on: every ``interval``
    rollouts, and after the last, so that what a run leaves behind is what it has trained.

    Raises:
        ValueError: an interval below 1, a rollout that there is none of.
    """
    if not 0 <= rollout_id < num_rollouts:
        raise ValueError(f"rollout_id must be in [0, {num_rollouts}), got {rollout_id}; rollouts are counted from 0")
    return (rollout_id + 1) % _checked(interval) == 0 or rollout_id == num_rollouts - 1


def policy_age(current_rollout_id: int, snapshot_rollout_id: int) -> int:
    """Rollouts, not optimizer steps, that were trained on since the snapshot was taken.

    Args:
        current_rollout_id: the rollout that the snapshot samples.
        snapshot_rollout_id: the first rollout that it has sampled: 0 when a run starts from given weights.

    Raises:
        ValueError: a negative id, or a snapshot from the future.
    """
    if not 0 <= snapshot_rollout_id <= current_rollout_id:
        raise ValueError(
            f"snapshot_rollout_id must be in [0, {current_rollout_id}], the current rollout, got "
            f"{snapshot_rollout_id}; a run that starts from given weights has the snapshot of rollout 0"
        )
    return current_rollout_id - snapshot_rollout_id


def _checked(interval: int) -> int:
    if interval < 1:
        raise ValueError(f"interval must be >= 1 rollouts, got {interval}; set --update-weights-interval 1")
    return interval
