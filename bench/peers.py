"""Other projects' losses on the same batch. What cannot run here is named, with the reason, and never dropped.

They compute GRPO or cross-entropy in place of P3O: the same matrix products and passes over the vocabulary, another
loss of each token. Where a project offers to overwrite the logits, that is left off: ``p3o`` keeps them as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from bench.vocabulary_workload import GEMMS, NAIVE, NAIVE_COMPILED, Batch, Step, naive, p3o, three_gemms, trained


@dataclass(frozen=True, slots=True)
class Peer:
    """``module`` is what has to be importable; ``source`` what it starts from."""

    module: str
    source: str
    loss: str
    needs_cuda: bool
    build: Callable[[Batch], Step]


def _liger_grpo(compiled: bool) -> Callable[[Batch], Step]:
    def build(batch: Batch) -> Step:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        # one sequence of T tokens: a chunk is one sequence at least, and d(weight) is added up once for each
        module = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=compiled)
        hidden, weight = batch.leaves
        labels, old, mask = (each[None] for each in (batch.labels, batch.behavior_log_probs, batch.mask.float()))

        def loss() -> Tensor:
            return module(hidden[None], weight, labels, mask, batch.advantages[:1], old_per_token_logps=old)[0]

        return trained(loss, batch.leaves)

    return build


def _liger_triton_grpo(batch: Batch) -> Step:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    (logits,) = batch.leaves
    # it wants a row more than it uses
    padded = torch.cat([logits.detach(), logits.detach()[:1]])[None].requires_grad_()
    labels, old = batch.labels[None], batch.behavior_log_probs[None]
    options = {"temperature": 1.0, "beta": 0.0, "eps_high": 0.2, "inplace": False, "reduce": True}
    return trained(lambda: triton_grpo_loss(padded, old, None, labels, batch.advantages[:1], **options)[0], (padded,))


def _liger_cross_entropy(batch: Batch) -> Step:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss()
    hidden, weight = batch.leaves
    return trained(lambda: module(weight, hidden, batch.labels), batch.leaves)


def _cut_cross_entropy(batch: Batch) -> Step:
    from cut_cross_entropy import linear_cross_entropy

    return trained(lambda: linear_cross_entropy(*batch.leaves, batch.labels), batch.leaves)


def _transformer_engine(batch: Batch) -> Step:
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    (logits,) = batch.leaves
    # label smoothing 0, and the mean: positional, because the names differ between versions
    return trained(lambda: parallel_cross_entropy(logits[None], batch.labels[None], 0.0, True), (logits,))


PEERS = {
    "liger_grpo": Peer("liger_kernel", "hidden", "GRPO", False, _liger_grpo(compiled=False)),
    "liger_grpo_compiled": Peer("liger_kernel", "hidden", "GRPO", False, _liger_grpo(compiled=True)),
    "liger_linear_ce": Peer("liger_kernel", "hidden", "cross-entropy", True, _liger_cross_entropy),
    "cut_cross_entropy": Peer("cut_cross_entropy", "hidden", "cross-entropy", True, _cut_cross_entropy),
    "liger_triton_grpo": Peer("liger_kernel", "logits", "GRPO", True, _liger_triton_grpo),
    "te_cross_entropy": Peer("transformer_engine", "logits", "cross-entropy", True, _transformer_engine),
}


def why_absent(name: str, device: str) -> str | None:
    """Why a provider cannot run on ``device``; None when it can."""
    peer = PEERS.get(name)
    if peer is None:
        return None
    if find_spec(peer.module) is None:
        return "not installed"
    return "needs CUDA" if peer.needs_cuda and device != "cuda" else None


def providers(source: str) -> list[str]:
    """All that start from ``source``, present or not, the bound first where there is one."""
    bound = [GEMMS] if source == "hidden" else []
    return [*bound, NAIVE, NAIVE_COMPILED, "p3o", *(name for name, peer in PEERS.items() if peer.source == source)]


def scopes(provider: str) -> tuple[str, ...]:
    """In which a provider is measured; only P3O knows them."""
    return ("given_context", "micro_batch") if provider in (NAIVE, NAIVE_COMPILED, "p3o") else ("any",)


def make_step(provider: str, batch: Batch, scope: str) -> Step:
    if provider == GEMMS:
        return three_gemms(batch)
    if provider in (NAIVE, NAIVE_COMPILED):
        return naive(batch, scope, compiled=provider == NAIVE_COMPILED)
    return p3o(batch, scope) if provider == "p3o" else PEERS[provider].build(batch)


def absences(device: str) -> list[str]:
    """One line for each peer that cannot run on ``device``."""
    reasons = {name: why_absent(name, device) for name in PEERS}
    return [f"{name} ({PEERS[name].module}): {reason}" for name, reason in reasons.items() if reason]
