"""How far a step that was cut is from the same step in one process: every row of the table, its bound, its errors.

The truth of a row is the single process with all samples in one micro-batch, from logits, e by a pre-pass; so rows
that reuse log-probs or start from hidden states are held to the ordinary path. float32, one optimizer step of Adam.
"""

import dataclasses
from typing import NamedTuple

import torch

from p3o_train.model import join_shards
from p3o_train.objective import Objective
from tests.distributed.ranks import on_all_ranks
from tests.megatron.steps import Cut, Outcome, Variant, every_step

WHOLE = Cut()
STEP = Objective(ess_scope="step", entropy_coef=0.02)
PREPASS, MICRO = "step, prepass", "micro-batch"
REUSE, HIDDEN, HIDDEN_TIED, GRPO = "step, reuse", "step, from hidden", "step, from hidden, tied", "GRPO"
VARIANTS = {
    PREPASS: Variant(STEP),
    MICRO: Variant(dataclasses.replace(STEP, ess_scope="micro-batch")),
    REUSE: Variant(dataclasses.replace(STEP, context_source="reuse")),
    HIDDEN: Variant(dataclasses.replace(STEP, from_hidden=True)),
    HIDDEN_TIED: Variant(dataclasses.replace(STEP, from_hidden=True), tied=True),
    GRPO: Variant(Objective(advantage_estimator="grpo", entropy_coef=0.02)),
}
TRUTHS = dict.fromkeys(VARIANTS, VARIANTS[PREPASS]) | {
    MICRO: VARIANTS[MICRO],
    HIDDEN_TIED: Variant(STEP, tied=True),
    GRPO: VARIANTS[GRPO],
}
OVER_RANKS = tuple(
    Cut(**sizes)
    for sizes in (
        {"dp": 2},
        {"tp": 2},
        {"pp": 2},
        {"cp": 2},
        {"dp": 4},
        {"tp": 2, "pp": 2},
        {"dp": 2, "cp": 2},
        {"tp": 2, "cp": 2},
        {"cp": 4},
    )
)
IN_ONE_PROCESS = (Cut(micro_batch_size=1), Cut(micro_batch_size=2), Cut(micro_batch_size=4))
SMALLER = (
    Cut(dp=2, micro_batch_size=1),
    Cut(dp=2, micro_batch_size=2),
    Cut(pp=2, micro_batch_size=2),
    Cut(cp=2, micro_batch_size=4),
    Cut(dp=4, micro_batch_size=1),
    Cut(tp=2, pp=2, micro_batch_size=1),
    Cut(dp=2, cp=2, micro_batch_size=2),
    Cut(tp=2, cp=2, micro_batch_size=4),
    Cut(cp=4, micro_batch_size=2),
)
SOME = (
    Cut(micro_batch_size=2),
    Cut(dp=2, micro_batch_size=1),
    Cut(tp=2),
    Cut(pp=2, micro_batch_size=2),
    Cut(cp=2),
    Cut(tp=2, pp=2, micro_batch_size=1),
    Cut(dp=2, cp=2),
)
CUTS = {PREPASS: IN_ONE_PROCESS + OVER_RANKS + SMALLER, MICRO: OVER_RANKS} | dict.fromkeys(
    (REUSE, HIDDEN, HIDDEN_TIED, GRPO), SOME
)
ROWS = tuple((name, cut) for name, cuts in CUTS.items() for cut in cuts)
# other micro-batches have other e: micro-batch scope is not defined by the step alone
DIFFERENT = (MICRO, Cut(micro_batch_size=1))
BOUND, WIDE_BOUND = 1e-6, 3e-6


class Errors(NamedTuple):
    """Of one row, all relative to the truth."""

    loss: float
    ess: float | None
    """None for GRPO, which has no e."""
    gradient: float
    """L2, in the parameter with the largest."""
    parameter: str
    weights: float
    """L2, in the parameter with the largest, after the optimizer step."""
    moved: float
    """How far the step has moved the parameter that moved least, L2."""
    valid_tokens: float


def bounds(cut: Cut) -> dict[str, float]:
    """Of a row: 1e-6 unless the mere order of float32 sums is larger.

    With TP every layer adds two halves of its inner products, also forward: activations differ in their last bit before
    there is any gradient, and a gradient is a sum over products of many of them.
    """
    gradient = WIDE_BOUND if cut.tp > 1 else BOUND
    return {"loss": BOUND, "ess": BOUND, "gradient": gradient, "weights": BOUND}


def measure() -> dict[tuple[str, Cut], Errors]:
    """Every row, and ``DIFFERENT``. One set of processes for each number of ranks."""
    wanted = {(VARIANTS[name], cut) for name, cut in (*ROWS, DIFFERENT)} | {(made, WHOLE) for made in TRUTHS.values()}
    outcomes: dict[tuple[Variant, Cut], list[Outcome]] = {}
    for ranks in sorted({cut.ranks for _, cut in wanted}):
        steps = sorted((step for step in wanted if step[1].ranks == ranks), key=lambda step: (step[1], repr(step[0])))
        collected = on_all_ranks(every_step, ranks, tuple(steps))
        outcomes |= {step: [found[step] for found in collected] for step in steps}
    return {
        (name, cut): errors(name, outcomes[VARIANTS[name], cut], outcomes[TRUTHS[name], WHOLE])
        for name, cut in (*ROWS, DIFFERENT)
    }


def errors(name: str, ranks: list[Outcome], truth: list[Outcome]) -> Errors:
    ours, theirs = (next(rank.metrics for rank in some if rank.metrics) for some in (ranks, truth))
    known = [rank.ess for rank in ranks if rank.ess == rank.ess]
    assert len(set(known)) == 1, "ranks have a different e"
    gradients = distances(joined(ranks, "gradients"), joined(truth, "gradients"))
    before, after = joined(ranks, "before"), joined(ranks, "after")
    worst = max(gradients, key=lambda parameter: gradients[parameter])
    return Errors(
        loss=abs(ours["total_loss"] / theirs["total_loss"] - 1),
        ess=None if name == GRPO else abs(known[0] / truth[0].ess - 1),
        gradient=gradients[worst],
        parameter=worst,
        weights=max(distances(after, joined(truth, "after")).values()),
        moved=min(distances(after, before).values()),
        valid_tokens=ours["valid_tokens"],
    )


def joined(ranks: list[Outcome], what: str) -> dict[str, torch.Tensor]:
    """Full name -> full tensor, from the shards of the tensor-parallel ranks; every other copy has the same bits."""
    shards: dict[str, dict[int, torch.Tensor]] = {}
    dims = {}
    for outcome in ranks:
        for name, (shard, dim) in getattr(outcome, what).items():
            first = shards.setdefault(name, {}).setdefault(outcome.tp_rank, shard)
            assert torch.equal(first, shard), f"copies of {what} of {name} differ"
            dims[name] = dim
    whole = {}
    for name, parts in shards.items():
        ordered = [shard for _, shard in sorted(parts.items())]
        dim = dims[name]
        assert dim is not None or all(torch.equal(ordered[0], shard) for shard in ordered), (
            f"TP copies of {name} differ"
        )
        whole[name] = ordered[0] if dim is None else join_shards(ordered, name, dim)
    return whole


def distances(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative L2 of every parameter."""
    assert ours.keys() == theirs.keys()
    return {
        name: ((ours[name].double() - full.double()).norm() / full.double().norm()).item()
        for name, full in theirs.items()
    }
