"""The trainer on the real Megatron-Core: what it trains does not depend on how, or in how many sittings."""

import dataclasses

import pytest
import torch

from p3o_train.objective import Objective
from tests.distributed.ranks import on_all_ranks
from tests.megatron.runs import SMALL, STEP, every_run, not_finite, refused, stopped_and_resumed, without_snapshot
from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]
SHORT = dataclasses.replace(SMALL, num_rollouts=2, save_interval=0)
REFERENCE = dataclasses.replace(STEP, ref_kl_coef=0.5, entropy_coef=0.01)
OBJECTIVES = {
    "step": STEP,
    "reuse": dataclasses.replace(STEP, context_source="reuse"),
    "hidden": dataclasses.replace(STEP, from_hidden=True),
    "micro-batch": Objective(),
    "grpo": Objective(advantage_estimator="grpo"),
    "reference": REFERENCE,
    "reference-grpo": dataclasses.replace(REFERENCE, advantage_estimator="grpo"),
}


# (interval, rollouts ahead) -> age of each of six rollouts
AGES = {
    (1, 0): [0, 0, 0, 0, 0, 0],
    (3, 0): [0, 1, 2, 0, 1, 2],
    (1, 1): [0, 1, 1, 1, 1, 1],
    # rollout 3 is begun when rollout 1 is trained on, before the weights of rollout 2 are there
    (2, 2): [0, 1, 2, 3, 2, 3],
}


@pytest.fixture(scope="module")
def runs():
    """{name: outcome} of one process, each objective for two rollouts of two steps."""
    cases = {name: (SHORT, objective, 1) for name, objective in OBJECTIVES.items()}
    cases["advantages not divided"] = (dataclasses.replace(SHORT, normalize_by_std=False), STEP, 1)
    (made,) = on_all_ranks(every_run, 1, list(cases.values()))
    return dict(zip(cases, made, strict=True))


def test_numbers_of_a_step(runs):
    rows, _ = runs["step"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/current_rollout_id"] for row in rows] == [0, 0, 1, 1]
    assert [row["train/lr"] for row in rows] == pytest.approx([0, 5e-3, 1e-2, 5e-3])  # warm-up of 2 of 4, then decay
    ess = [row["train/p3o/normalized_ess"] for row in rows]
    # sampled with these weights: float32 logits from batches of other shapes; the warm-up starts from 0, so step 2 too
    assert ess[:2] == pytest.approx([1, 1], abs=1e-6) and ess[3] < 1 - 1e-6
    assert all(row["train/p3o/valid_tokens"] == 8 * row["train/response_length_mean"] for row in rows)
    assert all(row["train/grad_norm"] > 0 for row in rows)


def test_reuse_gives_other_numbers_than_a_pre_pass(runs):
    assert runs["reuse"][0] == runs["step"][0]
    assert all(torch.equal(one, two) for one, two in zip(runs["reuse"][1], runs["step"][1], strict=True))


def test_hidden_states_train_another_model(runs):
    for one, two in zip(runs["hidden"][1], runs["step"][1], strict=True):
        # Adam divides by the size of a gradient, which carries float32 roundings into four steps of lr 1e-2
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4)


def test_every_objective_trains(runs):
    for name in OBJECTIVES:
        rows, weights = runs[name]
        assert all(weight.isfinite().all() for weight in weights), name
        prefix = f"train/{OBJECTIVES[name].advantage_estimator}/"
        assert rows[-1][f"{prefix}log_ratio_abs_mean"] > 1e-6, name
        reference = rows[-1][f"{prefix}reference_kl"]
        assert (reference > 1e-6) == ("reference" in name), name
    assert not torch.equal(runs["grpo"][1][0], runs["step"][1][0])
    assert runs["reference"][0][0]["train/p3o/reference_kl"] == pytest.approx(0, abs=1e-9)  # nothing has moved yet


def test_division_by_the_standard_deviation_changes_nothing(runs):
    """In the second step, whose rewards differ; the first has a learning rate of 0, so the weights are the same."""
    divided, plain = (runs[name][0][1] for name in ("step", "advantages not divided"))
    assert plain["train/reward_mean"] == divided["train/reward_mean"]
    # rewards are shares of a response, so deviations are below 1
    assert 1e-3 < plain["train/grad_norm"] < 0.9 * divided["train/grad_norm"]


def test_data_parallel_ranks_train_another_model(runs):
    """Same samples, same steps; only float32 sums differ. Micro-batches of 3 of 8 samples against 3 of 4."""
    ranks = on_all_ranks(every_run, 2, [(SHORT, STEP, 1)])
    ((rows, weights),) = ranks[0]
    assert rows == ranks[1][0][0]
    for one, two in zip(rows, runs["step"][0], strict=True):
        assert one["train/reward_mean"] == two["train/reward_mean"]
        assert one["train/p3o/valid_tokens"] == two["train/p3o/valid_tokens"]
        assert one["train/p3o/total_loss"] == pytest.approx(two["train/p3o/total_loss"], abs=1e-4)
    for one, two in zip(weights, runs["step"][1], strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("ranks", "changes", "interval"),
    [
        (1, {}, 1),
        (1, {"bf16": True}, 3),
        (2, {"tensor_model_parallel_size": 2}, 1),
        (2, {"context_parallel_size": 2}, 3),
        (1, {"rollouts_ahead": 1, "save_rollouts": True}, 1),
        (1, {"rollouts_ahead": 2, "save_rollouts": True, "max_staleness": 3}, 2),
    ],
    ids=str,
)
def test_a_resumed_run_ends_elsewhere(ranks, changes, interval, tmp_path):
    """Left after step 7, in the middle of a rollout; the last checkpoint is that of rollout 2, step 4."""
    config = dataclasses.replace(SMALL, **changes)
    for whole, stopped, resumed in on_all_ranks(stopped_and_resumed, ranks, str(tmp_path), config, interval, 7):
        assert stopped == whole[0][:7]
        assert resumed[0] == whole[0][4:]
        assert len(whole[0]) == 12
        assert all(torch.equal(one, two) for one, two in zip(resumed[1], whole[1], strict=True))
        ages = [row["train/p3o/rollout_policy_age_rollouts"] for row in whole[0][::2]]
        assert ages == AGES[interval, config.rollouts_ahead]
        for row, age in zip(whole[0][::2], ages, strict=True):
            assert row["train/p3o/policy_age_mean"] == row["train/p3o/policy_age_max"] == age
            # the latter is a mean over tokens of one number
            assert row[f"train/p3o/ess_age_{age}"] == pytest.approx(row["train/p3o/normalized_ess"], rel=1e-12)
        if not config.bf16:  # which rounds log-probs by more than a step moves them
            distances = [row["train/p3o/log_ratio_abs_mean"] for row in whole[0][::2]]
            assert [distance > 1e-5 for distance in distances] == [age > 0 for age in ages]


def test_a_gradient_that_is_not_finite_moves_nothing():
    ((message, untouched),) = on_all_ranks(not_finite, 1)
    assert "the norm of the gradients is nan" in message and untouched


def test_a_lagging_policy_that_is_not_in_the_checkpoint(tmp_path):
    (message,) = on_all_ranks(without_snapshot, 1, str(tmp_path))
    assert "cannot resume exactly" in message and "--update-weights-interval 3" in message


def test_a_checkpoint_of_another_run(tmp_path):
    ((message, untouched),) = on_all_ranks(refused, 1, str(tmp_path))
    named = ("lr", "seed", "rollout_temperature", "temperature_convention")
    assert all(name in message for name in named) and untouched
