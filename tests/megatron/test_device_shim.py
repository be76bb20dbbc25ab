"""The CPU shim: what it redirects, that nothing of it stays, and that it refuses what it does not know."""

import pytest
import torch

from p3o_train import device_shim
from p3o_train.device_shim import StatelessTracker, megatron_on_cpu
from p3o_train.random_state import random_states
from tests.megatron.topologies import NEEDS_MEGATRON

pytestmark = [
    pytest.mark.host_only,
    NEEDS_MEGATRON,
    pytest.mark.filterwarnings("ignore::Warning:megatron.*"),  # about what is not installed
]


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def random():
    """Megatron-Core's random states: where the shim replaces something."""
    from megatron.core.tensor_parallel import random

    return random


def everything_replaced(random):
    mode_stack_depth = torch.overrides._len_torch_function_stack()
    functions = (torch.cuda.current_device, torch.cuda.synchronize)
    return (
        *functions,
        *(vars(random)[name] for name in (device_shim._TRACKER, device_shim._TRACKER_READY)),
        mode_stack_depth,
    )


def test_cuda_is_the_cpu_inside(random):
    with megatron_on_cpu():
        tensor = torch.zeros(2, device="cuda", pin_memory=True)
        assert tensor.device.type == torch.empty(1, device=torch.device("cuda", 0)).device.type == "cpu"
        assert tensor.cuda(non_blocking=True) is tensor
        assert tensor.pin_memory() is tensor
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.type(torch.float64).dtype == torch.float64
        assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
        torch.cuda.synchronize()
        with random.get_cuda_rng_tracker().fork():
            assert random.get_cuda_rng_tracker().get_states() == {}


@pytest.mark.parametrize("failure", [None, ValueError, KeyboardInterrupt])
def test_everything_is_restored(random, failure):
    before = everything_replaced(random)
    with pytest.raises(failure) if failure else pytest.MonkeyPatch.context(), megatron_on_cpu():
        assert all(old is not new for old, new in zip(before, everything_replaced(random), strict=True))
        if failure:
            raise failure
    assert everything_replaced(random) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with megatron_on_cpu():  # and it can be entered again
        pass


def test_saving_random_streams_makes_no_tracker(random, monkeypatch):
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    assert "megatron" not in random_states()
    assert random._CUDA_RNG_STATE_TRACKER_INITIALIZED is False


def test_entering_twice_is_refused_and_leaves_the_first_intact(random):
    with megatron_on_cpu():
        inside = everything_replaced(random)
        with pytest.raises(RuntimeError, match="active already"), megatron_on_cpu():
            pass
        assert everything_replaced(random) == inside


def test_nothing_happens_where_cuda_is_present(monkeypatch, random):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = everything_replaced(random)
    with megatron_on_cpu(), megatron_on_cpu():
        assert everything_replaced(random) == before


def test_internals_that_are_gone_are_named(monkeypatch, random):
    monkeypatch.delattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED")
    message = (
        rf"megatron-core [\d.]+ .* written for {device_shim.TESTED_VERSION}.* _CUDA_RNG_STATE_TRACKER_INITIALIZED;"
    )
    with pytest.raises(RuntimeError, match=message), megatron_on_cpu():
        pass


def test_a_method_that_the_tracker_lacks_is_named(monkeypatch, random):
    monkeypatch.setattr(random.CudaRNGStatesTracker, "rewind", lambda self: None, raising=False)
    with pytest.raises(RuntimeError, match=r"StatelessTracker\.rewind"), megatron_on_cpu():
        pass


def test_real_random_states_are_not_swallowed():
    with pytest.raises(RuntimeError, match="default"):
        StatelessTracker().set_states({"default": torch.zeros(1)})
