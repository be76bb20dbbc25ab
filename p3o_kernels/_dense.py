"""Layouts that kernels take: flat, contiguous and 16-byte aligned."""

from torch import Tensor


def dense(tensor: Tensor) -> Tensor:
    """``tensor``, copied only where it is not contiguous and 16-byte aligned."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def dense_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else dense(tensor)


def flat(tensor: Tensor) -> Tensor:
    """[T] float32."""
    return tensor.reshape(-1).float()


def flat_mask(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.reshape(-1)
