"""Stub of torchvision.transforms.v2.functional: the same as without v2."""

from torchvision.transforms import functional


def __getattr__(name):
    return getattr(functional, name)
