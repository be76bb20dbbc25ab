"""Which implementation runs: decided per call from the argument and the tensor alone."""

from torch import Tensor

try:
    from triton import knobs
except ImportError:  # not on Linux, or left out: everything but backend="triton" works
    HAS_TRITON, INTERPRETED = False, False
else:
    HAS_TRITON, INTERPRETED = True, bool(knobs.runtime.interpret)

BACKENDS = ("auto", "triton", "eager", "compiled")


def resolve(backend: str, tensor: Tensor) -> str:
    """The implementation behind ``backend`` on the device of ``tensor``: triton, eager or compiled."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend in ("eager", "compiled"):
        return backend
    usable = HAS_TRITON and (tensor.is_cuda or INTERPRETED)
    if backend == "auto":
        return "triton" if usable else "eager"
    if not HAS_TRITON:
        raise ValueError('backend="triton" needs the triton package: pip install "triton>=3.4", or use "eager"')
    if not usable:
        raise ValueError(
            f'backend="triton" needs CUDA tensors, got {tensor.device}; on a CPU use "eager" or "compiled", '
            "or start the process with TRITON_INTERPRET=1 to run the kernels slowly"
        )
    return "triton"
