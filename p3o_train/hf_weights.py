"""Weights of Megatron-Core's decoder as full Hugging Face weights, and back.

    queries, keys, values      one matrix, by groups of heads: rows q_1 ... q_n k v of the first group, then the next
    gate and up projection     one matrix, gate before up
    RMSNorm before a layer     its own parameter, or with transformer-engine one of the linear layer behind it
    tied embedding             one full weight; a copy on the last stage as well

Values are moved and never computed with, so export and load return the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from p3o_train.hf_model import check_weights, weight_shapes
from p3o_train.model import ModelConfig, full_names, join_shards, take_shard
from p3o_train.parallel import ParallelGroups

_WHOLE_MODEL = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"{name}.weight" for name in _QKV),
    "self_attention.linear_qkv.bias": tuple(f"{name}.bias" for name in _QKV),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}


class _Place(NamedTuple):
    """A parameter of this rank among the full ones."""

    full_name: str
    parameter: Tensor
    hf_names: tuple[str, ...]
    """Of the weights that it holds, in order."""
    dim: int | None
    """Along which tensor-parallel ranks cut it; None: each holds all of it."""


@torch.no_grad()
def export_hf_weights(
    model: Sequence[Any], groups: ParallelGroups, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Every full weight by its Hugging Face name, on every rank, as copies in the model's dtype.

    All ranks call. Collectives: for each parameter one gather over the tensor-parallel ranks, for each weight one
    broadcast over the stages.

    Args:
        model: this rank's part, inside Megatron's DDP or not; one chunk.
        device: where the copies are.

    Raises:
        ValueError: more than one chunk; a parameter that no Hugging Face model has.
    """
    module = _module(model)
    config = _sizes(module)
    places = [place for place in _places(module) if not _is_copy(module, place)]
    # every stage tells the others which weights are its own
    own = [name for place in places for name in place.hf_names]
    names: list[list[str]] = [own]
    if groups.pipeline is not None:
        names = [[] for _ in range(groups.pipeline.size())]
        dist.all_gather_object(names, own, group=groups.pipeline)
    shapes = weight_shapes(config)
    like = next(module.parameters())
    weights: dict[str, Tensor] = {}
    for stage, stage_names in enumerate(names):
        is_own = groups.pipeline is None or groups.pipeline.rank() == stage
        parts = _full_weights(places, config, groups) if is_own else iter(())
        for name in stage_names:
            # contiguous, and with memory of its own
            weight = (
                next(parts).clone(memory_format=torch.contiguous_format) if is_own else like.new_empty(shapes[name])
            )
            if groups.pipeline is not None:
                dist.broadcast(weight, src=dist.get_global_rank(groups.pipeline, stage), group=groups.pipeline)
            weights[name] = weight.to(device)
    return {name: weights[name] for name in shapes}


@torch.no_grad()
def load_hf_weights(model: Sequence[Any], weights: Mapping[str, Tensor]) -> None:
    """Sets every parameter of this rank from full weights, rounded to the model's dtype. No collectives.

    Call it before the optimizer is built: one that exists keeps float32 copies of the weights it was built with, and
    its next step would bring them back.

    Args:
        model: this rank's part, inside Megatron's DDP or not; one chunk.
        weights: full ones by their Hugging Face names, the same on every rank; of a tied model without
            ``lm_head.weight``.

    Raises:
        ValueError: more than one chunk; names that are missing or left over, a wrong shape or dtype: on every rank
            alike, and nothing has changed.
    """
    module = _module(model)
    config = _sizes(module)
    places = list(_places(module))
    check_weights(weights, weight_shapes(config))
    rank, size = module.pg_collection.tp.rank(), module.pg_collection.tp.size()
    for place in places:
        full = _joined(place.full_name, [weights[name].to(place.parameter.device) for name in place.hf_names], config)
        shard = full if place.dim is None else take_shard(full, place.full_name, place.dim, rank, size)
        place.parameter.copy_(shard)


def _module(model: Sequence[Any]) -> Any:
    """The GPTModel itself."""
    if len(model) != 1:
        raise ValueError(f"model must be one chunk, without virtual pipeline stages; got {len(model)}")
    module = model[0]
    while hasattr(module, "module"):
        module = module.module
    return module


def _sizes(module: Any) -> ModelConfig:
    """What decides names and shapes of the whole model's weights."""
    config = module.config
    return ModelConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups,
        ffn_size=config.ffn_hidden_size,
        vocab_size=module.vocab_size,
        head_dim=config.kv_channels,
        qkv_bias=config.add_qkv_bias,
        qk_norm=config.qk_layernorm,
        tie_embeddings=module.share_embeddings_and_output_weights,
    )


def _places(module: Any) -> Iterator[_Place]:
    names = full_names(module)
    for name, parameter in module.named_parameters():
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        yield _Place(names[name], parameter, _hf_names(names[name]), dim)


def _hf_names(full_name: str) -> tuple[str, ...]:
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", full_name)
    inner = _LAYER.get(layer[2], ()) if layer else ()
    found = tuple(f"model.layers.{layer[1]}.{name}" for name in inner) if layer else _WHOLE_MODEL.get(full_name, ())
    if not found:
        raise ValueError(
            f"parameter {full_name} has no Hugging Face name; only models of ModelConfig (Llama, Qwen2, Qwen3) convert"
        )
    return found


def _is_copy(module: Any, place: _Place) -> bool:
    """Whether this is the embedding that a last stage repeats as its output layer."""
    return place.hf_names == _WHOLE_MODEL["embedding.word_embeddings.weight"] and not module.pre_process


def _full_weights(places: Sequence[_Place], config: ModelConfig, groups: ParallelGroups) -> Iterator[Tensor]:
    """The weights in these parameters, one full parameter at a time; the tensor-parallel ranks advance together."""
    for place in places:
        full = place.parameter.detach()
        if place.dim is not None and groups.tensor is not None:
            shards = [torch.empty_like(full) for _ in range(groups.tensor.size())]
            dist.all_gather(shards, full.contiguous(), group=groups.tensor)
            full = join_shards(shards, place.full_name, place.dim)
        yield from _split(place.full_name, full, config)


def _split(full_name: str, full: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    """The Hugging Face weights inside a full parameter, in the order of their names."""
    if ".linear_fc1." in full_name and full.dim() == 2:
        return full.chunk(2)
    if ".linear_qkv." in full_name and not full_name.endswith("layer_norm_weight"):
        per_group = config.num_heads // config.num_kv_heads
        groups = full.view(config.num_kv_heads, per_group + 2, config.head_size, *full.shape[1:])
        parts = groups[:, :per_group], groups[:, per_group], groups[:, per_group + 1]
        return [part.reshape(-1, *full.shape[1:]) for part in parts]
    return [full]


def _joined(full_name: str, parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Undoes ``_split``."""
    if len(parts) != 3:
        return torch.cat(list(parts))
    rest = parts[0].shape[1:]
    groups = [part.reshape(config.num_kv_heads, -1, config.head_size, *rest) for part in parts]
    return torch.cat(groups, dim=1).reshape(-1, *rest)
