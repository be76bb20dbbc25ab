"""Megatron-Core's cross entropy and ours in its place, on one rank: bare functions, and through the whole model."""

from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from p3o_train import patch
from p3o_train.device_shim import megatron_on_cpu
from p3o_train.forward import build_rl_forward_kwargs
from p3o_train.model import build_model, full_names
from p3o_train.types import ContextLayout
from tests.megatron.topologies import CONFIG, Topology, batches, groups

SEQUENCE, BATCH, VOCAB = 5, 3, 34
OURS = (patch._cross_entropy, patch._cross_entropy_in_group, patch._fused)


class Values(NamedTuple):
    """A loss, whole on every rank, and gradients of this rank's shards."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    calls: int = 0
    """How often ``token_log_probs`` of this package ran."""


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [s, b, V] of all ranks, far from 0 and not contiguous; labels of both halves; a gradient of the loss."""
    generator = torch.Generator().manual_seed(5)
    logits = 30 + 4 * torch.randn(BATCH, SEQUENCE, VOCAB, generator=generator)
    labels = torch.randint(VOCAB, (SEQUENCE, BATCH), generator=generator)
    labels[0] = torch.tensor([0, VOCAB // 2, VOCAB - 1])
    return logits.transpose(0, 1), labels, torch.randn(SEQUENCE, BATCH, generator=generator)


def truth() -> Values:
    """In float64, whole."""
    logits, labels, upstream = inputs()
    logits = logits.double().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    loss.backward(upstream.double())
    return Values(loss.detach(), {"logits": logits.grad})


def of_function(function: Any, rank: int, ranks: int, *further: Any) -> Values:
    logits, labels, upstream = inputs()
    shard = logits.chunk(ranks, -1)[rank].requires_grad_()
    # Megatron's own wants contiguous logits, and works in their memory; ours takes them as they are
    given = shard if function in OURS else shard.clone(memory_format=torch.contiguous_format)
    loss = function(given, labels, *further)
    loss.backward(upstream)
    return Values(loss.detach(), {"logits": shard.grad})


def of_model(fused: bool) -> Values:
    """Loss of every token of a packed batch, with labels given to the model itself."""
    model: Any = build_model(CONFIG)
    model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = fused, "native"
    batch = batches(ContextLayout())[0]
    with mock.patch.object(patch, "token_log_probs", wraps=patch.token_log_probs) as ours:
        loss = model(**build_rl_forward_kwargs(batch) | {"labels": batch.labels[None]})
    loss.masked_fill(~batch.mask, 0).sum().backward()
    names = full_names(model)
    gradients = {names[name]: value.grad for name, value in model.named_parameters()}
    return Values(loss.detach(), gradients, ours.call_count)


def everything(rank: int, tp: int) -> dict[str, Values]:
    """By the function, then through the model; Megatron's own, ours, and ours in place of the fused function."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions import fused_cross_entropy

    with megatron_on_cpu(), groups(Topology(tp=tp)):
        found = {
            "their function": of_function(tensor_parallel.vocab_parallel_cross_entropy, rank, tp),
            "their model": of_model(fused=False),
        }
        patch.apply_p3o_kernels_to_megatron()
        try:
            group = parallel_state.get_tensor_model_parallel_group()
            fused = fused_cross_entropy.fused_vocab_parallel_cross_entropy
            return found | {
                "our function": of_function(tensor_parallel.vocab_parallel_cross_entropy, rank, tp),
                "our fused function": of_function(fused, rank, tp, group),
                "our model": of_model(fused=False),
                "our fused model": of_model(fused=True),
            }
        finally:
            patch.remove_p3o_kernels_from_megatron()
