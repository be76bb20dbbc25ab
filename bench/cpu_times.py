"""Times and peak memory of the losses on this CPU, for the performance page; one process for one number of threads.

Run ``python -m bench.cpu_times --threads 2 --output times.json``. With one thread a time is CPU time, to which other
processes add little; with more it is time on the clock. All candidates of a table take turns. Peak memory is what the
allocator records beyond what was there before: gradients are in it, inputs are not.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import interleave
from bench.baselines import plain_loss
from bench.memory import peak_extra_bytes
from bench.peers import absences, make_step, why_absent
from bench.vocabulary_workload import CPU, GEMMS, NAIVE, NAIVE_COMPILED, SMOKE, Shape, make_batch, peak_bytes
from bench.workload import BASELINE, BASELINE_COMPILED, make_inputs
from bench.workload import make_step as make_token_step
from p3o_kernels import p3o_loss_per_sequence, p4o_loss

Row = dict[str, Any]
TOKENS = (4096, 16_384, 65_536, 262_144, 1_048_576)
MAIN_TOKENS, SEQUENCES = 262_144, 256
PLAIN, PLAIN_COMPILED = "plain", "plain_compiled"
PER_SEQUENCE, P4O = "p3o_loss_per_sequence", "p4o_loss"
TURN_TOKENS = 1 << 21  # in one turn of a candidate, in at most CALLS calls
ROUNDS, CALLS, VOCABULARY_ROUNDS = 5, 10, 3
SMALLER = CPU._replace(tokens=512)
# what runs at both sizes; the rest only at the larger
ESSENTIAL = ((GEMMS, "any"), ("p3o", "given_context"), (NAIVE, "given_context"))
FROM_HIDDEN = (
    *ESSENTIAL,
    ("p3o", "micro_batch"),
    (NAIVE_COMPILED, "given_context"),
    ("liger_grpo", "any"),
    ("liger_grpo_compiled", "any"),
)
FROM_LOGITS = tuple(pair for pair in FROM_HIDDEN if pair[0] != GEMMS and "liger" not in pair[0])


def token_steps(tokens: int) -> dict[str, Callable[[], None]]:
    """Forward and backward of the token loss by provider, all on the same inputs, e from the call.

    The published loss is compiled at one size only: its host reads cut it into a dozen graphs, each compiled alone.
    """
    inputs = make_inputs(tokens)
    log_probs, *rest = inputs
    compiled_plain = torch.compile(plain_loss, dynamic=True)

    def backward_of(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            loss().backward()
            log_probs.grad = None

        return step

    compiled = {BASELINE_COMPILED: make_token_step(BASELINE_COMPILED, tokens)} if tokens == MAIN_TOKENS else {}
    return {
        BASELINE: make_token_step(BASELINE, tokens),
        **compiled,
        PLAIN: backward_of(lambda: plain_loss(log_probs, *rest)),
        PLAIN_COMPILED: backward_of(lambda: compiled_plain(log_probs, *rest)),
        "eager": make_token_step("eager", tokens),
        "compiled": make_token_step("compiled", tokens),
    }


def variant_steps(tokens: int) -> dict[str, Callable[[], None]]:
    """The objectives without a fused kernel, beside ``p3o_loss`` with the backend that computes as they do."""
    log_probs, behavior, advantages, mask = make_inputs(tokens)
    proximal = (log_probs + 0.1 * torch.randn(tokens, generator=torch.Generator().manual_seed(1))).detach()
    offsets = torch.arange(0, tokens + 1, tokens // SEQUENCES, dtype=torch.int32)

    def per_sequence() -> None:
        p3o_loss_per_sequence(log_probs, behavior, advantages, mask, cu_seqlens=offsets, validate=False).loss.backward()
        log_probs.grad = None

    def two_anchors() -> None:
        p4o_loss(log_probs, behavior, proximal, advantages, mask, validate=False).loss.backward()
        log_probs.grad = None

    return {"eager": make_token_step("eager", tokens), PER_SEQUENCE: per_sequence, P4O: two_anchors}


def token_rows(table: str, steps: dict[str, Callable[[], None]], tokens: int, threads: int) -> list[Row]:
    """One row for each provider."""
    peaks = {}
    for name, step in steps.items():
        step()  # compiles, and fills caches
        peaks[name] = peak_extra_bytes(step, "cpu")
    calls = min(CALLS, max(2, TURN_TOKENS // tokens))
    seconds = interleave.medians(interleave.turns(steps, ROUNDS, calls, interleave.clock_for(threads)))
    return [
        {
            "table": table,
            "threads": threads,
            "tokens": tokens,
            "provider": name,
            "seconds": seconds[name],
            "peak_bytes": peaks[name],
        }
        for name in steps
    ]


def vocabulary_rows(source: str, shape: Shape, pairs: tuple[tuple[str, str], ...], threads: int) -> list[Row]:
    """One row for each provider that can run here."""
    batch = make_batch(shape, source)
    steps, peaks = {}, {}
    for provider, scope in (pair for pair in pairs if why_absent(pair[0], "cpu") is None):
        name = f"{provider} {scope}"
        steps[name] = make_step(provider, batch, scope)
        steps[name]()  # compiles, and fills caches
        peaks[name] = peak_bytes(steps[name], "cpu")
        steps[name].clear()
    seconds = interleave.medians(interleave.seconds(steps, VOCABULARY_ROUNDS, interleave.clock_for(threads)))
    return [
        {
            "table": f"from_{source}",
            "threads": threads,
            "tokens": shape.tokens,
            "hidden": shape.hidden,
            "vocab": shape.vocab,
            "workspace_bytes": shape.workspace_bytes,
            "provider": provider,
            "scope": scope,
            "seconds": seconds[f"{provider} {scope}"],
            "peak_bytes": peaks[f"{provider} {scope}"],
        }
        for provider, scope in pairs
        if f"{provider} {scope}" in steps
    ]


def measure(threads: int, smoke: bool = False) -> list[Row]:
    """All rows; ``smoke``: small sizes and nothing that is compiled, to try the code."""
    torch.set_num_threads(threads)
    if smoke:
        steps = {name: step for name, step in token_steps(4096).items() if "compiled" not in name}
        pairs = (*ESSENTIAL, ("liger_grpo", "any"))
        rows = token_rows("token", steps, 4096, threads)
        rows += token_rows("variants", variant_steps(4096), 4096, threads)
        rows += vocabulary_rows("logits", SMOKE, ESSENTIAL[1:], threads)
        return rows + vocabulary_rows("hidden", SMOKE, pairs, threads)
    rows = [row for tokens in TOKENS for row in token_rows("token", token_steps(tokens), tokens, threads)]
    rows += token_rows("variants", variant_steps(MAIN_TOKENS), MAIN_TOKENS, threads)
    rows += vocabulary_rows("logits", CPU, FROM_LOGITS, threads)
    if threads == 1:
        rows += vocabulary_rows("hidden", SMALLER, (*ESSENTIAL, ("liger_grpo", "any")), threads)
    return rows + vocabulary_rows("hidden", CPU, FROM_HIDDEN, threads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="JSON: rows, and who is absent")
    options = parser.parse_args()
    rows = measure(options.threads)
    options.output.write_text(json.dumps({"rows": rows, "absent": absences("cpu")}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
