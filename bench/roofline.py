"""The shortest time a launch can take on a GPU: a bound from counted bytes and instructions, not a measurement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ELEMENTS = 1_000_000
_SIZES = {"*fp64": 8, "*fp32": 4, "*bf16": 2, "*fp16": 2, "*u8": 1}


@dataclass(frozen=True, slots=True)
class Device:
    """Per GPU; instruction rates are threads per clock and multiprocessor."""

    arch: int
    bandwidth: float
    """Bytes per second."""
    multiprocessors: int
    clock: float
    """Hz."""
    fp64_rate: int
    issue_rate: int = 128
    """Four schedulers, each one warp per clock."""
    special_rate: int = 16
    """MUFU, and conversions from and to 64 bit, which run on the same unit."""


# Bandwidth and multiprocessors: NVIDIA data sheets and white papers of A100 80 GB SXM, H100 SXM, H200 SXM and B200.
# Clock: the boost clock that the FP32 peak of the data sheet implies. Rates: the table of arithmetic instructions in
# the CUDA C++ Programming Guide, compute capabilities 8.0, 9.0 and 10.0.
DEVICES = {
    "A100": Device(80, 2.039e12, 108, 1.41e9, fp64_rate=32),
    "H100": Device(90, 3.35e12, 132, 1.98e9, fp64_rate=64),
    "H200": Device(90, 4.8e12, 132, 1.98e9, fp64_rate=64),
    "B200": Device(100, 8.0e12, 148, 1.98e9, fp64_rate=64),
}


def bytes_per_element(launch: Mapping[str, Any]) -> int:
    """Device-memory traffic of a token or a logit when every argument crosses once; a second sweep hits the cache."""
    return sum(_SIZES[launch["signature"][name]] for name in (*launch["reads"], *launch["writes"]))


def bounds(entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Microseconds per million tokens or logits on each GPU of the entry's architecture, and what limits it."""
    if entry.get("sass_per_element") is None:
        return {}
    return {name: _bound(entry, device) for name, device in DEVICES.items() if device.arch == entry["arch"]}


def _bound(entry: Mapping[str, Any], device: Device) -> dict[str, Any]:
    per_second = device.multiprocessors * device.clock
    special = entry["mufu_per_element"] + entry["conversion_per_element"]
    seconds = {
        "memory": entry["bytes_per_element"] / device.bandwidth,
        "issue": entry["sass_per_element"] / (device.issue_rate * per_second),
        "fp64": entry["fp64_per_element"] / (device.fp64_rate * per_second),
        "special": special / (device.special_rate * per_second),
    }
    limit = max(seconds, key=lambda name: seconds[name])
    return {"us_per_million_elements": round(seconds[limit] * ELEMENTS * 1e6, 3), "limited_by": limit}
