"""Drivers of slime (commit 6bc5de43) and Relax (its loss.py and cp_utils.py of August 2026).

Our own restatement, on the groups of the real megatron-core over Gloo: batches in zigzag order, the token count, the
factor of context parallelism, Megatron's sum of gradients over DP x CP and its one division, the division of metrics.
"""

import sys
import types
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from problem import Response, log_probs, responses, weight

from p3o_train.adapters import relax, slime
from p3o_train.device_shim import megatron_on_cpu
from tests.megatron.topologies import Topology, groups

TEMPERATURE = 0.8
# samples of each micro-batch of each of two data-parallel replicas
CUTS = (
    (((0, 1, 2),), ((3, 4, 5),)),
    (((0,), (1, 2)), ((3, 4), (5,))),
    (((0,), (1,), (2,)), ((3,), (5,), (4,))),
)


def arguments(scope: str, **changed: Any) -> Namespace:
    given = {
        "calculate_per_token_loss": True,
        "recompute_loss_function": False,
        "rollout_temperature": TEMPERATURE,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "advantage_estimator": "grpo",
        "use_kl_loss": False,
        "kl_loss_coef": 0.0,
        "entropy_coef": 0.0,
        "use_rollout_logprobs": False,
        "p3o_ess_scope": scope,
        "qkv_format": "thd",
    }
    return Namespace(**given | changed)


def held(total: int, size: int, rank: int, padded: int | None = None) -> list[int]:
    """Positions of one sample that a context-parallel rank holds, padding included."""
    if size == 1:
        return list(range(total))
    chunk = -(-(padded or total) // (2 * size))
    return [chunk * part + step for part in (rank, 2 * size - 1 - rank) for step in range(chunk)]


def own(sample: Response, values: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The entries of a response that a rank holds."""
    rows = [row - sample.first_row for row in held(len(sample.tokens), size, rank)]
    return values[[row for row in rows if 0 <= row < len(values)]]


def batch_of(samples: list[Response], size: int, rank: int) -> dict[str, Any]:
    return {
        "unconcat_tokens": [sample.tokens for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "response_lengths": [len(sample.mask) for sample in samples],
        "loss_masks": [sample.mask.int() for sample in samples],
        "rollout_log_probs": [own(sample, sample.behavior, size, rank) for sample in samples],
        "advantages": [
            own(sample, torch.full_like(sample.behavior, sample.advantage), size, rank) for sample in samples
        ],
    }


def logits_of(samples: list[Response], at: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """[1, T, V] of this rank; rows of padding hold what a model makes of padding: anything."""
    rows = []
    for sample in samples:
        for position in held(len(sample.tokens), size, rank):
            rows.append(sample.features[position] if position < len(sample.tokens) else torch.ones(at.shape[0]))
    return (torch.stack(rows) @ at)[None]


def get_log_probs_and_entropy(logits: torch.Tensor, *, args: Namespace, **named: Any) -> Any:
    """The framework's own function, for both."""
    from megatron.core import parallel_state

    size, rank = named.get("dynamic_cp_size"), named.get("dynamic_cp_rank")
    size = parallel_state.get_context_parallel_world_size() if size is None else size
    rank = parallel_state.get_context_parallel_rank() if rank is None else rank
    rows, begin, made = logits[0] / args.rollout_temperature, 0, []
    lists = (named["unconcat_tokens"], named["total_lengths"], named["response_lengths"])
    for tokens, total, response in zip(*lists, strict=True):
        positions = held(total, size, rank)
        predicts = [place for place, row in enumerate(positions) if total - response - 1 <= row < total - 1]
        labels = tokens[[positions[place] + 1 for place in predicts]]
        every = rows[[begin + place for place in predicts]].log_softmax(-1)
        made.append(every.gather(-1, labels[:, None])[:, 0])
        begin += len(positions)
    return torch.empty(0), {"log_probs": made, **({"entropy": None} if named["with_entropy"] else {})}


def install() -> None:
    """The frameworks' modules, as far as the adapters ask for them."""
    for name in ("slime.backends.megatron_utils.loss", "relax.backends.megatron.loss"):
        module: Any = types.ModuleType(name)
        module.get_log_probs_and_entropy = get_log_probs_and_entropy
        module.get_rollout_top_p_logprob_kwargs = lambda args, batch: {}
        sys.modules[name] = module


def finish(at: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Megatron: gradients are summed over DP x CP and divided once by the sum of the counts, clamped at 1."""
    dist.all_reduce(at.grad)
    dist.all_reduce(tokens)
    return at.grad / tokens.clamp_min(1)


def slime_step(scope: str, cut: int, empty: int | None, cp: int) -> dict[str, Any]:
    """The hook and one optimizer step: the gradient, e and the reported metrics."""
    from megatron.core import parallel_state

    rank, replica = parallel_state.get_context_parallel_rank(), parallel_state.get_data_parallel_rank()
    every, at, args = responses(empty, TEMPERATURE), weight(), arguments(scope)
    micro_batches = [[every[index] for index in part] for part in CUTS[cut][replica]]
    mine = [sample for part in micro_batches for sample in part]
    rollout = batch_of(mine, cp, rank) | {"num_microbatches": [len(micro_batches)]}
    rollout["log_probs"] = [own(one, log_probs(one, at.detach(), TEMPERATURE), cp, rank) for one in mine]
    slime.collect_step_statistics(args, 3, rollout)
    tokens, values = torch.zeros((), dtype=torch.int), None
    for samples in micro_batches:
        batch = batch_of(samples, cp, rank)
        count = sum(mask.sum().clamp_min(1) for mask in batch["loss_masks"])
        loss, log = slime.p3o_loss_function(args, batch, logits_of(samples, at, cp, rank), None)
        (loss * cp).backward()
        tokens = tokens + count
        line = torch.tensor([count, *log.values()])
        values = line if values is None else values + line
    dist.all_reduce(values)
    reported = dict(zip(log, (values[1:] * cp / values[0]).tolist(), strict=True))
    return {"gradient": finish(at, tokens), "metrics": reported}


def relax_step(scope: str, cp: int, context: Any) -> torch.Tensor:
    """Three micro-batches on two context-parallel ranks: parts of the same samples, samples of its own, one a dummy."""
    from megatron.core import parallel_state

    rank = parallel_state.get_context_parallel_rank()
    every, at, args = responses(None, TEMPERATURE), weight(), arguments(scope)
    dummy = every[2]._replace(behavior=torch.full_like(every[2].behavior, torch.nan))
    schedule = [
        (every[0:2], cp, rank, False),
        ([every[2 + rank]], 1, 0, False),
        (every[4:6] if rank == 0 else [dummy], 1, 0, rank == 1),
    ]
    tokens = torch.zeros((), dtype=torch.int)
    if context is not None:
        relax.publish(context)
    for samples, size, place, is_dummy in schedule:
        batch = batch_of(samples, size, place)
        batch |= {"dynamic_cp_size": size, "dynamic_cp_rank": place, "__is_dummy__": is_dummy}
        loss, log = relax.p3o_loss_function(args, batch, logits_of(samples, at, size, place), None)
        assert all(torch.isfinite(value) for value in log.values())
        (0.0 * loss if is_dummy else loss).backward()
        local = [own(sample, sample.mask, size, place).sum() for sample in samples]
        count = sum(mask.clamp_min(1) if size == 1 else mask for mask in local)
        tokens = tokens + (0 if is_dummy else count)
    relax.withdraw()
    return finish(at, tokens)


def slime_ranks(rank: int, cp: int, runs: tuple[tuple[str, int, int | None], ...]) -> list[dict[str, Any]]:
    install()
    with megatron_on_cpu(), groups(Topology(cp=cp)):
        return [slime_step(*run, cp) for run in runs]


def relax_ranks(rank: int, context: Any) -> list[torch.Tensor]:
    install()
    with megatron_on_cpu(), groups(Topology(cp=2)):
        return [relax_step("micro-batch", 2, None), relax_step("step", 2, context)]


def refusals(rank: int) -> list[str]:
    """What a pipeline of two stages is told, of which only the last one has log-probs; the groups stay usable."""
    install()
    said = []
    with megatron_on_cpu(), groups(Topology(pp=2)):
        whole = batch_of(responses(0, TEMPERATURE), 1, 0) | {"num_microbatches": [2]}
        if rank == 1:
            whole["log_probs"] = [torch.zeros(len(mask)) for mask in whole["loss_masks"]]
        bad = whole | {"rollout_log_probs": [row - 400 for row in whole["rollout_log_probs"]]}
        none = whole | {"loss_masks": [mask * 0 for mask in whole["loss_masks"]]}
        for scope, data in (
            ("step", bad),
            ("step", whole | {"log_probs": None}),
            ("step", none),
            ("micro-batch", none),
            ("step", whole | {"num_microbatches": [1, 1]}),
            ("micro-batch", whole | {"num_microbatches": [1, 1]}),
            ("step", None),
            ("step", whole),
        ):
            try:
                slime.collect_step_statistics(arguments(scope), 5, data)
                said.append("published")
            except (ValueError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said
