"""Megatron-Core without CUDA: real models, schedules and process groups over Gloo, for tests and tiny runs.

Megatron-Core names the CUDA device outright. Inside ``megatron_on_cpu()``, in the thread that entered it:

    device="cuda" of any torch function     "cpu"; pin_memory is dropped
    Tensor.cuda(), Tensor.pin_memory()      the tensor itself
    Tensor.type()                           "torch.cuda.FloatTensor" for a float32 tensor, and so on: optimizer and
                                            gradient clipping sort and check parameters by this name
    torch.cuda.current_device()             the CPU; torch.cuda.synchronize() returns at once
    the tracker of CUDA random states       one without states, so dropout must be 0

Nothing else about CUDA is imitated: what Megatron-Core needs beyond this (streams, recomputation of activations, CUDA
graphs) fails with torch's own error.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

TESTED_VERSION = "0.16.1"
"""The release of megatron-core that the list above was read from."""

_CPU = torch.device("cpu")
_RANDOM = "megatron.core.tensor_parallel.random"
_TRACKER, _TRACKER_READY = "_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"
_TRACKER_CLASS = "CudaRNGStatesTracker"

_active = False


class StatelessTracker:
    """Stands in for Megatron-Core's tracker of CUDA random states: every name is known, forking changes nothing."""

    def is_initialized(self) -> bool:
        """Always: code that asks wants to fork."""
        return True

    def reset(self) -> None:
        """There is no state to forget."""

    def get_states(self) -> dict[str, object]:
        """Of no stream."""
        return {}

    def set_states(self, states: dict[str, object]) -> None:
        """Takes back what ``get_states`` gave.

        Raises:
            RuntimeError: states of a real tracker, which would be lost.
        """
        if states:
            raise RuntimeError(f"CUDA random states {sorted(states)} cannot be restored on a machine without CUDA")

    def add(self, name: str, seed: int) -> None:
        """Every name is known already."""

    def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
        """The CPU generator goes on as it is."""
        return contextlib.nullcontext()


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


def has_transformer_engine() -> bool:
    """Whether transformer-engine's layers can run here: CUDA and the package, which is looked for, not imported."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Everything of Megatron-Core that runs inside runs on the CPU. Where CUDA is present this does nothing.

    Leaving restores all of it, after an error too. The process group is the caller's: ``gloo``.

    Raises:
        RuntimeError: entered a second time before it was left; an installed megatron-core whose internals are not
            the ones replaced here.
    """
    global _active
    if torch.cuda.is_available():
        yield
        return
    if _active:
        raise RuntimeError("megatron_on_cpu() is active already: enter it once, around the whole run")
    random = _checked_internals()
    with contextlib.ExitStack() as stack:
        stack.callback(_set_active, False)
        _set_active(True)
        stack.enter_context(_replaced(torch.cuda, "current_device", lambda: _CPU))
        stack.enter_context(_replaced(torch.cuda, "synchronize", lambda device=None: None))
        stack.enter_context(_replaced(random, _TRACKER, StatelessTracker()))
        stack.enter_context(_replaced(random, _TRACKER_READY, True))
        stack.enter_context(_CudaMeansCpu())
        yield


def _set_active(active: bool) -> None:
    global _active
    _active = active


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _checked_internals() -> Any:
    """The module that holds the tracker, after a look at everything that is about to be replaced in it."""
    random = importlib.import_module(_RANDOM)
    missing = [name for name in (_TRACKER, _TRACKER_READY, _TRACKER_CLASS) if not hasattr(random, name)]
    methods = vars(getattr(random, _TRACKER_CLASS, object))
    missing += [
        f"{StatelessTracker.__name__}.{name}, a counterpart of {_TRACKER_CLASS}.{name}"
        for name, value in methods.items()
        if callable(value) and not name.startswith("_") and not hasattr(StatelessTracker, name)
    ]
    if missing:
        raise RuntimeError(
            f"megatron-core {importlib.metadata.version('megatron-core')} does not fit the CPU shim, which was written "
            f"for {TESTED_VERSION}: {_RANDOM} lacks {', '.join(missing)}; install megatron-core=={TESTED_VERSION} or "
            "run where CUDA is present"
        )
    return random
