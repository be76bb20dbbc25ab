"""The training loop, to be read from top to bottom: rollout, rewards, advantages, optimizer steps, new weights.

A rollout is a function of the weights, the seed and its number alone, so its number is the data position that a
checkpoint needs, and a resumed run ends in the same weights, bit for bit. What a server sampled is read from the files
of the run instead.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p3o_train.advantage import group_advantages
from p3o_train.batching import plan_micro_batches
from p3o_train.checkpoint import has_snapshot, latest_iteration, load_checkpoint, save_checkpoint
from p3o_train.config import TrainConfig
from p3o_train.hf_weights import export_hf_weights
from p3o_train.metrics import MetricSums, global_means
from p3o_train.mirrors import mirrored
from p3o_train.objective import Objective
from p3o_train.packing import pack_step
from p3o_train.passes import PolicyLogProbs, StepResult, policy_log_probs, step_gradients
from p3o_train.policy_lag import policy_age, refresh_after
from p3o_train.probing import probe_recordings
from p3o_train.rollouts import Rollouts
from p3o_train.runtime import Trainee
from p3o_train.staleness import age_row, mask_stale, sampled_by
from p3o_train.tasks import Task
from p3o_train.types import PackedBatch, Sample
from p3o_train.weights import copy_weights, swapped_weights

Row = dict[str, float]
_PROBED_TOKENS = 512
"""Of each replica's share of the first rollout, or a few more, are computed again to see what their log-probs are."""


class Trainer:
    """One run on this rank; all ranks call the same methods in the same order."""

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        task: Task,
        trainee: Trainee,
        rollouts: Rollouts,
        update_weights_interval: int = 1,
    ) -> None:
        """``update_weights_interval``: rollouts between two updates of the weights that sample."""
        self.config, self.objective, self.task, self.trainee = config, objective, task, trainee
        self.rollouts, self.interval = rollouts, update_weights_interval
        self.next_rollout = 0
        self.steps_done = 0
        self._reference = copy_weights(trainee.model) if objective.ref_kl_coef else None
        self._snapshot = copy_weights(trainee.model) if update_weights_interval > 1 else None
        self._snapshot_rollout = 0
        self._probed = False

    def run(self) -> Iterator[tuple[int, Row]]:
        """Trains to the end; yields (step, its numbers) after each optimizer step, the same on every rank.

        Counts of log-ratios are among the numbers, under ``p3o_train.histogram.PREFIX``.
        """
        config = self.config
        sync = self.hand_over_weights()
        while self.next_rollout < config.num_rollouts:
            evaluation = self._evaluate()
            begin = time.perf_counter()
            samples = self.rollout()
            costs = {"train/time/rollout_s": time.perf_counter() - begin, "train/time/sync_s": sync}
            for row in self.train(samples):
                yield self.steps_done, row | costs | evaluation
                costs, evaluation = dict.fromkeys(costs, 0.0), {}  # they belong to the first of its steps
            sync = self._finish_rollout()
            last = self.next_rollout == config.num_rollouts
            if config.save_interval and (last or self.next_rollout % config.save_interval == 0):
                self.save()

    def rollout(self) -> list[Sample]:
        """The scored samples of the next rollout, the same on every rank; later ones are begun where asked for."""
        ahead = min(self.next_rollout + self.config.rollouts_ahead, self.config.num_rollouts - 1)
        for rollout_id in range(self.next_rollout, ahead + 1):
            self.rollouts.begin(rollout_id)
        samples = self.rollouts.finish(self.next_rollout)
        fresh = all(version == self.next_rollout for version in sampled_by(samples))
        if fresh and not self._probed:  # later policies have moved, and their log-probs with them
            self._probe(samples)
            self._probed = True
        return samples

    def train(self, samples: list[Sample]) -> Iterator[Row]:
        """The optimizer steps of one rollout, and the numbers of each."""
        size = self.config.global_batch_size
        advantages = group_advantages(samples, divide_by_std=self.config.normalize_by_std)
        samples = mask_stale(samples, self.next_rollout, self.config.max_staleness)
        for begin in range(0, len(samples), size):
            part = slice(begin, begin + size)
            batches = self._micro_batches(samples[part], advantages[part])
            started = time.perf_counter()
            result, norm, rate = self._step(batches, sampled_by(samples[part]))
            row = self._row(samples[part], result)
            self.steps_done += 1
            row |= {
                "train/grad_norm": norm,
                "train/lr": rate,
                "train/time/prepass_s": result.prepass_seconds,
                "train/time/train_s": time.perf_counter() - started - result.prepass_seconds,
            }
            yield row | mirrored(row, self.config.mirror_metrics, self._prefix)

    def save(self) -> Path:
        """Writes a checkpoint of everything that the rest of the run depends on, but rollouts that have files."""
        self.rollouts.settle()
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
    def _prefix(self) -> str:
        return f"train/{self.objective.advantage_estimator}/"

    @property
    def _directory(self) -> Path:
        return Path(self.config.run_dir) / "checkpoints"

    def _identity(self) -> dict[str, Any]:
        objective = dataclasses.asdict(self.objective)
        ranks = {"data_parallel_size": self.trainee.dp_size, "update_weights_interval": self.interval}
        settings = self.rollouts.settings
        sampled = {
            "rollout_temperature": settings.sampling.temperature,
            "temperature_convention": settings.contract.convention,
            "rollout_top_p": settings.sampling.top_p,
            "rollout_top_k": settings.sampling.top_k,
        }
        named = {f"objective.{name}": value for name, value in objective.items()}
        return self.config.identity() | named | sampled | ranks

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

    def _step(self, batches: list[PackedBatch], versions: Sequence[int]) -> tuple[StepResult, float, float]:
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
            sampled_by=versions,
        )
        rate = float(trainee.optimizer.param_groups[0]["lr"])
        return result, trainee.step(), rate

    def _row(self, samples: list[Sample], result: StepResult) -> Row:
        prefix = self._prefix
        snapshot = min(sampled_by(samples), default=self.next_rollout)
        scored = [sample for sample in samples if not sample.is_dummy]
        count = max(len(scored), 1)
        return {
            "train/current_rollout_id": self.next_rollout,
            "train/rollout_policy_snapshot_rollout": snapshot,
            f"{prefix}rollout_policy_age_rollouts": policy_age(self.next_rollout, snapshot),
            "train/reward_mean": sum(sample.reward for sample in scored) / count,
            "train/response_length_mean": sum(sample.response_length for sample in scored) / count,
            "train/reward_failures": self.rollouts.reward_failures,
            "train/dropped_responses": len(samples) - len(scored),
            **age_row(samples, self.next_rollout, result.version_ess, prefix),
            **global_means(
                MetricSums({}),
                result.metrics,
                self.trainee.groups,
                self.trainee.device,
                prefix=prefix,
                histogram=result.histogram,
            ),
        }

    def _finish_rollout(self) -> float:
        """Counts the rollout, and hands new weights to the engines where it is time; the seconds that took."""
        done = self.next_rollout
        self.next_rollout += 1
        if not refresh_after(done, self.interval, self.config.num_rollouts):
            return 0.0
        if self._snapshot is not None:
            self._snapshot, self._snapshot_rollout = copy_weights(self.trainee.model), self.next_rollout
        return self.hand_over_weights()

    def hand_over_weights(self) -> float:
        """Hands the weights that are to sample to the engines: the snapshot where there is one."""
        begin = time.perf_counter()
        version = self.next_rollout if self._snapshot is None else self._snapshot_rollout
        with swapped_weights(self.trainee.model, self._snapshot):
            weights = export_hf_weights(self.trainee.model, self.trainee.groups)
        self.rollouts.update_weights(weights, version)
        return time.perf_counter() - begin

    def _evaluate(self) -> Row:
        config = self.config
        if not config.eval_interval or self.next_rollout % config.eval_interval:
            return {}
        prompts = self.task.evaluation_prompts(config.n_eval_prompts)
        return {"eval/reward_mean": self.rollouts.evaluate(prompts)}

    def _probe(self, samples: list[Sample]) -> None:
        """Compares what the engine recorded with what the trainer computes, on a few of its first responses."""
        few: list[Sample] = []
        tokens = 0
        for sample in samples:
            if tokens < _PROBED_TOKENS * self.trainee.dp_size and sample.valid_mask.any():
                few.append(sample)
                tokens += sample.response_length
        batches = self._micro_batches(few, torch.zeros(len(few)))
        contract = self.rollouts.settings.contract
        probe_recordings(self.trainee.model, batches, few, self.objective, self.trainee.groups, contract)
