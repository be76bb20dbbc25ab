"""Lanes: which implementation of the kernels this process can run, and on which device.

A test that takes ``place`` runs once for every (backend, device) of the lane:

    host        eager on the CPU; compiled as well in the modules of COMPILED (10 s for each new combination of options)
    interpret   triton under its interpreter, when the process was started with TRITON_INTERPRET=1
    sanitize    triton as compiled, under ttsem, on CPU tensors that report cuda:0
    gpu         triton and eager on a CUDA device: marked, so that -m gpu selects them
"""

import sys
from typing import NamedTuple

import pytest
import torch

from p3o_kernels import _backend


class Place(NamedTuple):
    """Where a call runs."""

    backend: str
    device: str


def lane() -> str:
    if "ttsem" in sys.modules:
        return "sanitize"
    return "interpret" if _backend.INTERPRETED else "host"


COMPILED = ("test_golden",)


def places(module: str) -> list[object]:
    compiled = pytest.param(Place("compiled", "cpu"), id="compiled", marks=pytest.mark.host_only)
    here = {
        "host": [pytest.param(Place("eager", "cpu"), id="eager"), *([compiled] if module in COMPILED else [])],
        "interpret": [pytest.param(Place("triton", "cpu"), id="triton-interpreted")],
        "sanitize": [pytest.param(Place("triton", "cuda"), id="triton-sanitized")],
    }[lane()]
    gpu = [
        pytest.param(Place(backend, "cuda"), id=f"{backend}-cuda", marks=pytest.mark.gpu)
        for backend in ("triton", "eager")
    ]
    return here + (gpu if lane() == "host" else [])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", places(metafunc.module.__name__.rpartition(".")[2]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
