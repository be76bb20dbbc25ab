"""The design of the study: every cell is a run of p3o train, and methods of a setting differ in the loss alone."""

import dataclasses
import itertools

import pytest

from p3o_train.study.design import METHODS, MICRO_BATCH_SCOPE, SEEDS, SIZES, Cell, cells, flags_of, resolved, settings


@pytest.mark.parametrize("size", SIZES)
def test_counts(size):
    made = cells(size)
    # 11 settings x 8 methods x 3 seeds, and micro-batch scope in 3 settings
    assert len(made) == 11 * 8 * 3 + 3 * 3
    assert len({cell.name for cell in made}) == len(made)
    assert {cell.seed for cell in made} == {42, 123, 2026} == set(SEEDS)
    scopes = {cell.setting for cell in made if cell.method == MICRO_BATCH_SCOPE}
    assert scopes == {"t1p2_mismatch", "lag_16", "lag_16_fast"}


@pytest.mark.parametrize("size", SIZES)
def test_every_cell_is_a_run_of_its_own(size):
    found = [resolved(flags_of(cell, size)) for cell in cells(size)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("size", SIZES)
def test_methods_of_a_setting_and_seed_share_everything_but_the_loss(size):
    for (_, _), group in itertools.groupby(cells(size), key=lambda cell: (cell.seed, cell.setting)):
        made = [(cell, *resolved(flags_of(cell, size))) for cell in group]
        for cell, config, objective, sampling in made:
            # micro-batch scope needs several micro-batches, and prompts and weights do not depend on them
            assert dataclasses.replace(config, micro_batch_size=0) == made[0][1]
            assert sampling == made[0][3]
            assert objective.temperature == made[0][2].temperature
            assert config.seed == cell.seed
            if cell.method == MICRO_BATCH_SCOPE:
                assert config.global_batch_size // config.micro_batch_size >= 4


def test_losses():
    made = {name: resolved(flags_of(Cell("on_policy", name, 42), "short"))[1] for name in METHODS}
    assert len(set(made.values())) == len(METHODS)
    assert (made["p3o"].kl_mode, made["p3o"].ess_scope) == ("proxy_safe", "step")
    assert made["p3o_importance"] == dataclasses.replace(made["p3o"], kl_mode="importance")
    assert made["p3o_kl_off"] == dataclasses.replace(made["p3o"], kl_mode="off")
    assert made["p3o_micro_batch"] == dataclasses.replace(made["p3o"], ess_scope="micro-batch")
    clips = {name: (made[name].advantage_estimator, made[name].clip_low, made[name].clip_high) for name in made}
    assert [clips[f"grpo_0p{digit}"] for digit in (2, 4, 6)] == [("grpo", c, c) for c in (0.2, 0.4, 0.6)]
    assert clips["cispo"] == ("cispo", 1.0, 0.2)
    assert clips["pg"][0] == "pg"


def test_drift():
    def of(setting):
        return resolved(flags_of(Cell(setting, "p3o", 42), "short"))

    config, objective, sampling = of("on_policy")
    assert (config.steps_per_rollout, config.rollouts_ahead, sampling.update_weights_interval) == (1, 0, 1)
    for name in settings("short"):
        config, objective, sampling = of(name)
        if name.startswith("t"):
            temperature, convention = name[1:].split("_")
            assert sampling.temperature == float(temperature.replace("p", "."))
            assert sampling.convention == convention
            assert config.eval_temperature == objective.temperature  # the policy that is trained
            assert objective.temperature == (sampling.temperature if convention == "scaled" else 1.0)
    assert of("sync_3")[2].update_weights_interval == 3
    slow, fast = of("lag_16")[0], of("lag_16_fast")[0]
    assert slow == dataclasses.replace(fast, lr=slow.lr)
    assert (slow.rollouts_ahead, slow.steps_per_rollout) == (16, 4)
    assert 2.5 < fast.lr / slow.lr < 3.5
    assert slow.num_rollouts > 3 * 16  # most of the run has the full lag


def test_a_part():
    part = cells("short", ["sync_3", "on_policy"], ["pg"], [7])
    assert part == [Cell("on_policy", "pg", 7), Cell("sync_3", "pg", 7)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tiny",), "size must be one of short, full; got 'tiny'"),
        (("short", ["lag"]), "--settings must be some of on_policy, .*; got lag"),
        (("short", [], ["ppo"]), "--methods must be some of p3o, .*; got ppo"),
        (("short", [], [], [1, 1]), r"--seeds must be different numbers, at least one; got \[1, 1\]"),
        (("short", [], [], []), r"--seeds must be .*; got \[\]"),
    ],
)
def test_what_there_is_not(arguments, said):
    with pytest.raises(ValueError, match=said):
        cells(*arguments)
