"""Is the loss from hidden states as near to its matrix products, and as small, as it should be?

Run ``python -m bench.check_vocabulary``: forward and backward at T = 2,048, H = 512, V = 32,768, float32, ESS given,
32 MiB of workspace, on the CPU. Prints every figure and exits with 1 when a limit is missed. Every candidate gets the
same tensors, all tokens valid, and makes the gradients of hidden states and weight anew. The bare products write into
memory allocated before; GRPO is what Liger computes, from the same products and the same vocabulary.
"""

import argparse
import datetime
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch

from bench import interleave
from bench.peers import make_step, why_absent
from bench.vocabulary_workload import CPU, GEMMS, MIB, NAIVE, Shape, Step, make_batch, peak_bytes
from p3o_train import doctor

P3O, LIGER = "p3o", "liger_grpo"
CANDIDATES = (GEMMS, P3O, LIGER, NAIVE)
ROUNDS = 5


class Verdict(NamedTuple):
    """One comparison; ``reached`` is None where there is nothing to compare with."""

    text: str
    reached: bool | None

    def __str__(self) -> str:
        return self.text if self.reached is None else f"{self.text} is {'reached' if self.reached else 'MISSED'}"


def necessary_bytes(shape: Shape) -> int:
    """dX, dW and one tile of logits: what a step from hidden states holds when it holds no logits."""
    itemsize = torch.finfo(shape.dtype).bits // 8
    return itemsize * (shape.tokens + shape.vocab) * shape.hidden + shape.workspace_bytes


def verdicts(seconds: Mapping[str, float], peaks: Mapping[str, int], necessary: int) -> list[Verdict]:
    """Of medians and peaks by candidate; Liger may be missing."""

    def at_most(what: str, value: float, limit: float) -> Verdict:
        return Verdict(f"{what}: {value:.3f}x; at most {limit:g}x", value <= limit)

    found = [at_most("time of p3o over the three bare GEMMs", seconds[P3O] / seconds[GEMMS], 1.15)]
    if LIGER in seconds:
        found.append(at_most("time of p3o over LigerFusedLinearGRPOLoss", seconds[P3O] / seconds[LIGER], 0.75))
    else:
        found.append(Verdict("time of p3o over LigerFusedLinearGRPOLoss: not installed, not checked", None))
    found.append(at_most("peak extra memory of p3o over dX + dW + tile", peaks[P3O] / necessary, 1.3))
    share = peaks[NAIVE] / peaks[P3O]
    found.append(Verdict(f"peak extra memory of naive over p3o: {share:.2f}x; at least 5x", share >= 5.0))
    return found


def environment() -> str:
    """What the figures depend on, in one line."""
    threads = torch.get_num_threads()
    plural = "s" * (threads > 1)
    return f"{doctor.cpu_name()}, {threads} thread{plural}, torch {torch.__version__}, {datetime.date.today()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"T = {CPU.tokens:,}, H = {CPU.hidden}, V = {CPU.vocab:,}, {CPU.dtype}, {CPU.workspace_bytes // MIB} MiB")
    print(environment())
    batch = make_batch(CPU, "hidden")
    steps: dict[str, Step] = {}
    peaks = {}
    for name in (name for name in CANDIDATES if why_absent(name, "cpu") is None):
        steps[name] = make_step(name, batch, "given_context")
        steps[name]()  # caches and libraries are warm for both figures
        peaks[name] = peak_bytes(steps[name], "cpu")
        steps[name].clear()
    times = interleave.seconds(steps, options.rounds, interleave.clock_for(options.threads))
    medians = interleave.medians(times)
    for name in CANDIDATES:
        if name not in steps:
            print(f"{name:12} not installed")
            continue
        each = " ".join(f"{1e3 * value:.0f}" for value in times[name])
        print(f"{name:12} median {1e3 * medians[name]:7.1f} ms ({each}), peak extra {peaks[name] / MIB:6.1f} MiB")
    found = verdicts(medians, peaks, necessary_bytes(CPU))
    print(*found, sep="\n")
    return int(any(verdict.reached is False for verdict in found))


if __name__ == "__main__":
    sys.exit(main())
