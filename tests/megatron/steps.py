"""One optimizer step of P3O on real Megatron-Core, cut in every way: what each rank holds of it."""

import dataclasses
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist

from p3o_train.batching import plan_micro_batches
from p3o_train.device_shim import megatron_on_cpu
from p3o_train.model import full_names
from p3o_train.objective import Objective
from p3o_train.packing import pack_step
from p3o_train.passes import policy_log_probs
from p3o_train.types import ContextLayout, PackedBatch, Sample
from tests.megatron.product import Product, build_product
from tests.megatron.topologies import CONFIG, Topology, groups

ADVANTAGES = (1.0, -1.0, 0.5, 2.0, -0.2, 0.7)
# (prompt, response); the fourth response is empty, the fifth masked altogether
LENGTHS = ((3, 6), (1, 9), (4, 4), (5, 0), (2, 3), (2, 11))


class Cut(NamedTuple):
    """How a step is cut: sizes of the groups, and samples of a micro-batch."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    micro_batch_size: int = len(LENGTHS)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


class Variant(NamedTuple):
    """What is optimised, and in which model."""

    objective: Objective
    tied: bool = False


class Outcome(NamedTuple):
    """What one rank holds after a step."""

    tp_rank: int
    ess: float
    """The frozen e in step scope, otherwise the mean over tokens of the e of micro-batches; NaN where unknown."""
    metrics: dict[str, float] | None
    """Of the whole step, where this rank has the last stage."""
    gradients: dict[str, tuple[torch.Tensor, int | None]]
    """Full name -> gradient of the shard before clipping, and the dimension along which tensor parallelism cuts it."""
    before: dict[str, tuple[torch.Tensor, int | None]]
    """Weights before the step, in the same form."""
    after: dict[str, tuple[torch.Tensor, int | None]]
    """Weights after one step of Adam."""


def samples() -> list[Sample]:
    # with some other seeds one entry of a gradient is so close to 0 that Adam, which divides by its size, turns the
    # last bits of the others into 1% of a step
    generator = torch.Generator().manual_seed(14)
    made = []
    for place, (prompt, response) in enumerate(LENGTHS):
        tokens = torch.randint(CONFIG.vocab_size, (prompt + response,), generator=generator)
        behavior = -4.2 + 0.4 * torch.randn(response, generator=generator)
        mask = torch.rand(response, generator=generator) > 0.25
        mask = torch.zeros(response, dtype=torch.bool) if place == 4 else mask
        made.append(Sample.from_lists(tokens, response, behavior, mask, sample_id=str(place)))
    return made


def batches(cut: Cut, dp_rank: int, layout: ContextLayout) -> list[PackedBatch]:
    """The micro-batches of one rank."""
    chosen = samples()
    costs = [layout.padded_length(sample.token_ids.numel()) for sample in chosen]
    plan = plan_micro_batches(costs, cut.dp, micro_batch_size=cut.micro_batch_size)
    return pack_step(chosen, ADVANTAGES, plan[dp_rank], layout, pad_token_id=1)


def shards(product: Product, attribute: str) -> dict[str, tuple[torch.Tensor, int | None]]:
    """``attribute`` of every parameter, copied."""
    module = product.model.module
    names = full_names(module)
    return {
        names[name]: (
            getattr(value, attribute).detach().clone(),
            value.partition_dim if getattr(value, "tensor_model_parallel", False) else None,
        )
        for name, value in module.named_parameters()
    }


def one_step(product: Product, made: list[PackedBatch], objective: Objective) -> Outcome:
    more = {}
    if objective.context_source == "reuse":
        more["log_probs"] = policy_log_probs([product.model], made, objective, product.groups)
    before = shards(product, "data")
    result = product.gradients(made, objective, **more)
    gradients = shards(product, "main_grad")
    product.update()
    metrics = result.metrics
    if metrics is not None and product.groups.data_context is not None:
        metrics = metrics.all_reduce(product.groups.data_context)
    told = None if metrics is None else metrics.to_dict("")
    ess = torch.nan if told is None else told["normalized_ess"]
    return Outcome(
        tp_rank=product.tp_rank,
        ess=ess if result.context is None else result.context.ess.item(),
        metrics=told,
        gradients=gradients,
        before=before,
        after=shards(product, "data"),
    )


def every_step(rank: int, steps: tuple[tuple[Variant, Cut], ...]) -> dict[tuple[Variant, Cut], Outcome]:
    """What this rank found. Groups of the same sizes serve all steps in a row that need them."""
    found = {}
    with megatron_on_cpu():
        for sizes, some in itertools.groupby(steps, lambda step: Topology(step[1].tp, step[1].pp, step[1].cp)):
            with groups(sizes):
                for variant, cut in some:
                    product = build_product(dataclasses.replace(CONFIG, tie_embeddings=variant.tied))
                    made = batches(cut, product.dp_rank, product.layout)
                    found[variant, cut] = one_step(product, made, variant.objective)
    return found


def empty_shards(rank: int, scopes: tuple[str, ...]) -> dict[tuple[int, str], Outcome]:
    """{(cp, scope): outcome}: all ranks but the first have no valid token, in one micro-batch."""
    found = {}
    with megatron_on_cpu():
        for cp in (1, 2):
            with groups(Topology(cp=min(cp, dist.get_world_size()))):
                for scope in scopes:
                    product = build_product(CONFIG)
                    made = first_rank_only(product) if cp > 1 else first_replica_only(product)
                    found[cp, scope] = one_step(product, made, Objective(ess_scope=scope))
    return found


def first_replica_only(product: Product) -> list[PackedBatch]:
    mine = list(range(len(LENGTHS))) if product.dp_rank == 0 else []
    return pack_step(samples(), ADVANTAGES, [mine], product.layout, pad_token_id=1)


def first_rank_only(product: Product) -> list[PackedBatch]:
    """Of 8 tokens the first CP rank of two holds 0, 1, 6 and 7; row 6 predicts the only response token."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(CONFIG.vocab_size, (3, 8), generator=generator)
    made = [Sample.from_lists(row, 1, [log_prob]) for row, log_prob in zip(tokens, (-4.5, -3.9, -4.1), strict=True)]
    (batch,) = pack_step(made, (1.0, -0.5, 2.0), [[0, 1, 2]], product.layout, pad_token_id=1)
    assert batch.num_tokens == (0 if product.layout.cp_rank else 3)
    return [batch]
