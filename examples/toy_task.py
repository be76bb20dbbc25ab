"""A task small enough for a CPU: reverse a string of five digits, learned by reinforcement learning only.

The file holds everything around the loss that a training framework would otherwise provide: a causal
transformer, the sampler that records the behavior log-probs, the verifier that scores an answer and the
group-relative advantages. The losses the quickstart compares come last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from p3o_kernels import p3o_loss, ratio_stats

METHODS = {"p3o": "P3O", "grpo": "GRPO, clip 0.2", "pg": "policy gradient"}
CLIP = 0.2

DIGITS = 5
SEPARATOR = 10
VOCAB = 11
PROMPT_LENGTH = DIGITS + 1
GROUP_SIZE = 8


class Block(nn.Module):
    """One pre-norm transformer layer: causal self-attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class TinyTransformer(nn.Module):
    """Causal language model over the digits and one separator."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(PROMPT_LENGTH + DIGITS, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor, last: int) -> Tensor:
        """Return the next-token logits ``[batch, last, VOCAB]`` of the ``last`` positions."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.positions(positions))
        return self.head(self.norm(hidden[:, -last:]))


@dataclass
class Rollout:
    """Sampled sequences, with what the loss needs to know about the policy that sampled them."""

    tokens: Tensor  # [B, PROMPT_LENGTH + DIGITS]
    behavior_log_probs: Tensor  # [B, DIGITS], float32, of the sampled answer tokens
    rewards: Tensor  # [B]


def make_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` random digit strings, add the separator and repeat each prompt for its group of answers."""
    digits = torch.randint(0, 10, (count, DIGITS), generator=generator)
    return F.pad(digits, (0, 1), value=SEPARATOR).repeat_interleave(GROUP_SIZE, dim=0)


def verify(prompts: Tensor, answers: Tensor) -> Tensor:
    """Score each answer: the fraction of its positions that hold the digit of the reversed prompt."""
    return (answers == prompts[:, :DIGITS].flip(1)).float().mean(dim=1)


def answer_log_probs(model: TinyTransformer, tokens: Tensor) -> Tensor:
    """Return the model's log-probs of the answer tokens, ``[B, DIGITS]``, from one forward pass."""
    log_probs = model(tokens[:, :-1], last=DIGITS).float().log_softmax(dim=-1)
    return log_probs.gather(-1, tokens[:, -DIGITS:, None]).squeeze(-1)


@torch.no_grad()
def sample(model: TinyTransformer, prompts: Tensor, generator: torch.Generator) -> Rollout:
    """Sample one answer per prompt at temperature 1 and record each token's log-prob as it is drawn."""
    tokens, recorded = prompts, []
    for _ in range(DIGITS):
        log_probs = model(tokens, last=1).squeeze(1).float().log_softmax(dim=-1)
        drawn = torch.multinomial(log_probs.exp(), 1, generator=generator)
        recorded.append(log_probs.gather(-1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
    rewards = verify(prompts, tokens[:, -DIGITS:])
    return Rollout(tokens, torch.cat(recorded, dim=1), rewards)


def group_advantages(rewards: Tensor) -> Tensor:
    """Group-relative advantages of ``[prompts, group]`` rewards: minus group mean, over group std + 1e-6."""
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    return centered / (rewards.std(dim=1, keepdim=True) + 1e-6)


def grpo_loss(log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor, clip: float = CLIP) -> Tensor:
    """Token mean of the clipped surrogate ``-min(r * A, clip(r, 1 - clip, 1 + clip) * A)``."""
    ratio = (log_probs - behavior_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Token mean of ``-log_prob * A``: plain policy gradient, which ignores who sampled the token."""
    return -(log_probs * advantages).mean()


def loss_and_stats(
    method: str, log_probs: Tensor, behavior_log_probs: Tensor, advantages: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of ``method`` over packed answer tokens, and the ratio statistics of the same tokens.

    Log-probs are ``[B * DIGITS]``, advantages ``[B]``. The cap is the largest weight that the method gives to a
    token with a positive advantage; plain policy gradient has no ratio, hence no cap (NaN).
    """
    if method == "p3o":
        offsets = torch.arange(0, log_probs.numel() + 1, DIGITS, dtype=torch.int32)
        output = p3o_loss(log_probs, behavior_log_probs, advantages, cu_seqlens=offsets)
        loss, context, cap = output.loss, output.context, output.context.cap.item()
    else:
        # Not validated: nothing keeps the baselines near the behavior policy, so their ratios may overflow.
        context = ratio_stats(log_probs, behavior_log_probs).to_context(validate=False)
        per_token = advantages.repeat_interleave(DIGITS)
        if method == "grpo":
            loss, cap = grpo_loss(log_probs, behavior_log_probs, per_token), 1 + CLIP
        else:
            loss, cap = policy_gradient_loss(log_probs, per_token), math.nan
    ess, ratio_mean = context.ess.item(), context.ratio_mean.item()
    return loss, {"ess": ess, "cap": cap, "ratio_mean": ratio_mean, "loss": loss.item()}
