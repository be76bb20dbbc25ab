"""Stub of torchvision.io: every name is a function that refuses to be called."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"torchvision.io.{name} is a stub: images need the real torchvision")

    return missing
