"""From the settings of a run to its parts: model and task from files or from sizes, engines, rollouts, trainer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from p3o_train.agreement import everywhere
from p3o_train.config import SamplingSettings, TrainConfig
from p3o_train.contract import Contract
from p3o_train.engines import engine_share
from p3o_train.hf_files import load_hf, load_tokenizer
from p3o_train.hf_model import model_config_from_hf
from p3o_train.model import ModelConfig
from p3o_train.objective import Objective
from p3o_train.prompt_data import PromptStream, read_prompts
from p3o_train.recording import Sampling
from p3o_train.reward_workers import RewardWorkers
from p3o_train.rollouts import EngineShare, Rollouts, RolloutSettings
from p3o_train.runtime import Trainee, build_trainee
from p3o_train.tasks import DigitSums, ReverseDigits, Task, TextTask
from p3o_train.trainer import Trainer


class Start(NamedTuple):
    """What a run begins with."""

    model: ModelConfig
    weights: Mapping[str, Tensor] | None
    """Full ones by their Hugging Face names; None: drawn from the seed."""
    task: Task


def load_start(config: TrainConfig) -> Start:
    """Model and task of a run; checkpoint, tokenizer and prompts are read from files where it names some.

    Raises:
        ValueError, OSError: files that are missing, damaged or of a model that is not supported.
    """
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    tokenizer = load_tokenizer(config.hf_checkpoint) if config.task != "reverse-digits" else None
    task = _task(config, tokenizer)
    if not config.hf_checkpoint:
        return Start(config.model_config(task.vocab_size), None, task)
    described, weights = load_hf(config.hf_checkpoint, dtype)
    return Start(model_config_from_hf(described, dtype=dtype, seed=config.seed), weights, task)


def _task(config: TrainConfig, tokenizer: Any) -> Task:
    if config.task == "reverse-digits":
        return ReverseDigits(seed=config.seed)
    if config.task == "digit-sums":
        return DigitSums(tokenizer, seed=config.seed)
    train, evaluation = (
        read_prompts(path, input_key=config.input_key, label_key=config.label_key) if path else []
        for path in (config.prompt_data, config.eval_prompt_data)
    )
    rewards = RewardWorkers(
        config.rm_type, time_limit_s=config.reward_time_limit_s, on_failure=config.reward_on_failure
    )
    stream = PromptStream(train, seed=config.seed, evaluation=evaluation)
    return TextTask(stream, tokenizer, rewards, apply_chat_template=config.apply_chat_template)


def build_trainer(
    config: TrainConfig, objective: Objective, sampling: SamplingSettings, start: Start, *, samples: bool = True
) -> Trainer:
    """The trainer of this rank; inside ``megatron_run``.

    Args:
        samples: False makes no engine, for what needs no rollouts.

    Raises:
        ValueError: settings under which every token of some rollout would be too old; what engine and model refuse.
    """
    _check_staleness(config, sampling.update_weights_interval)
    trainee = build_trainee(start.model, config.optimizer_settings(), start.weights)
    contract = Contract(sampling.convention, sampling.temperature, start.model.vocab_size)
    asked = Sampling(
        max_new_tokens=config.rollout_max_response_len,
        stop_token_ids=tuple(start.task.stop_token_ids),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )
    settings = RolloutSettings(
        batch_size=config.rollout_batch_size,
        group_size=config.n_samples_per_prompt,
        sampling=asked,
        evaluation=dataclasses.replace(asked, temperature=config.eval_temperature, top_p=1.0, top_k=-1),
        contract=contract,
        seed=config.seed,
        ahead=config.rollouts_ahead,
        directory=Path(config.run_dir) / "rollouts" if config.save_rollouts else None,
        identity=_digest(config.identity() | dataclasses.asdict(objective) | dataclasses.asdict(sampling)),
    )
    share = _engine(config, start, trainee, contract) if samples else EngineShare(None)
    rollouts = Rollouts(start.task, share, settings)
    return Trainer(config, objective, start.task, trainee, rollouts, sampling.update_weights_interval)


def _check_staleness(config: TrainConfig, interval: int) -> None:
    oldest = interval - 1 + config.rollouts_ahead
    if 0 <= config.max_staleness < oldest:
        raise ValueError(
            f"--max-staleness {config.max_staleness} with --update-weights-interval {interval} and --rollouts-ahead "
            f"{config.rollouts_ahead}: some rollouts are sampled by weights that are {oldest} rollouts old, so all of "
            f"their tokens would be masked; set --max-staleness {oldest} or -1"
        )


def _engine(config: TrainConfig, start: Start, trainee: Trainee, contract: Contract) -> EngineShare:
    """The engine of this rank, once every rank has its own."""
    made: list[EngineShare] = []
    everywhere(lambda: made.append(engine_share(config, start.model, trainee, contract.log_prob_kind)))
    return made[0]


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
