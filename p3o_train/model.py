"""A decoder of Megatron-Core (RMSNorm, rotary embedding, grouped queries, SwiGLU) from a small configuration.

It covers the dense models that Hugging Face calls Llama, Qwen2 (``qkv_bias``) and Qwen3 (``qk_norm``).

The sizes of the parallel groups come from Megatron-Core's ``parallel_state``, which the caller initialises. A stage
gets its layers and each rank its shards; packed batches go in (``packed_seq_params``), logits [1, T, vocab / TP] come
out of the last stage.

Weights do not depend on the topology: every full parameter is drawn from the seed and its own name, then cut.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from p3o_train.device_shim import has_transformer_engine
from p3o_train.packed_attention import PackedAttention
from p3o_train.random_state import named_generator

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# their outputs are added to the residual stream, which grows with every layer
_RESIDUAL_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight")
# gate and up projection in one matrix: each half is cut for itself
_GATED_WEIGHT = "linear_fc1.weight"


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads, a divisor of num_heads."""
    ffn_size: int
    """Width of the gated feed-forward layer."""
    vocab_size: int
    """Rows of the embedding."""
    head_dim: int | None = None
    """Width of a head; None: hidden_size / num_heads."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias; no other layer ever has."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys, before the rotary embedding."""
    rope_base: float = 10_000
    """Base period of the rotary embedding."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """The output layer uses the embedding."""
    dtype: torch.dtype = torch.float32
    """Of parameters and activations."""
    seed: int = 0
    """Of the weights."""
    init_std: float = 0.02
    """Standard deviation of the weights; layers that write to the residual stream divide it by sqrt(2 num_layers)."""

    def __post_init__(self) -> None:
        if self.head_dim is None:
            _check_divides(self, "hidden_size", "num_heads", self.num_heads)
        _check_divides(self, "num_heads", "num_kv_heads", self.num_kv_heads)
        if self.head_size < 2 or self.head_size % 2:
            name = "hidden_size / num_heads" if self.head_dim is None else "head_dim"
            raise ValueError(f"the rotary embedding turns pairs: {name} must be even, got {self}")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type, got {self.dtype}")

    @property
    def head_size(self) -> int:
        """Width of a head of queries, keys or values."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim


def _check_divides(config: ModelConfig, whole: str, part: str, size: int) -> None:
    value = getattr(config, whole)
    if size < 1 or value < 1 or value % size:
        raise ValueError(f"{whole} must be a positive multiple of {part}, got {value} and {size}")


def build_model(config: ModelConfig) -> torch.nn.Module:
    """This rank's part of the model, a ``megatron.core`` GPTModel in ``config.dtype`` with its weights drawn.

    Without CUDA, call it inside ``megatron_on_cpu()``.

    Raises:
        ValueError: a size that the tensor- or pipeline-parallel group cannot share evenly.
        RuntimeError: parallel groups that are not initialised.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError("call megatron.core.parallel_state.initialize_model_parallel() before build_model()")
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    for name in ("num_heads", "num_kv_heads", "ffn_size", "vocab_size"):
        _check_divides(config, name, "the tensor-parallel size", tensor_parallel)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    _check_divides(config, "num_layers", "the pipeline-parallel size", stages)
    model: torch.nn.Module = GPTModel(
        config=transformer_config(config),
        transformer_layer_spec=_layer_spec(config.qk_norm),
        vocab_size=config.vocab_size,
        max_sequence_length=0,  # of learned positions, which a rotary embedding replaces
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_base,
    )
    # torch's RMSNorm knows no params_dtype
    model.to(device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu", dtype=config.dtype)
    draw_weights(model, config)
    return model


def transformer_config(config: ModelConfig) -> Any:
    """Megatron-Core's configuration, for the parallel groups that are initialised."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_size,
        ffn_hidden_size=config.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        qk_layernorm=config.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # named outright: left out, it could come from whatever else configures the run
        params_dtype=config.dtype,
        bf16=config.dtype == torch.bfloat16,
        fp16=config.dtype == torch.float16,
        pipeline_dtype=config.dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=False,
        # micro-batches of packed sequences differ in length, and Megatron-Core allows that with this dispatcher only
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # a sum over tokens per micro-batch, divided once per step by the exact count
        calculate_per_token_loss=True,
        # draw_weights overwrites what is allocated here, on the CPU and without a random stream
        use_cpu_initialization=True,
        init_method=_untouched,
        output_layer_init_method=_untouched,
        embedding_init_method=_untouched,
    )


def _untouched(weight: Tensor) -> Tensor:
    return weight


def _layer_spec(qk_norm: bool) -> Any:
    """Transformer-engine's layers where they can run, otherwise Megatron-Core's own around ``PackedAttention``."""
    from megatron.core.models.gpt import gpt_layer_specs

    if has_transformer_engine():
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm)
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def full_names(model: Any) -> dict[str, str]:
    """Names of this stage's parameters -> their names in the whole model, with layers counted from the first stage.

    The copy of a tied embedding on the last stage has the name of the embedding.
    """
    layers = model.decoder.layers
    first = layers[0].layer_number - 1 if len(layers) else 0

    def renumbered(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2]) + first}."

    names = {name: re.sub(r"(\blayers\.)(\d+)\.", renumbered, name) for name, _ in model.named_parameters()}
    tied = {_HEAD: _EMBEDDING} if model.share_embeddings_and_output_weights else {}
    return {name: tied.get(whole, whole) for name, whole in names.items()}


@torch.no_grad()
def draw_weights(model: Any, config: ModelConfig) -> None:
    """Sets every parameter to this rank's shard of a full one that depends on its full name and ``config`` only.

    Full parameters are drawn in float32 on the CPU, one at a time.
    """
    rank, size = model.pg_collection.tp.rank(), model.pg_collection.tp.size()
    names = full_names(model)
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] *= size
            full = drawn(names[name], shape, config)
            parameter.copy_(take_shard(full, name, parameter.partition_dim, rank, size))
        else:
            parameter.copy_(drawn(names[name], shape, config))


def drawn(full_name: str, shape: Sequence[int], config: ModelConfig) -> Tensor:
    """The initial value of a full parameter, float32: 1 for gains, 0 for biases, normal for matrices."""
    if len(shape) == 1:
        return torch.zeros(*shape) if full_name.endswith(".bias") else torch.ones(*shape)
    generator = named_generator(config.seed, full_name)
    scale = math.sqrt(2 * config.num_layers) if full_name.endswith(_RESIDUAL_WEIGHTS) else 1.0
    return torch.randn(*shape, generator=generator) * (config.init_std / scale)


def take_shard(full: Tensor, name: str, dim: int, rank: int, size: int) -> Tensor:
    """What tensor-parallel rank ``rank`` of ``size`` holds of a parameter that is cut along ``dim``."""
    parts = full.chunk(2, dim) if name.endswith(_GATED_WEIGHT) else (full,)
    return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)


def join_shards(shards: Sequence[Tensor], name: str, dim: int) -> Tensor:
    """The full parameter, or its gradient, from the shards of all tensor-parallel ranks in their order."""
    halves = 2 if name.endswith(_GATED_WEIGHT) else 1
    cut = [shard.chunk(halves, dim) for shard in shards]
    return torch.cat([parts[half] for half in range(halves) for parts in cut], dim)
