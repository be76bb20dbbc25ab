"""The first rollout of a run under several topologies, and what a forward pass of Megatron says of its tokens."""

import dataclasses
from typing import Any

import torch

from p3o_train.assembly import build_trainer, load_start
from p3o_train.config import SamplingSettings, TrainConfig
from p3o_train.contract import ContractViolation
from p3o_train.objective import Objective
from p3o_train.packing import pack
from p3o_train.passes import policy_log_probs
from p3o_train.runtime import megatron_run
from p3o_train.weights import copy_weights, swapped_weights
from tests.megatron.runs import SMALL

SCALED = SamplingSettings(temperature=0.7, convention="scaled")
TRUNCATED = SamplingSettings(top_p=0.8, top_k=6)


def first_rollout(config: TrainConfig, sampling: SamplingSettings) -> tuple[Any, list[torch.Tensor]]:
    """(tokens and log-probs of each response, on the last stage the trainer's log-probs minus the recorded ones)."""
    objective = Objective(ess_scope="step", temperature=sampling.temperature)
    with megatron_run(config.parallelism):
        trainer = build_trainer(config, objective, sampling, load_start(config))
        trainer.hand_over_weights()
        samples = trainer.rollout()
        trainee = trainer.trainee
        batch = pack(samples, [0.0] * len(samples), trainee.layout, pad_token_id=1)
        values = policy_log_probs(trainee.model, [batch], objective, trainee.groups).values
        responses = [(sample.response_ids.tolist(), sample.behavior_log_probs.tolist()) for sample in samples]
        return responses, [value[batch.mask] - batch.behavior_log_probs[batch.mask] for value in values]


def every_rollout(rank: int, cuts: tuple[dict[str, int], ...], sampling: SamplingSettings) -> Any:
    config = dataclasses.replace(SMALL, save_rollouts=False)
    return [first_rollout(dataclasses.replace(config, **cut), sampling) for cut in cuts]


def wrongly_declared(rank: int, cut: dict[str, int]) -> list[str]:
    """What the first rollout says of log-probs that are other than declared: raw, divided, one token late, right."""
    config = dataclasses.replace(SMALL, save_rollouts=False, **cut)
    objective = Objective(ess_scope="step", temperature=SCALED.temperature)
    told = []
    with megatron_run(config.parallelism):
        for fault in ("raw", "divided", "late", "none"):
            trainer = build_trainer(config, objective, SCALED, load_start(config))
            if trainer.rollouts._share.engine is not None:
                _falsify(trainer.rollouts._share.engine, fault)
            trainer.hand_over_weights()
            try:
                trainer.rollout()
                told.append("nothing was raised")
            except ContractViolation as error:
                told.append(str(error))
    return told


def _falsify(engine: Any, fault: str) -> None:
    honest = engine.generate
    engine._records_raw = fault in ("raw", "divided")

    def change(log_probs: list[float]) -> list[float]:
        if fault == "divided":
            return [value / SCALED.temperature for value in log_probs]
        return [-1.0, *log_probs[:-1]] if fault == "late" else log_probs

    def generate(requests: Any, sampling: Any) -> list[Any]:
        return [
            dataclasses.replace(
                response,
                log_probs=change(response.log_probs),
                recording=dataclasses.replace(response.recording, log_prob_kind="scaled"),
            )
            for response in honest(requests, sampling)
        ]

    engine.generate = generate


def with_other_weights(rank: int) -> bool:
    """Whether the own weights are back after others were swapped in, after an error too."""
    with megatron_run(SMALL.parallelism):
        trainer = build_trainer(SMALL, Objective(), SamplingSettings(), load_start(SMALL))
        model = trainer.trainee.model
        before = copy_weights(model)
        nothing = {name: torch.zeros_like(value) for name, value in before.items()}
        swapped = False
        try:
            with swapped_weights(model, nothing):
                swapped = not any(value.any() for value in copy_weights(model).values())
                raise KeyError("in the middle")
        except KeyError:
            after = copy_weights(model)
        return swapped and all(torch.equal(before[name], after[name]) for name in before)
