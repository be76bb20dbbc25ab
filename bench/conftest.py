"""Shared measuring rules: a clock that waits for the GPU, derived rates, and peak memory."""

import time
from collections.abc import Callable

import pytest
import torch

from bench import peers, vocabulary_cases
from bench.memory import peak_extra_bytes
from bench.vocabulary_workload import Shape, make_batch, peak_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST = {"cuda": 1 << 22, "cpu": 1 << 20}[DEVICE]
SMOKE = 1 << 12

Measure = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = f"largest T to measure (default {LARGEST:,} here; 4194304 is the last step of the series)"
    parser.addoption("--max-tokens", type=int, default=LARGEST, help=help_text)


def synchronized_clock() -> float:
    """Seconds; waits for the GPU first, so start and stop bracket device work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def step_clock() -> float:
    """For steps of seconds: with one CPU thread its CPU time, to which other processes add little."""
    return time.process_time() if DEVICE == "cpu" and torch.get_num_threads() == 1 else synchronized_clock()


def device_name() -> str:
    if DEVICE == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' * (threads > 1)}"


def sizes(config: pytest.Config) -> list[int]:
    """T = 1,024 times powers of 4; the smallest ones when only the code is to be tried, not measured."""
    largest = SMOKE if config.getoption("benchmark_disable") else config.getoption("max_tokens")
    return [1 << exponent for exponent in range(10, 23, 2) if 1 << exponent <= largest]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "num_tokens" in metafunc.fixturenames:
        metafunc.parametrize("num_tokens", sizes(metafunc.config))
    if "vocabulary_shape" in metafunc.fixturenames:
        shapes = vocabulary_cases.shapes(DEVICE, metafunc.config.getoption("benchmark_disable"))
        metafunc.parametrize("vocabulary_shape", shapes, ids=str)


@pytest.fixture(scope="session")
def copy_bandwidth() -> float:
    """Bytes per second that a large copy moves on this device: what a memory-bound step could reach."""
    source = torch.ones(1 << 24 if DEVICE == "cpu" else 1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        begin = synchronized_clock()
        target.copy_(source)
        seconds.append(synchronized_clock() - begin)
    return 2 * source.nbytes / min(seconds[1:])


@pytest.fixture
def measure(benchmark, request) -> Measure:
    """``measure(step, tokens=..., bytes_moved=..., **info)``: times ``step`` and records rates beside it."""

    def run(step: Callable[[], None], *, tokens: int, bytes_moved: int, **info: object) -> None:
        step()  # compile and allocate before anything is recorded
        rounds = max(5, min(50, (1 << 22) // tokens))
        benchmark.pedantic(step, rounds=rounds, warmup_rounds=2)
        if benchmark.stats is None:  # --benchmark-disable: the calls above were a smoke test
            return
        seconds = benchmark.stats.stats.median
        bandwidth = request.getfixturevalue("copy_bandwidth")
        benchmark.extra_info.update(
            info,
            device=device_name(),
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            gb_per_second=bytes_moved / seconds / 1e9,
            share_of_copy_bandwidth=bytes_moved / seconds / bandwidth,
            peak_mib=peak_extra_bytes(step, DEVICE) / 2**20,
        )

    return run


@pytest.fixture
def measure_vocabulary(benchmark) -> Callable[[str, Shape, str, str], None]:
    """``measure_vocabulary(source, shape, provider, scope)``: times one step, and records its peak memory beside."""

    def run(source: str, shape: Shape, provider: str, scope: str) -> None:
        reason = peers.why_absent(provider, DEVICE)
        if reason:
            pytest.skip(f"{provider}: {reason}")
        step = peers.make_step(provider, make_batch(shape, source, DEVICE), scope)
        step()  # compile and allocate before anything is recorded
        benchmark.pedantic(step, rounds=10 if DEVICE == "cuda" else 3)
        if benchmark.stats is not None:
            peak = peak_bytes(step, DEVICE)
            benchmark.extra_info.update(vocabulary_cases.info(source, shape, provider, scope, peak))
            benchmark.extra_info["device"] = device_name()

    return run
