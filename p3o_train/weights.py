"""Copies of a model's weights on this rank, and a model that has others for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def copy_weights(model: Sequence[Any]) -> dict[str, Tensor]:
    """Name -> copy of each parameter of this rank."""
    return {name: parameter.detach().clone() for name, parameter in _parameters(model)}


@contextlib.contextmanager
def swapped_weights(model: Sequence[Any], weights: Mapping[str, Tensor] | None) -> Iterator[None]:
    """While entered, the model has other weights, as ``copy_weights`` returned them; None changes nothing."""
    if weights is None:
        yield
        return
    current = copy_weights(model)
    try:
        _set_weights(model, weights)
        yield
    finally:
        _set_weights(model, current)


@torch.no_grad()
def _set_weights(model: Sequence[Any], weights: Mapping[str, Tensor]) -> None:
    for name, parameter in _parameters(model):
        parameter.copy_(weights[name])


def _parameters(model: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for index, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            yield f"{index}.{name}", parameter
