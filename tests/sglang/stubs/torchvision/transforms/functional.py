"""Stub of torchvision.transforms.functional: every name is a function that refuses to be called."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "InterpolationMode":
        from torchvision.transforms import InterpolationMode

        return InterpolationMode

    def missing(*args, **kwargs):
        raise NotImplementedError(f"torchvision.transforms.functional.{name} is a stub: images need the real one")

    return missing
