"""What an optimizer step costs with P3O and with GRPO, on the real Megatron-Core.

Run ``python -m bench.train_step``: forward and backward of a decoder over the micro-batches of a step, without the
optimizer, on one CPU thread. Every candidate gets the same micro-batches and weights; rounds are interleaved. "reuse"
is given the log-probs of the trainer's own pass, whose cost has a line of its own: a trainer that runs such a pass
anyway pays nothing for e.
"""

import argparse
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import interleave
from bench.check_vocabulary import environment
from p3o_train.model import ModelConfig
from p3o_train.objective import Objective
from p3o_train.packing import pack
from p3o_train.passes import policy_log_probs, step_gradients
from p3o_train.runtime import OptimizerSettings, Parallelism, Trainee, build_trainee, megatron_run
from p3o_train.types import PackedBatch, Sample

MODEL = ModelConfig(num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=4, ffn_size=512, vocab_size=8192)
MICRO_BATCHES, SEQUENCES, PROMPT, RESPONSE = 2, 4, 32, 224
ROUNDS = 7
STEP = Objective(ess_scope="step")
CANDIDATES = {
    "grpo": Objective(advantage_estimator="grpo"),
    "p3o micro-batch": Objective(),
    "p3o step, prepass": STEP,
    "p3o step, reuse": dataclasses.replace(STEP, context_source="reuse"),
    "p3o step, prepass, from hidden": dataclasses.replace(STEP, from_hidden=True),
}
LOG_PROB_PASS = "log-prob pass alone"


class Timed:
    """One candidate; ``clear`` forgets its gradients."""

    def __init__(self, run: Callable[[], object], trainee: Trainee) -> None:
        self._run, self.clear = run, trainee.zero_grad

    def __call__(self) -> None:
        self._run()


def samples() -> tuple[list[Sample], torch.Tensor]:
    """Those of a step, and their advantages."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(MICRO_BATCHES * SEQUENCES):
        tokens = torch.randint(MODEL.vocab_size, (PROMPT + RESPONSE,), generator=generator)
        behavior = -9.0 + 0.1 * torch.randn(RESPONSE, generator=generator)
        made.append(Sample.from_lists(tokens, RESPONSE, behavior, sample_id=str(index)))
    return made, torch.randn(len(made), generator=generator)


def micro_batches() -> list[PackedBatch]:
    made, advantages = samples()
    return [
        pack(made[begin : begin + SEQUENCES], advantages[begin : begin + SEQUENCES])
        for begin in range(0, len(made), SEQUENCES)
    ]


def candidates(trainee: Trainee, batches: Sequence[PackedBatch]) -> dict[str, Any]:
    """Name -> what is timed."""
    model, groups = trainee.model, trainee.groups
    known = policy_log_probs(model, batches, STEP, groups)

    def timed(objective: Objective) -> Timed:
        given = known if objective.context_source == "reuse" else None
        return Timed(lambda: step_gradients(model, batches, objective, groups, log_probs=given), trainee)

    steps = {name: timed(objective) for name, objective in CANDIDATES.items()}
    steps[LOG_PROB_PASS] = Timed(lambda: policy_log_probs(model, batches, STEP, groups), trainee)
    return steps


def report(medians: dict[str, float]) -> str:
    """One line for each candidate."""
    base = medians["grpo"]
    lines = [f"{name:32s} {1000 * value:8.1f} ms  {value / base:5.2f}x of GRPO" for name, value in medians.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    warnings.filterwarnings("ignore", module=r"megatron\.")
    torch.set_num_threads(1)
    print(
        f"{MODEL.num_layers} layers of {MODEL.hidden_size}, vocabulary {MODEL.vocab_size:,}, float32; {MICRO_BATCHES} "
        f"micro-batches of {SEQUENCES} sequences of {PROMPT} + {RESPONSE} tokens"
    )
    print(environment())
    with megatron_run(Parallelism()):
        trainee = build_trainee(MODEL, OptimizerSettings(lr=1e-3, total_steps=1))
        steps = candidates(trainee, micro_batches())
        for step in steps.values():
            step()
            step.clear()
        print(report(interleave.medians(interleave.seconds(steps, rounds, interleave.clock_for(1)))))


if __name__ == "__main__":
    main()
