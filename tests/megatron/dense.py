"""The decoder of ``ModelConfig`` once more, one sequence at a time in plain dense torch, in float64.

Its weights come by name from ``drawn``, in the layout that Megatron-Core keeps them: queries, keys and values of one
group of heads lie together, gate and up projection one after the other.
"""

import torch
import torch.nn.functional as F

from p3o_train.model import ModelConfig, drawn
from tests.megatron.topologies import samples


def weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    width, head_size = config.hidden_size, config.hidden_size // config.num_heads
    shapes = {
        "embedding.word_embeddings.weight": (config.vocab_size, width),
        "decoder.final_layernorm.weight": (width,),
        "output_layer.weight": (config.vocab_size, width),
    }
    if config.tie_embeddings:
        del shapes["output_layer.weight"]
    for layer in range(config.num_layers):
        shapes |= {
            f"decoder.layers.{layer}.input_layernorm.weight": (width,),
            f"decoder.layers.{layer}.self_attention.linear_qkv.weight": (
                (config.num_heads + 2 * config.num_kv_heads) * head_size,
                width,
            ),
            f"decoder.layers.{layer}.self_attention.linear_proj.weight": (width, width),
            f"decoder.layers.{layer}.pre_mlp_layernorm.weight": (width,),
            f"decoder.layers.{layer}.mlp.linear_fc1.weight": (2 * config.ffn_size, width),
            f"decoder.layers.{layer}.mlp.linear_fc2.weight": (width, config.ffn_size),
        }
    return {name: drawn(name, shape, config).double().requires_grad_() for name, shape in shapes.items()}


def logits(tokens: torch.Tensor, weight: dict[str, torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """[L] -> [L, V]."""
    hidden = weight["embedding.word_embeddings.weight"][tokens]
    for layer in range(config.num_layers):
        inner = {name.split(f"layers.{layer}.")[1]: w for name, w in weight.items() if f"layers.{layer}." in name}
        hidden = hidden + attention(normed(hidden, inner["input_layernorm.weight"], config), inner, config)
        both = normed(hidden, inner["pre_mlp_layernorm.weight"], config) @ inner["mlp.linear_fc1.weight"].T
        gate, up = both.chunk(2, dim=-1)
        hidden = hidden + (F.silu(gate) * up) @ inner["mlp.linear_fc2.weight"].T
    head = weight["embedding.word_embeddings.weight" if config.tie_embeddings else "output_layer.weight"]
    return normed(hidden, weight["decoder.final_layernorm.weight"], config) @ head.T


def normed(hidden: torch.Tensor, gain: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return hidden * (hidden.square().mean(-1, keepdim=True) + config.norm_epsilon).rsqrt() * gain


def attention(hidden: torch.Tensor, inner: dict[str, torch.Tensor], config: ModelConfig) -> torch.Tensor:
    length, per_group = len(hidden), config.num_heads // config.num_kv_heads
    groups = (hidden @ inner["self_attention.linear_qkv.weight"].T).view(length, config.num_kv_heads, per_group + 2, -1)
    query, key, value = groups.split([per_group, 1, 1], dim=2)
    query, key = rotated(query, config), rotated(key, config)
    scores = torch.einsum("igqd,jgkd->gqij", query, key) / query.shape[-1] ** 0.5
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mixed = torch.einsum("gqij,jgkd->igqd", scores.masked_fill(~causal, -torch.inf).softmax(-1), value)
    return mixed.reshape(length, -1) @ inner["self_attention.linear_proj.weight"].T


def rotated(heads: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """[L, groups, heads, dim]; angles in float32, as Megatron-Core keeps them."""
    half = heads.shape[-1] // 2
    speeds = 1.0 / config.rope_base ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angles = torch.outer(torch.arange(len(heads), dtype=torch.float32), speeds)[:, None, None]
    first, second = heads[..., :half], heads[..., half:]
    cosine, sine = angles.cos().double(), angles.sin().double()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def batch_logits(lengths: tuple[int, ...], weight: dict[str, torch.Tensor], config: ModelConfig) -> torch.Tensor:
    return torch.cat([logits(sample.token_ids, weight, config) for sample in samples(lengths)])


def batch_loss(lengths: tuple[int, ...], weight: dict[str, torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Cross-entropy summed over the response tokens."""
    losses = []
    for sample in samples(lengths):
        predictions = logits(sample.token_ids, weight, config)[:-1]
        losses.append(F.cross_entropy(predictions, sample.token_ids[1:], reduction="none")[-sample.response_length :])
    return torch.cat(losses).sum()
