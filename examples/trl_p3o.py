"""Train a tiny random model with P3O inside TRL, on the CPU and without a download.

    pip install -e ".[trl]"
    python examples/trl_p3o.py               half a minute on two cores; --help lists the flags

The prompt is a digit, and the reward is the share of four response tokens that repeat it. Every generation is used for
four optimizer steps, so all but the first are off-policy: watch e (the normalized ESS) fall when the policy moves fast.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read by torch at import; spinning threads stall on busy cores

import torch

try:
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        PrinterCallback,
        Qwen2Config,
        Qwen2ForCausalLM,
        TrainerCallback,
        set_seed,
    )

    from p3o_train.adapters.trl import P3OConfig, P3OTrainer
except ImportError as error:
    sys.exit(f'{error}\nthis example needs TRL: pip install -e ".[trl]" in the folder of the repository')

DIGITS = "0123456789"
LENGTH = 4  # response tokens


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each digit, built here."""
    words = {"<pad>": 0, "<eos>": 1} | {digit: place + 2 for place, digit in enumerate(DIGITS)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def make_model() -> Qwen2ForCausalLM:
    """Two layers of 64 with random weights."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(**shape, num_key_value_heads=4, vocab_size=12, pad_token_id=0, eos_token_id=1))


def repeated(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: share of the response that repeats the digit."""
    return [completion.split().count(prompt) / LENGTH for prompt, completion in zip(prompts, completions, strict=True)]


class Table(TrainerCallback):
    """Prints one line for each generation, with the lowest e of its optimizer steps."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.ess: list[float] = []
        print(f"{'step':>6}{'reward':>10}{'lowest e':>10}{'mean ratio':>12}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "p3o/normalized_ess" not in logs:
            return
        self.ess.append(logs["p3o/normalized_ess"])
        if "reward" in logs:  # of the generation that begins with this step
            self.rewards.append(logs["reward"])
        if state.global_step % 20 == 0 or state.global_step == state.max_steps:
            lowest, ratio = min(self.ess[-20:]), logs["p3o/ratio_mean"]
            print(f"{state.global_step:6}{self.rewards[-1]:10.3f}{lowest:10.3f}{ratio:12.3f}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Train and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default %(default)s)")
    parser.add_argument("--ess-scope", choices=("micro-batch", "step"), default="step", help="(default %(default)s)")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {chosen.steps}")
    torch.set_num_threads(1)  # more threads slow such a small model down
    set_seed(0)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of names that TRL still uses
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        settings = P3OConfig(
            output_dir=folder,
            max_steps=chosen.steps,
            per_device_train_batch_size=40,
            gradient_accumulation_steps=2,
            steps_per_generation=4,  # two optimizer steps on each generation ...
            num_iterations=2,  # ... twice
            num_generations=8,
            max_completion_length=LENGTH,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            p3o_ess_scope=chosen.ess_scope,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = P3OTrainer(
            model=make_model(),
            reward_funcs=repeated,
            args=settings,
            train_dataset=datasets.Dataset.from_dict({"prompt": list(DIGITS) * 2}),
            processing_class=make_tokenizer(),
            callbacks=[table],
        )
        trainer.remove_callback(PrinterCallback)  # it prints every number of every step
        trainer.train()
    print(f"reward of the first generation {table.rewards[0]:.3f}, of the last {table.rewards[-1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
