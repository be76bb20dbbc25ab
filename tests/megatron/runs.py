"""Short runs of the product's trainer, as one rank goes through them."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from p3o_train.assembly import build_trainer, load_start
from p3o_train.config import SamplingSettings, TrainConfig
from p3o_train.objective import Objective
from p3o_train.runtime import megatron_run
from p3o_train.trainer import Trainer

SMALL = TrainConfig(
    num_rollouts=6,
    rollout_batch_size=4,
    n_samples_per_prompt=4,
    rollout_max_response_len=4,
    global_batch_size=8,
    micro_batch_size=3,
    hidden_size=16,
    ffn_hidden_size=32,
    init_std=0.3,
    lr=1e-2,
    lr_decay_style="linear",
    lr_warmup_iters=2,
    weight_decay=0.1,
    save_interval=2,
    save_rollouts=False,  # so that a run that goes on samples again
)
STEP = Objective(ess_scope="step")
Outcome = tuple[list[dict[str, float]], list[torch.Tensor]]


def without_times(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if "/time/" not in name}


def trainer_of(config: TrainConfig, objective: Objective = STEP, interval: int = 1) -> Trainer:
    return build_trainer(config, objective, SamplingSettings(update_weights_interval=interval), load_start(config))


def run(config: TrainConfig, objective: Objective = STEP, interval: int = 1, stop_after: int | None = None) -> Outcome:
    """Rows of the optimizer steps and the weights at the end; with ``stop_after`` the run is left after that step."""
    trainer = trainer_of(config, objective, interval)
    if config.resume:
        assert trainer.resume()
    rows = []
    written = _files_at_a_save(trainer)
    for step, row in trainer.run():
        rows.append({"step": step, **without_times(row)})
        if step == stop_after:
            # as if it had been killed right after the checkpoint
            for path in Path(config.run_dir).glob("rollouts/*"):
                if path not in written:
                    path.unlink()
            break
    trainer.rollouts.close()
    return rows, [parameter.detach().clone() for parameter in trainer.trainee.model[0].parameters()]


def _files_at_a_save(trainer: Trainer) -> set[Path]:
    """The rollout files that were there when the newest checkpoint was finished; kept up to date."""
    written: set[Path] = set()
    save = trainer.save

    def and_look() -> Path:
        made = save()
        written.clear()
        written.update(Path(trainer.config.run_dir).glob("rollouts/*"))
        return made

    trainer.save = and_look  # type: ignore[method-assign]
    return written


def every_run(rank: int, runs: list[tuple[TrainConfig, Objective, int]]) -> list[Outcome]:
    """Each run in its own Megatron state; the environment says how many ranks there are."""
    made = []
    for config, objective, interval in runs:
        with megatron_run(config.parallelism):
            made.append(run(config, objective, interval))
    return made


def stopped_and_resumed(rank: int, folder: str, config: TrainConfig, interval: int, stop_after: int) -> Any:
    """(whole run, rows up to the stop, the run that went on from its last checkpoint)."""

    def placed(name: str, **changes: Any) -> TrainConfig:
        return dataclasses.replace(config, run_dir=str(Path(folder) / name), **changes)

    with megatron_run(config.parallelism):
        whole = run(placed("whole"), interval=interval)
    with megatron_run(config.parallelism):
        stopped, _ = run(placed("stopped"), interval=interval, stop_after=stop_after)
    with megatron_run(config.parallelism):
        resumed = run(placed("stopped", resume=True), interval=interval)
    return whole, stopped, resumed


def not_finite(rank: int) -> tuple[str, bool]:
    """What an optimizer step says of a NaN gradient, and whether weights, moments and schedule stayed as they were."""
    with megatron_run(SMALL.parallelism):
        trainee = trainer_of(SMALL).trainee
        parameters = list(trainee.model[0].parameters())
        for parameter in parameters:
            parameter.main_grad.fill_(1.0)
        trainee.step()
        trainee.zero_grad()
        parameters[0].main_grad.fill_(float("nan"))
        (adam,) = (one.optimizer for one in trainee.optimizer.chained_optimizers)

        def held() -> list[torch.Tensor]:
            moments = [value for state in adam.state.values() for value in state.values()]
            return [tensor.detach().clone() for tensor in (*parameters, *moments)]

        before = held()
        try:
            trainee.step()
        except RuntimeError as error:
            same = all(torch.equal(one, two) for one, two in zip(before, held(), strict=True))
            return str(error), same and trainee.scheduler.num_steps == 1
        return "nothing was raised", False


def without_snapshot(rank: int, folder: str) -> str:
    """What a run whose policy lags says of a checkpoint that lacks that policy."""
    config = dataclasses.replace(SMALL, run_dir=folder)
    with megatron_run(config.parallelism):
        trainer = trainer_of(config, interval=3)
        trainer._snapshot = None
        trainer.save()
        try:
            trainer_of(config, interval=3).resume()
        except ValueError as error:
            return str(error)
        return "nothing was raised"


def refused(rank: int, folder: str) -> tuple[str, bool]:
    """What a checkpoint says of another learning rate, seed and temperature, and whether nothing has moved."""
    config = dataclasses.replace(SMALL, run_dir=folder, num_rollouts=2)
    with megatron_run(config.parallelism):
        run(config)
    with megatron_run(config.parallelism):
        other = dataclasses.replace(config, lr=5e-3, seed=1)
        mismatch = SamplingSettings(temperature=0.7, convention="mismatch")
        trainer = build_trainer(other, STEP, mismatch, load_start(other))
        trainee = trainer.trainee
        before = [parameter.detach().clone() for parameter in trainee.model[0].parameters()]
        try:
            trainer.resume()
        except ValueError as error:
            after = list(trainee.model[0].parameters())
            same = all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
            return str(error), same and trainer.next_rollout == 0
    return "nothing was raised", False
