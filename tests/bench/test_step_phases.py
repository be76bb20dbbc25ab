"""The phases of a step add up to it, and each is timed where its work happens."""

import dataclasses
from unittest import mock

import pytest

from bench import step_phases, train_step
from bench.step_phases import PHASES
from p3o_train.runtime import Parallelism, megatron_run
from tests.distributed.ranks import on_all_ranks
from tests.megatron.topologies import CONFIG, NEEDS_MEGATRON

pytestmark = [pytest.mark.host_only, NEEDS_MEGATRON]


def small_steps(rank):
    """Rows of a small model with sequences of 3 + 5 tokens, and how often the weights moved and reached the engine."""
    model = dataclasses.replace(CONFIG, vocab_size=32)
    calls = {"step": 0, "sync": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    small = mock.patch.multiple(train_step, MODEL=model, PROMPT=3, RESPONSE=5)
    step = mock.patch.object(step_phases.Trainee, "step", counted("step", step_phases.Trainee.step))
    update = counted("sync", step_phases.LocalEngine.update_weights)
    sync = mock.patch.object(step_phases.LocalEngine, "update_weights", update)
    with small, step, sync, megatron_run(Parallelism()):
        return step_phases.measure(rounds=1), calls, step_phases.setting(ranks=2)


def test_phases():
    """Two replicas: one round that is timed and one before it."""
    for rows, calls, setting in on_all_ranks(small_steps, 2):
        assert [row["candidate"] for row in rows] == list(train_step.CANDIDATES)
        assert calls == {"step": 2 * len(rows), "sync": 2 * len(rows)}
        assert setting["sequences"] == 8 and setting["tokens_per_sequence"] == 8
        for row in rows:
            assert list(row["seconds"]) == list(PHASES)
            empty = {phase for phase, seconds in row["seconds"].items() if seconds == 0}
            without = {"log-prob pass": "reuse", "pre-pass": "step"}
            assert empty == {phase for phase, word in without.items() if word not in row["candidate"]}
            assert min(row["seconds"].values()) >= 0


def test_forward_and_backward_is_what_is_left():
    """Of 10 s in ``step_gradients``: 3 for e and 2 in the finalizer leave 5."""
    bench = object.__new__(step_phases.Bench)
    bench.trainee, bench.engine = mock.MagicMock(dp_size=1, dp_rank=0), mock.MagicMock()
    bench.samples, bench.advantages, bench._version = [], [], 0
    clock = {"now": 0.0}

    def gradients(*args, **kwargs):
        clock["now"] += 8.0
        with bench.watch.time(step_phases.REDUCTION):
            clock["now"] += 2.0
        return mock.Mock(prepass_seconds=3.0)

    with mock.patch.multiple(
        step_phases,
        step_gradients=gradients,
        plan_micro_batches=mock.MagicMock(),
        pack_step=mock.MagicMock(),
        export_hf_weights=mock.MagicMock(),
        dist=mock.MagicMock(),
        time=mock.Mock(perf_counter=lambda: clock["now"]),
    ):
        seconds = bench.step(train_step.CANDIDATES["p3o step, prepass"])
    assert seconds["pre-pass"] == 3.0 and seconds["gradients"] == 2.0
    assert seconds["forward + backward"] == 5.0


def test_first_round_is_not_counted():
    """It fills caches: 100 s, then 1 s and 3 s have a median of 2."""
    rounds = {objective: iter([100.0, 1.0, 3.0]) for objective in train_step.CANDIDATES.values()}
    bench = mock.Mock(step=lambda objective: dict.fromkeys(PHASES, next(rounds[objective])))
    with mock.patch.multiple(step_phases, Bench=lambda trainee: bench, build_trainee=mock.Mock()):
        rows = step_phases.measure(rounds=2)
    assert all(row["seconds"] == dict.fromkeys(PHASES, 2.0) for row in rows)


def test_report():
    row = {"candidate": "grpo", "seconds": dict.fromkeys(PHASES, 0.5)}
    assert step_phases.report([row]).splitlines()[1].split() == ["grpo", *["500.0"] * len(PHASES)]
