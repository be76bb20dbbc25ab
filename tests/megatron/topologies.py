"""Real Megatron-Core over Gloo: one rank's part of the same small batch under several topologies.

Everything is put together by the test process; a rank returns what it holds and where it stands.
"""

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from p3o_kernels import token_log_probs
from p3o_train.device_shim import megatron_on_cpu
from p3o_train.model import ModelConfig, build_model, full_names
from p3o_train.packed_attention import packed_seq_params
from p3o_train.packing import pack
from p3o_train.types import ContextLayout, PackedBatch, Sample

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=64,
    # five times the usual size: attention is far from uniform and every layer matters
    init_std=0.1,
)
NEEDS_MEGATRON = pytest.mark.skipif(
    # not find_spec: this folder has the name of the package
    not any(importlib.metadata.distributions(name="megatron-core")),
    reason="megatron-core is not installed: pip install 'p3o-kernels[train]'",
)
# three sequences, two of which context parallelism pads, and a second micro-batch of another length
MICRO_BATCHES = ((5, 11, 16), (7,))


class Topology(NamedTuple):
    """Sizes of the parallel groups; data parallelism repeats the batch on the ranks that are left."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    tied: bool = False


class Outcome(NamedTuple):
    """What one rank found under one topology."""

    place: Topology
    """Its ranks in the groups instead of their sizes."""
    logits: list[torch.Tensor]
    """[T, V / tp] of every micro-batch, on the last stage."""
    losses: list[float]
    gradients: dict[str, tuple[torch.Tensor, int | None]]
    """Full name -> gradient of the shard, and the dimension along which tensor parallelism cuts it."""


def samples(lengths: tuple[int, ...]) -> list[Sample]:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = [torch.randint(CONFIG.vocab_size, (length,), generator=generator) for length in lengths]
    return [Sample.from_lists(ids, len(ids) // 2, [0.0] * (len(ids) // 2)) for ids in tokens]


def batches(layout: ContextLayout) -> list[PackedBatch]:
    return [pack(samples(lengths), [0.0] * len(lengths), layout, pad_token_id=1) for lengths in MICRO_BATCHES]


def cross_entropy(logits: torch.Tensor, batch: PackedBatch, group: Any) -> torch.Tensor:
    """Summed over the valid tokens of this rank; [1, T, V / tp] logits."""
    # log-probs are always float32: in float64 runs the gradient of the logits has this one rounding
    return -token_log_probs(logits[0].float(), batch.labels, mask=batch.mask, process_group=group).sum()


def forward_backward(model: Any, layout: ContextLayout) -> tuple[list[torch.Tensor], list[float]]:
    """Logits and losses of the micro-batches, by Megatron-Core's own schedule."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    logits = []

    def step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        output = model(batch.tokens[None], None, None, packed_seq_params=packed_seq_params(batch))

        def loss_of(output: torch.Tensor) -> Any:
            logits.append(output.detach()[0].clone())
            loss = cross_entropy(output, batch, parallel_state.get_tensor_model_parallel_group())
            return loss, torch.tensor(batch.num_tokens, dtype=torch.int), loss.item()

        return output, loss_of

    made = batches(layout)
    losses = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(made),
        model=[model],
        num_microbatches=len(made),
        seq_length=made[0].max_seqlen,
        micro_batch_size=1,
        forward_only=False,
    )
    return logits, losses


@contextlib.contextmanager
def groups(sizes: Topology, timeout_minutes: float = 10.0) -> Iterator[Topology]:
    """Parallel groups of these sizes, and this rank's place in them."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        context_parallel_size=sizes.cp,
        # every group is one already; destroying the extra ones would let their names, and stale addresses, come back
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_minutes,
    )
    try:
        yield Topology(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        )
    finally:
        parallel_state.destroy_model_parallel()


def one_topology(sizes: Topology, dtype: torch.dtype) -> Outcome:
    with groups(sizes) as place:
        model = build_model(dataclasses.replace(CONFIG, tie_embeddings=sizes.tied, dtype=dtype))
        logits, losses = forward_backward(model, ContextLayout(cp_size=sizes.cp, cp_rank=place.cp))
        names = full_names(model)
        gradients = {
            names[name]: (value.grad, value.partition_dim if getattr(value, "tensor_model_parallel", False) else None)
            for name, value in model.named_parameters()
        }
        return Outcome(place, logits, losses, gradients)


def every_topology(rank: int, topologies: tuple[Topology, ...], dtypes: tuple[torch.dtype, ...]) -> Any:
    """{(topology, dtype): outcome} of this rank."""
    with megatron_on_cpu():
        return {(sizes, dtype): one_topology(sizes, dtype) for sizes in topologies for dtype in dtypes}


def refusals(rank: int) -> list[str]:
    """What ``build_model`` says without groups, and to sizes that two ranks cannot share."""
    with megatron_on_cpu():
        messages = [refusal(CONFIG)]
        with groups(Topology(tp=2)):
            messages += [
                refusal(dataclasses.replace(CONFIG, **wrong)) for wrong in ({"num_kv_heads": 1}, {"ffn_size": 3})
            ]
        with groups(Topology(pp=2)):
            return [*messages, refusal(dataclasses.replace(CONFIG, num_layers=3))]


def refusal(config: ModelConfig) -> str:
    try:
        build_model(config)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "built"
