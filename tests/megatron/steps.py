"""One optimizer step of P3O on real Megatron-Core, cut in every way: what each rank holds of its gradients."""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from p3o_train.batching import plan_micro_batches
from p3o_train.device_shim import megatron_on_cpu
from p3o_train.model import build_model, full_names
from p3o_train.objective import Objective
from p3o_train.packing import pack_step
from p3o_train.parallel import ParallelGroups
from p3o_train.passes import step_gradients
from p3o_train.types import ContextLayout, Sample
from tests.megatron.topologies import CONFIG

ADVANTAGES = (1.0, -1.0, 0.5, 2.0, -0.2, 0.7)
# (prompt, response); the fourth response is empty, the fifth masked altogether
LENGTHS = ((3, 6), (1, 9), (4, 4), (5, 0), (2, 3), (2, 11))


class Cut(NamedTuple):
    """How a step is cut: sizes of the groups, and samples of a micro-batch."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    micro_batch_size: int = 6

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


class Outcome(NamedTuple):
    """What one rank holds after a step."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    ess: float | None
    metrics: dict[str, float] | None
    """Of the whole step, where this rank has the last stage."""
    gradients: dict[str, tuple[torch.Tensor, int | None]]
    """Full name -> gradient of the shard, and the dimension along which tensor parallelism cuts it."""
    error: str = ""


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(11)
    made = []
    for place, (prompt, response) in enumerate(LENGTHS):
        tokens = torch.randint(CONFIG.vocab_size, (prompt + response,), generator=generator)
        behavior = -4.2 + 0.4 * torch.randn(response, generator=generator)
        mask = torch.rand(response, generator=generator) > 0.25
        mask = torch.zeros(response, dtype=torch.bool) if place == 4 else mask
        made.append(Sample.from_lists(tokens, response, behavior, mask, sample_id=str(place)))
    return made


def finalizer(groups: ParallelGroups) -> Any:
    """What Megatron's finalizer does with plain parameters: sums over DP x CP, one division by the step's count."""

    def finalize(chunks: list[Any], num_tokens: torch.Tensor, **_: Any) -> None:
        total = num_tokens.double()
        if groups.data_context is not None:
            dist.all_reduce(total, group=groups.data_context)
        if groups.pipeline is not None:
            last = dist.get_global_rank(groups.pipeline, groups.pipeline.size() - 1)
            dist.broadcast(total, src=last, group=groups.pipeline)
        for parameter in chunks[0].parameters():
            if groups.data_context is not None:
                dist.all_reduce(parameter.grad, group=groups.data_context)
            parameter.grad /= total.item()

    return finalize


def one_step(cut: Cut, objective: Objective, faulty_rank: int | None) -> Outcome:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cut.tp,
        pipeline_model_parallel_size=cut.pp,
        context_parallel_size=cut.cp,
        create_gloo_process_groups=False,
    )
    try:
        groups = ParallelGroups.from_megatron()
        model = build_model(CONFIG)
        model.config.finalize_model_grads_func = finalizer(groups)
        cp_rank, dp_rank = parallel_state.get_context_parallel_rank(), parallel_state.get_data_parallel_rank()
        layout = ContextLayout(cp_size=cut.cp, cp_rank=cp_rank)
        chosen = samples()
        costs = [layout.padded_length(sample.token_ids.numel()) for sample in chosen]
        plan = plan_micro_batches(costs, cut.dp, micro_batch_size=cut.micro_batch_size)
        batches = pack_step(chosen, ADVANTAGES, plan[dp_rank], layout, pad_token_id=1)
        if faulty_rank == dist.get_rank():
            broken = torch.where(batches[0].mask, 500.0, batches[0].behavior_log_probs)
            batches[0] = dataclasses.replace(batches[0], behavior_log_probs=broken)
        try:
            result = step_gradients([model], batches, objective, groups)
        except (ValueError, RuntimeError) as error:
            return Outcome(0, cp_rank, dp_rank, None, None, {}, f"{type(error).__name__}: {error}")
        metrics = result.metrics
        if metrics is not None and groups.data_context is not None:
            metrics = metrics.all_reduce(groups.data_context)
        names = full_names(model)
        gradients = {
            names[name]: (value.grad, value.partition_dim if getattr(value, "tensor_model_parallel", False) else None)
            for name, value in model.named_parameters()
        }
        return Outcome(
            parallel_state.get_tensor_model_parallel_rank(),
            cp_rank,
            dp_rank,
            None if result.context is None else result.context.ess.item(),
            None if metrics is None else metrics.to_dict(""),
            gradients,
        )
    finally:
        parallel_state.destroy_model_parallel()


def every_cut(
    rank: int, cuts: tuple[Cut, ...], objectives: tuple[Objective, ...], faulty_rank: int | None = None
) -> Any:
    """{(cut, objective): outcome} of this rank."""
    with megatron_on_cpu():
        return {(cut, made): one_step(cut, made, faulty_rank) for cut in cuts for made in objectives}
