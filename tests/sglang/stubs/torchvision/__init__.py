"""Stub of torchvision, whose wheels replace a CPU build of torch: names that sglang imports, nothing that computes."""

from torchvision import io, transforms

__all__ = ["io", "transforms"]

__version__ = "0.0"  # transformers compares it
