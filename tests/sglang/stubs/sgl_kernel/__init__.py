"""Stub of sgl_kernel, whose wheels are for CUDA: sglang imports its operators by name, torch computes instead.

Every name is a function that refuses to be called, so that nothing runs on a stub unnoticed.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a stub: it needs the real sgl_kernel and a GPU")

    return missing
