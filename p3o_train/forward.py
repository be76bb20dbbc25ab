"""What both passes of a step feed to a Megatron-Core model, and its hidden states instead of logits where asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from p3o_train.packed_attention import packed_seq_params
from p3o_train.types import PackedBatch


def build_rl_forward_kwargs(batch: PackedBatch) -> dict[str, Any]:
    """Keyword arguments of ``GPTModel.forward`` for one micro-batch, the same in every pass.

    No attention mask, since the packed sequences say it all, and no labels: the loss is computed outside.

    Raises:
        ValueError: a layout that Megatron-Core's rotary embedding does not know.
    """
    return {
        "input_ids": batch.tokens[None],
        "position_ids": batch.position_ids[None],
        "attention_mask": None,
        "labels": None,
        "packed_seq_params": packed_seq_params(batch),
    }


def packed_rows(output: Tensor, batch: PackedBatch) -> Tensor:
    """[T, n]: a model's output [1, T, n], or [T, 1, n] as the hidden layers order it; n is V / tp, or the hidden size.

    Raises:
        ValueError: another shape, naming both.
    """
    tokens, shape = batch.tokens.numel(), tuple(output.shape)
    if output.dim() == 3 and output.shape[0] == 1:
        output = output[0]
    elif output.dim() == 3 and output.shape[1] == 1:
        output = output[:, 0]
    if output.dim() != 2 or output.shape[0] != tokens:
        raise ValueError(
            f"the model's output must be [1, T, n] or [T, 1, n] with T = {tokens} tokens of the micro-batch, got "
            f"{shape}"
        )
    return output


def unwrapped(model: Any) -> Any:
    """The GPTModel inside DDP and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


@contextlib.contextmanager
def bypassed_output_layers(model: Sequence[Any]) -> Iterator[None]:
    """While entered, the last stage returns hidden states [1, T, H] where it would return logits.

    The layers keep their hooks and parameters: ``output_weight`` takes the gradient as before.

    Raises:
        ValueError: an output layer with a bias, multi-token prediction or sequence parallelism, whose results a
            bypass would change.
    """
    with contextlib.ExitStack() as stack:
        for chunk in map(unwrapped, model):
            if chunk.post_process:
                _check_plain(chunk)
                layer = chunk.output_layer
                layer.forward = _identity
                stack.callback(delattr, layer, "forward")
        yield


def output_weight(model: Any) -> Tensor:
    """[V / tp, H] of the last stage: the output layer's own weight, or the embedding that it shares."""
    chunk = unwrapped(model)
    tied = chunk.share_embeddings_and_output_weights
    weight: Tensor = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
    return weight


def _identity(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
    return hidden, None


def _check_plain(chunk: Any) -> None:
    found = {
        "a bias of the output layer": getattr(chunk.output_layer, "bias", None) is not None,
        "multi-token prediction": getattr(chunk.config, "mtp_num_layers", None) is not None,
        "sequence parallelism": chunk.config.sequence_parallel,
    }
    wrong = [name for name, present in found.items() if present]
    if wrong:
        raise ValueError(f"from_hidden cannot bypass an output layer with {', '.join(wrong)}; set from_hidden=False")
