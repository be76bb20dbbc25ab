"""Where an optimizer step of the Megatron layer spends its time, with GRPO and with every source of e.

Run ``python -m bench.step_phases``, or with two replicas ``torchrun --nproc-per-node 2 -m bench.step_phases``: model
and samples of ``bench.train_step``, dealt to the replicas, one thread each, float32. A step is cut into

    packing             samples to micro-batches
    log-prob pass       the trainer's own, where e is taken from it ("reuse"); nothing extra where one runs anyway
    pre-pass            a forward pass for e, its reduction and its arrival on the host
    forward + backward  of the training pass, with the loss and the check of the step
    gradients           Megatron's finalizer: sum over the replicas, division by the token count
    optimizer           norm, clipping and Adam
    sync                full weights out of Megatron and into the engine of the same process

Times are on the clock, of the first rank; ranks wait for each other at the end of each phase. Candidates take turns.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import train_step
from p3o_train.batching import plan_micro_batches
from p3o_train.hf_model import hf_config
from p3o_train.hf_weights import export_hf_weights
from p3o_train.local_engine import LocalEngine
from p3o_train.objective import Objective
from p3o_train.packing import pack_step
from p3o_train.passes import policy_log_probs, step_gradients
from p3o_train.runtime import OptimizerSettings, Parallelism, Trainee, build_trainee, megatron_run

PHASES = ("packing", "log-prob pass", "pre-pass", "forward + backward", "gradients", "optimizer", "sync")
REDUCTION = "gradients"
ROUNDS = 5


class Stopwatch:
    """Seconds by phase; a phase ends when all ranks are through."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        dist.barrier()
        self.seconds[phase] += time.perf_counter() - begin


class Bench:
    """A model to train, an engine that samples, and the samples of one step."""

    def __init__(self, trainee: Trainee) -> None:
        self.trainee = trainee
        self.engine = LocalEngine(hf_config(train_step.MODEL))
        self.samples, self.advantages = train_step.samples()
        self.watch = Stopwatch()
        self._version = 0
        self._time_reduction()

    def step(self, objective: Objective) -> dict[str, float]:
        """One optimizer step with everything around it but the rollout; seconds by phase."""
        trainee, model, groups = self.trainee, self.trainee.model, self.trainee.groups
        self.watch = watch = Stopwatch()
        dist.barrier()
        with watch.time("packing"):
            costs = [sample.token_ids.numel() for sample in self.samples]
            plan = plan_micro_batches(costs, trainee.dp_size, micro_batch_size=train_step.SEQUENCES)
            batches = pack_step(self.samples, self.advantages, plan[trainee.dp_rank], trainee.layout)
        known = None
        if objective.needs_context and objective.context_source == "reuse":
            with watch.time("log-prob pass"):
                known = policy_log_probs(model, batches, objective, groups)
        trainee.zero_grad()
        with watch.time("forward + backward"):
            result = step_gradients(model, batches, objective, groups, log_probs=known)
        watch.seconds["pre-pass"] = result.prepass_seconds
        watch.seconds["forward + backward"] -= result.prepass_seconds + watch.seconds[REDUCTION]
        with watch.time("optimizer"):
            trainee.step()
        self._version += 1
        with watch.time("sync"):
            self.engine.update_weights(export_hf_weights(model, groups), self._version)
        return watch.seconds

    def _time_reduction(self) -> None:
        """Megatron's gradient finalizer, which ``step_gradients`` calls, runs under the watch of its step."""
        from megatron.core.utils import get_model_config

        config = get_model_config(self.trainee.model[0])
        finalize: Callable[..., Any] = config.finalize_model_grads_func

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.watch.time(REDUCTION):
                return finalize(*args, **kwargs)

        config.finalize_model_grads_func = timed


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row for each candidate of ``train_step``; inside ``megatron_run``."""
    bench = Bench(build_trainee(train_step.MODEL, OptimizerSettings(lr=1e-5, total_steps=1)))
    times: dict[str, list[dict[str, float]]] = {name: [] for name in train_step.CANDIDATES}
    for number in range(rounds + 1):
        for name, objective in train_step.CANDIDATES.items():
            seconds = bench.step(objective)
            if number:  # the first round fills caches
                times[name].append(seconds)
    return [
        {
            "candidate": name,
            "seconds": {phase: statistics.median(each[phase] for each in found) for phase in PHASES},
        }
        for name, found in times.items()
    ]


def setting(ranks: int) -> dict[str, Any]:
    """What was trained, for the reader of the numbers."""
    model = train_step.MODEL
    return {
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "vocab": model.vocab_size,
        "sequences": train_step.MICRO_BATCHES * train_step.SEQUENCES,
        "tokens_per_sequence": train_step.PROMPT + train_step.RESPONSE,
        "sequences_per_micro_batch": train_step.SEQUENCES,
        "ranks": ranks,
    }


def report(rows: list[dict[str, Any]]) -> str:
    """One line for each candidate, milliseconds by phase."""
    lines = [f"{'ms':32}" + "".join(f"{phase:>20}" for phase in PHASES)]
    for row in rows:
        cells = "".join(f"{1e3 * row['seconds'][phase]:20.1f}" for phase in PHASES)
        lines.append(f"{row['candidate']:32}{cells}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, help="JSON of the rows and of what was trained")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module=r"megatron\.")
    torch.set_num_threads(1)
    with megatron_run(Parallelism()):
        rows = measure(options.rounds)
        if dist.get_rank() == 0:
            print(report(rows))
            if options.output:
                content = {"setting": setting(dist.get_world_size()), "rows": rows}
                options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
