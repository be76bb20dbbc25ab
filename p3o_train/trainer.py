"""The training loop, to be read from top to bottom: rollout, rewards, advantages, optimizer steps, checkpoint.

A rollout is a function of the weights, the seed and its number alone, so its number is the data position that a
checkpoint needs, and a resumed run ends in the same weights, bit for bit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p3o_train.advantage import group_advantages
from p3o_train.batching import plan_micro_batches
from p3o_train.checkpoint import has_snapshot, latest_iteration, load_checkpoint, save_checkpoint
from p3o_train.config import TrainConfig
from p3o_train.metrics import MetricSums, global_means
from p3o_train.objective import Objective
from p3o_train.packing import pack_step
from p3o_train.parallel import gather_over_data
from p3o_train.passes import PolicyLogProbs, StepResult, policy_log_probs, step_gradients
from p3o_train.random_state import named_generator
from p3o_train.rollout import EmbeddedEngine, Sampling, copy_weights, swapped_weights
from p3o_train.runtime import Trainee
from p3o_train.tasks import Task
from p3o_train.types import PackedBatch, Sample

Row = dict[str, float]


class Trainer:
    """One run on this rank; all ranks call the same methods in the same order."""

    def __init__(
        self, config: TrainConfig, objective: Objective, task: Task, trainee: Trainee, update_weights_interval: int = 1
    ) -> None:
        """``update_weights_interval``: rollouts between two updates of the weights that sample."""
        self.config, self.objective, self.task, self.trainee = config, objective, task, trainee
        self.interval = update_weights_interval
        self.next_rollout = 0
        self.steps_done = 0
        sampling = Sampling(config.rollout_max_response_len, task.end_token_id, objective.temperature)
        self._engine = EmbeddedEngine(trainee.model, trainee.groups, trainee.layout, sampling)
        self._reference = copy_weights(trainee.model) if objective.ref_kl_coef else None
        self._snapshot = copy_weights(trainee.model) if update_weights_interval > 1 else None
        self._snapshot_rollout = 0

    def run(self) -> Iterator[tuple[int, Row]]:
        """Trains to the end; yields (step, its numbers) after each optimizer step, the same on every rank."""
        config = self.config
        while self.next_rollout < config.num_rollouts:
            begin = time.perf_counter()
            samples = self.rollout()
            seconds = time.perf_counter() - begin
            for row in self.train(samples):
                yield self.steps_done, row | {"train/time/rollout_s": seconds}
                seconds = 0.0  # it belongs to the first of its steps
            self._finish_rollout()
            last = self.next_rollout == config.num_rollouts
            if config.save_interval and (last or self.next_rollout % config.save_interval == 0):
                self.save()

    def rollout(self) -> list[Sample]:
        """The scored samples of the next rollout, the same on every rank."""
        config, trainee = self.config, self.trainee
        asked = self.task.prompts(self.next_rollout, config.rollout_batch_size)
        prompts = [prompt for prompt in asked for _ in range(config.n_samples_per_prompt)]
        generator = named_generator(config.seed, f"responses of rollout {self.next_rollout}")
        shape = (len(prompts), config.rollout_max_response_len)
        uniforms = torch.rand(shape, dtype=torch.float64, generator=generator)
        mine = list(range(trainee.dp_rank, len(prompts), trainee.dp_size))
        with swapped_weights(trainee.model, self._snapshot):
            made = self._engine.generate([prompts[index].token_ids for index in mine], uniforms[mine])
        replicas = gather_over_data(made, trainee.groups)
        samples = []
        for index, prompt in enumerate(prompts):
            response = replicas[index % trainee.dp_size][index // trainee.dp_size]
            sample = Sample.from_lists(
                [*prompt.token_ids, *response.token_ids],
                len(response.token_ids),
                response.log_probs,
                sample_id=f"rollout {self.next_rollout}, response {index}",
                reward=self.task.reward(prompt, response.token_ids),
                group_id=index // config.n_samples_per_prompt,
            )
            samples.append(sample)
        return samples

    def train(self, samples: list[Sample]) -> Iterator[Row]:
        """The optimizer steps of one rollout, and the numbers of each."""
        size = self.config.global_batch_size
        advantages = group_advantages(samples, divide_by_std=self.config.normalize_by_std)
        for begin in range(0, len(samples), size):
            part = slice(begin, begin + size)
            batches = self._micro_batches(samples[part], advantages[part])
            started = time.perf_counter()
            result, norm, rate = self._step(batches)
            row = self._row(samples[part], result)
            self.steps_done += 1
            yield row | {
                "train/grad_norm": norm,
                "train/lr": rate,
                "train/time/prepass_s": result.prepass_seconds,
                "train/time/train_s": time.perf_counter() - started - result.prepass_seconds,
            }

    def save(self) -> Path:
        """Writes a checkpoint of everything that the rest of the run depends on."""
        progress = {
            "next_rollout": self.next_rollout,
            "steps_done": self.steps_done,
            "snapshot_rollout": self._snapshot_rollout,
        }
        return save_checkpoint(
            self._directory,
            self.steps_done,
            model=self.trainee.model,
            optimizer=self.trainee.optimizer,
            scheduler=self.trainee.scheduler,
            progress=progress,
            identity=self._identity(),
            snapshot=self._snapshot,
            keep=self.config.keep_checkpoints,
        )

    def resume(self) -> bool:
        """Goes on from the newest checkpoint of the run directory; False where there is none.

        Raises:
            ValueError: a checkpoint that is damaged or belongs to another run; nothing has changed then.
        """
        if latest_iteration(self._directory) is None:
            return False
        if self._snapshot is not None and not has_snapshot(self._directory):
            raise ValueError(
                f"cannot resume exactly: the policy that samples is older than the weights (--update-weights-interval "
                f"{self.interval}), and its snapshot is not in the checkpoint in {self._directory}; set the interval "
                "to 1 in a new run"
            )
        loaded = load_checkpoint(
            self._directory,
            model=self.trainee.model,
            optimizer=self.trainee.optimizer,
            scheduler=self.trainee.scheduler,
            identity=self._identity(),
        )
        self.next_rollout, self.steps_done = loaded.progress["next_rollout"], loaded.progress["steps_done"]
        self._snapshot_rollout = loaded.progress["snapshot_rollout"]
        if loaded.snapshot is not None:
            self._snapshot = {name: tensor.to(self.trainee.device) for name, tensor in loaded.snapshot.items()}
        return True

    @property
    def _directory(self) -> Path:
        return Path(self.config.run_dir) / "checkpoints"

    def _identity(self) -> dict[str, Any]:
        objective = dataclasses.asdict(self.objective)
        ranks = {"data_parallel_size": self.trainee.dp_size, "update_weights_interval": self.interval}
        return self.config.identity() | {f"objective.{name}": value for name, value in objective.items()} | ranks

    def _micro_batches(self, samples: list[Sample], advantages: Tensor) -> list[PackedBatch]:
        config, layout = self.config, self.trainee.layout
        costs = [layout.padded_length(sample.token_ids.numel()) // layout.cp_size for sample in samples]
        plan = plan_micro_batches(
            costs,
            self.trainee.dp_size,
            micro_batch_size=config.micro_batch_size or None,
            max_tokens=None if config.micro_batch_size else config.max_tokens_per_gpu,
        )
        batches = pack_step(samples, advantages, plan[self.trainee.dp_rank], layout, self.task.pad_token_id)
        return [batch.to(self.trainee.device) for batch in batches]

    def _step(self, batches: list[PackedBatch]) -> tuple[StepResult, float, float]:
        """One optimizer step: what it left, the norm of its gradients and its learning rate."""
        trainee, objective = self.trainee, self.objective
        log_probs: PolicyLogProbs | None = None
        if objective.needs_context and objective.context_source == "reuse":
            log_probs = policy_log_probs(trainee.model, batches, objective, trainee.groups, self.steps_done)
        reference: tuple[Tensor, ...] | None = None
        if self._reference is not None:
            with swapped_weights(trainee.model, self._reference):
                reference = policy_log_probs(trainee.model, batches, objective, trainee.groups).values
        trainee.zero_grad()
        result = step_gradients(
            trainee.model,
            batches,
            objective,
            trainee.groups,
            log_probs=log_probs,
            ref_log_probs=reference,
            weight_version=self.steps_done,
        )
        rate = float(trainee.optimizer.param_groups[0]["lr"])
        return result, trainee.step(), rate

    def _row(self, samples: list[Sample], result: StepResult) -> Row:
        prefix = f"train/{self.objective.advantage_estimator}/"
        age = self.next_rollout - self._snapshot_rollout if self._snapshot else 0
        return {
            "train/current_rollout_id": self.next_rollout,
            "train/rollout_policy_snapshot_rollout": self.next_rollout - age,
            f"{prefix}rollout_policy_age_rollouts": age,
            "train/reward_mean": sum(sample.reward for sample in samples) / len(samples),
            "train/response_length_mean": sum(sample.response_length for sample in samples) / len(samples),
            **global_means(MetricSums({}), result.metrics, self.trainee.groups, self.trainee.device, prefix=prefix),
        }

    def _finish_rollout(self) -> None:
        self.next_rollout += 1
        last = self.next_rollout == self.config.num_rollouts
        if self._snapshot is not None and (self.next_rollout % self.interval == 0 or last):
            self._snapshot, self._snapshot_rollout = copy_weights(self.trainee.model), self.next_rollout
