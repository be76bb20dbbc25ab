"""Log-probs and entropy from logits on every backend against the float64 reference, over what takes different paths."""

import pytest
import torch

from p3o_kernels import reference, token_log_probs
from p3o_kernels._row_launch import BLOCK
from tests.conftest import lane
from tests.kernels.rows import compare_rows, normal, row_case, run_rows

# one entry; fewer than 16 bytes; a prime; a block less one, whole blocks, one more; head and tail that exceed a block
VOCABULARIES = [1, 3, 101, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_dtypes_and_vocabularies(place, vocab, dtype):
    compare_rows(place, row_case(3, vocab, place.device, dtype))


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_row_counts(place, rows):
    compare_rows(place, row_case(rows, 77, place.device))


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_start_anywhere(place, dtype, offset):
    """Row stride unlike V and odd, storage offset odd: no row begins on a 16-byte boundary."""
    case = row_case(4, 131, place.device, dtype)
    wide = torch.full((4, 139), 50.0, dtype=dtype, device=place.device)  # a read outside the row would show
    wide[:, offset : offset + 131] = case["logits"]
    case["logits"] = wide[:, offset : offset + 131]
    compare_rows(place, case)


def test_transposed_logits(place):
    case = row_case(6, 50, place.device)
    case["logits"] = case["logits"].t().contiguous().t()
    compare_rows(place, case)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.6}, {"softcap": 4.0}, {"temperature": 1.3, "softcap": 2.0}], ids=str
)
def test_temperature_and_softcap(place, options):
    compare_rows(place, row_case(4, BLOCK + 130, place.device), **options)


def test_temperature_of_each_row(place):
    temperature = torch.linspace(0.5, 2.0, 7, device=place.device)
    compare_rows(place, row_case(7, 130, place.device), temperature=temperature)


def test_int32_labels(place):
    case = row_case(5, 33, place.device)
    want = token_log_probs(case["logits"], case["labels"], backend=place.backend)
    assert torch.equal(token_log_probs(case["logits"], case["labels"].int(), backend=place.backend), want)


@pytest.mark.parametrize("which", ["log_probs", "entropy"])
def test_one_gradient_alone(place, which):
    case = row_case(5, 70, place.device)
    logits = case["logits"].requires_grad_()
    made = token_log_probs(logits, case["labels"], return_entropy=True, backend=place.backend)
    weights = normal(5).to(place.device)
    made[which == "entropy"].backward(weights)
    exact = case["logits"].detach().double().requires_grad_()
    reference.token_log_probs(exact, case["labels"], return_entropy=True)[which == "entropy"].backward(weights.double())
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", ["uniform", "strided", "scalar"])
def test_layouts_of_the_gradient_that_arrives(place, layout):
    """loss.sum() sends one number with stride 0, a stacked loss every second one."""
    case = row_case(5, 40, place.device)
    logits = case["logits"].requires_grad_()
    log_probs = token_log_probs(logits, case["labels"], backend=place.backend)
    weights = {
        "uniform": torch.ones(1, device=place.device).expand(5),
        "strided": torch.stack([normal(5), normal(5, seed=3)], 1).to(place.device)[:, 0],
        "scalar": torch.full((5,), 0.25, device=place.device),
    }[layout]
    (grad,) = torch.autograd.grad(log_probs, logits, weights, retain_graph=True)
    (want,) = torch.autograd.grad(log_probs, logits, weights.clone().contiguous())
    assert torch.equal(grad, want)
    assert grad.abs().sum() > 0


def test_same_bits_whatever_surrounds_a_row(place):
    case = row_case(9, 2 * BLOCK + 7, place.device)
    whole = run_rows(token_log_probs, case, backend=place.backend)
    again = run_rows(token_log_probs, case, backend=place.backend)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    alone = {name: tensor[4:5] for name, tensor in case.items()}
    log_probs, entropy, _ = run_rows(token_log_probs, alone, backend=place.backend)
    assert torch.equal(log_probs, whole[0][4:5]) and torch.equal(entropy, whole[1][4:5])


@pytest.mark.parametrize("rows", [65537])
def test_more_rows_than_a_second_grid_axis_holds(place, rows):
    if place.backend == "triton" and lane() != "host":
        pytest.skip("takes minutes here; the launch code has one grid axis only")
    compare_rows(place, row_case(rows, 3, place.device))


@pytest.mark.skipif(lane() == "sanitize", reason="its tensors have a storage of the checker's own")
def test_memory_from_elsewhere_that_begins_anywhere(place):
    """A buffer of another library, one float off a 16-byte boundary."""
    if place.device != "cpu":
        pytest.skip("such memory comes from host libraries")
    case = row_case(3, 40, place.device)
    buffer = bytearray(4 * 121 + 16)
    whole = torch.frombuffer(buffer, dtype=torch.float32, count=124)
    start = (-whole.data_ptr() // 4) % 4 + 1
    foreign = torch.frombuffer(buffer, dtype=torch.float32, offset=4 * start, count=120).view(3, 40)
    assert foreign.data_ptr() % 16 == 4 and foreign.storage_offset() == 0
    case["logits"] = foreign.copy_(case["logits"])
    want = token_log_probs(foreign.clone(), case["labels"], backend=place.backend)
    assert torch.equal(token_log_probs(foreign, case["labels"], backend=place.backend), want)
