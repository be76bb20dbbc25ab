"""The settings of ``p3o train``: one dataclass, which is the only place with their defaults, and its flags.

Flags have the names of Megatron-LM and slime where those have one. The objective has its own (``p3o_train.arguments``).
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from dataclasses import dataclass
from typing import Any

import torch

from p3o_train.model import ModelConfig
from p3o_train.runtime import OptimizerSettings, Parallelism


def _flag(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """Everything about a run but its objective; each field is a flag of the same name."""

    run_dir: str = _flag("runs/p3o", "directory of metrics.jsonl, curves.png, config.json and checkpoints")
    num_rollouts: int = _flag(100, "rollouts of the whole run")
    rollout_batch_size: int = _flag(16, "prompts of a rollout")
    n_samples_per_prompt: int = _flag(8, "responses to each prompt: a group, whose rewards are compared")
    rollout_max_response_len: int = _flag(8, "tokens of a response at most")
    global_batch_size: int = _flag(128, "responses of an optimizer step; a rollout has a multiple of it")
    micro_batch_size: int = _flag(0, "responses of a micro-batch; 0: cut by --max-tokens-per-gpu")
    max_tokens_per_gpu: int = _flag(16384, "tokens of a micro-batch on one rank at most, where --micro-batch-size is 0")
    normalize_by_std: bool = _flag(True, "divide advantages by the standard deviation of their group")
    num_layers: int = _flag(2, "transformer layers")
    hidden_size: int = _flag(64, "width of the model")
    num_attention_heads: int = _flag(4, "query heads")
    num_query_groups: int = _flag(2, "key and value heads")
    ffn_hidden_size: int = _flag(128, "width of the gated feed-forward layers")
    tie_embeddings: bool = _flag(False, "the output layer uses the embedding")
    init_std: float = _flag(0.02, "standard deviation of the initial weights")
    bf16: bool = _flag(False, "bfloat16 parameters and activations with float32 master weights; otherwise float32")
    tensor_model_parallel_size: int = _flag(1, "ranks that share the vocabulary and every layer")
    pipeline_model_parallel_size: int = _flag(1, "stages that share the layers")
    context_parallel_size: int = _flag(1, "ranks that share the tokens of a sequence")
    use_distributed_optimizer: bool = _flag(False, "cut optimizer states over data-parallel ranks")
    lr: float = _flag(1e-3, "learning rate of Adam, after warm-up")
    min_lr: float = _flag(0.0, "learning rate at the end of the decay")
    lr_decay_style: str = _flag("constant", "constant, linear, cosine or inverse-square-root")
    lr_warmup_iters: int = _flag(0, "optimizer steps over which the learning rate grows from 0")
    weight_decay: float = _flag(0.0, "decoupled weight decay")
    adam_beta1: float = _flag(0.9, "of Adam")
    adam_beta2: float = _flag(0.95, "of Adam")
    clip_grad: float = _flag(1.0, "largest norm of all gradients; 0 does not clip")
    seed: int = _flag(0, "of weights, prompts and sampling")
    save_interval: int = _flag(20, "rollouts between two checkpoints; 0 saves none")
    keep_checkpoints: int = _flag(2, "newest checkpoints that are kept")
    resume: bool = _flag(False, "go on from the newest checkpoint in --run-dir; from the start where there is none")
    tensorboard: bool = _flag(False, "also write TensorBoard events to --run-dir")
    wandb_project: str = _flag("", "also log to this Weights & Biases project")
    distributed_timeout_minutes: float = _flag(10.0, "how long a collective waits for a rank that does not come")

    def __post_init__(self) -> None:
        for name in ("num_rollouts", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("micro_batch_size", "save_interval", "lr_warmup_iters", "weight_decay", "clip_grad"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        self._check("keep_checkpoints", self.keep_checkpoints >= 1, "at least 1")
        self._check("max_tokens_per_gpu", self.max_tokens_per_gpu >= 1, "at least 1")
        self._check("lr", self.lr >= self.min_lr >= 0, "at least --min-lr, which is 0 or more")
        styles = ("constant", "linear", "cosine", "inverse-square-root")
        self._check("lr_decay_style", self.lr_decay_style in styles, f"one of {', '.join(styles)}")
        samples = self.rollout_batch_size * self.n_samples_per_prompt
        self._check(
            "global_batch_size",
            self.global_batch_size >= 1 and samples % self.global_batch_size == 0,
            f"a divisor of the {samples} responses of a rollout (--rollout-batch-size x --n-samples-per-prompt)",
        )
        steps = self.total_steps
        self._check(
            "lr_warmup_iters", self.lr_warmup_iters < steps, f"less than the {steps} optimizer steps of the run"
        )

    def _check(self, name: str, fine: bool, expected: str) -> None:
        if not fine:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be {expected}; got {getattr(self, name)!r}")

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of a rollout."""
        return self.rollout_batch_size * self.n_samples_per_prompt // self.global_batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.num_rollouts * self.steps_per_rollout

    @property
    def parallelism(self) -> Parallelism:
        """Sizes of the model-parallel groups."""
        return Parallelism(
            self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size
        )

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The architecture, for a task with this vocabulary."""
        return ModelConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_query_groups,
            ffn_size=self.ffn_hidden_size,
            vocab_size=vocab_size,
            tie_embeddings=self.tie_embeddings,
            dtype=torch.bfloat16 if self.bf16 else torch.float32,
            seed=self.seed,
            init_std=self.init_std,
        )

    def optimizer_settings(self) -> OptimizerSettings:
        """Adam and its schedule."""
        return OptimizerSettings(
            lr=self.lr,
            total_steps=self.total_steps,
            min_lr=self.min_lr,
            lr_decay_style=self.lr_decay_style,
            lr_warmup_steps=self.lr_warmup_iters,
            weight_decay=self.weight_decay,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            clip_grad=self.clip_grad,
            use_distributed_optimizer=self.use_distributed_optimizer,
        )

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree in: everything that changes numbers."""
        free = ("run_dir", "save_interval", "keep_checkpoints", "resume", "tensorboard", "wandb_project")
        kept = {name: value for name, value in dataclasses.asdict(self).items() if name not in free}
        kept.pop("distributed_timeout_minutes")
        return kept


PRESETS: dict[str, dict[str, Any]] = {
    # a two-layer model learns to say two digits backwards, on two CPU cores in a minute or two
    "tiny": {
        "run_dir": "runs/tiny",
        "num_rollouts": 80,
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 16,
        "rollout_max_response_len": 4,
        "global_batch_size": 256,  # two steps for each rollout: the second is off-policy
        "init_std": 0.05,
        "lr": 3e-3,
        "lr_warmup_iters": 5,
        "lr_decay_style": "linear",
        "save_interval": 10,
        "p3o_ess_scope": "step",
        "use_rollout_logprobs": True,
        "calculate_per_token_loss": True,
    }
}
"""Values of flags, here and of ``p3o_train.arguments``, by the name that ``--preset`` takes."""


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of ``TrainConfig``; a bool has a --no- form as well."""
    group = parser.add_argument_group("run")
    types = typing.get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        options: dict[str, Any] = {"default": field.default, "help": field.metadata["help"]}
        if types[field.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = types[field.name]
        group.add_argument("--" + field.name.replace("_", "-"), **options)


def config_from_arguments(args: argparse.Namespace) -> TrainConfig:
    """The settings from parsed flags.

    Raises:
        ValueError: a value out of range, naming the flag.
    """
    return TrainConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(TrainConfig)})
