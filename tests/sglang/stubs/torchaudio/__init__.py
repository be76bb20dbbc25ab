"""Stub of torchaudio, whose wheels replace a CPU build of torch: every name is a function that refuses to be called."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"torchaudio.{name} is a stub: sound needs the real torchaudio")

    return missing
