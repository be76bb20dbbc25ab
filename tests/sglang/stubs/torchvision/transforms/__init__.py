"""Stub of torchvision.transforms."""

import enum

from torchvision.transforms import functional, v2

__all__ = ["InterpolationMode", "Normalize", "functional", "v2"]


class InterpolationMode(enum.Enum):
    """Members that image processors read while they are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class Normalize:
    """Imported by name, never made."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError("torchvision.transforms.Normalize is a stub: images need the real torchvision")
