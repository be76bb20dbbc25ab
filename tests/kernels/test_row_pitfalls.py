"""What vocabulary kernels have been reported to get wrong, one test each, named after what goes wrong."""

import math

import pytest
import torch

from p3o_kernels import p3o_loss_from_logits, reference, token_log_probs
from p3o_kernels._row_launch import BLOCK
from tests.conftest import lane
from tests.kernels.rows import assert_as_exact, normal, off_target, row_case, run_rows

INF = math.inf


def log_probs_of(place, case, **options):
    return token_log_probs(case["logits"], case["labels"], backend=place.backend, **options)


def both(place, case, **options):
    """Ours and log_softmax in float64, NaN compared as equal."""
    ours = run_rows(token_log_probs, case, backend=place.backend, **options)
    truth = run_rows(reference.token_log_probs, case, torch.float64, **options)
    return ours, truth


def assert_like_torch(place, case, extra=0.0, **options):
    for value, truth in zip(*both(place, case, **options), strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-6 + extra, equal_nan=True)


def unfused_rounding(offset):
    """The interpreter has no fused multiply-add: it rounds z log2(e), half a unit in the exponent of two powers."""
    return abs(offset) * 1.4427 * 2.0**-23 if lane() == "interpret" else 0.0


def test_padding_of_the_last_block_counts_as_logit_zero(place):
    """With all logits far below 0, a padded column of 0 would own the whole softmax."""
    case = row_case(3, 1025, place.device)
    case["logits"] -= 60.0
    assert_like_torch(place, case, extra=2.0 * unfused_rounding(60.0))


def test_strongly_negative_logits_lose_to_a_running_maximum_that_starts_at_zero(place):
    case = row_case(3, BLOCK + 300, place.device)
    case["logits"] = case["logits"] * 10.0 - 1e4
    assert_like_torch(place, case, extra=4.0 * unfused_rounding(1e4))  # gradients of up to 2, entropies of two terms


@pytest.mark.parametrize("vocab", [40, BLOCK + 40])
def test_excluded_first_block_gives_nan(place, vocab):
    case = row_case(4, vocab, place.device)
    case["logits"][:, : vocab // 2 + 8] = -INF
    case["labels"][:2] = vocab - 1
    assert_like_torch(place, case)


def test_one_entry_left_gives_an_exact_log_prob_of_zero(place):
    case = row_case(2, 100, place.device)
    case["logits"][:] = -INF
    case["logits"].scatter_(1, case["labels"][:, None], -3.25)
    log_probs, entropy, grad = run_rows(token_log_probs, case, backend=place.backend)
    torch.testing.assert_close(log_probs, torch.zeros_like(log_probs), rtol=0, atol=1e-7)
    torch.testing.assert_close(entropy, torch.zeros_like(entropy), rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-6)


def test_row_without_any_entry_pretends_to_a_number(place):
    case = row_case(3, 90, place.device)
    case["logits"][1] = -INF
    (log_probs, _, grad), (truth, _, true_grad) = both(place, case)
    assert log_probs.isnan().tolist() == truth.isnan().tolist() == [False, True, False]
    assert grad[1].isnan().all() and true_grad[1].isnan().all() and grad[::2].isfinite().all()


def test_label_on_an_excluded_entry(place):
    case = row_case(3, 90, place.device)
    case["logits"][0, case["labels"][0]] = -INF
    log_probs, _, grad = run_rows(token_log_probs, case, backend=place.backend)
    assert log_probs[0] == -INF and log_probs[1:].isfinite().all() and grad.isfinite().all()


def test_nan_in_a_row_stays_in_that_row(place):
    case = row_case(3, BLOCK + 10, place.device)
    case["logits"][1, 5] = math.nan
    log_probs, entropy, grad = run_rows(token_log_probs, case, backend=place.backend)
    assert log_probs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]
    assert grad[1].isnan().all() and grad[::2].isfinite().all()


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_common_offset_costs_digits(place, offset):
    """The logits are multiples of 1/8, exact under the offset, so the truth is the same with and without it."""
    case = row_case(4, BLOCK + 77, place.device)
    case["logits"] = (case["logits"] * 8.0).round() / 8.0
    _, truths = both(place, case)
    case["logits"] += offset
    ours = run_rows(token_log_probs, case, backend=place.backend)
    plain = run_rows(reference.token_log_probs, case)
    for value, truth, eager in zip(ours, truths, plain, strict=True):
        allowed = max(1.5 * (eager - truth).abs().max().item(), 1e-6 * truth.abs().max().item())
        allowed += 4.0 * unfused_rounding(offset)
        assert (value - truth).abs().max().item() <= allowed


@pytest.mark.parametrize("label", [-100, -1, 90, 2**40])
def test_label_outside_the_vocabulary_reads_or_writes_somewhere(place, label):
    """Probability 0; no one-hot entry in the gradient."""
    case = row_case(3, 90, place.device)
    case["labels"][1] = label
    log_probs, _, grad = run_rows(token_log_probs, case, backend=place.backend)
    truth, _, true_grad = run_rows(reference.token_log_probs, case, torch.float64)
    assert log_probs.isinf().tolist() == truth.isinf().tolist() == [False, True, False]
    assert grad.isfinite().all()
    torch.testing.assert_close(grad[::2].double(), true_grad[::2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
def test_masked_rows_leak(place, poison):
    """Whatever a masked row and its label hold, it gives exact zeros and changes no bit of the others."""
    case = row_case(6, BLOCK + 9, place.device)
    mask = torch.tensor([True, False, True, True, False, False], device=place.device)
    clean = run_rows(token_log_probs, case, backend=place.backend, mask=mask)
    case["logits"][~mask] = poison
    case["labels"][~mask] = -100
    dirty = run_rows(token_log_probs, case, backend=place.backend, mask=mask)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b) and a[~mask].abs().sum() == 0
    assert clean[2][mask].abs().sum() > 0


def test_no_valid_row_at_all(place):
    case = row_case(3, 50, place.device)
    case["logits"][:] = math.nan
    mask = torch.zeros(3, dtype=torch.bool, device=place.device)
    logits = case["logits"].requires_grad_()
    output = p3o_loss_from_logits(
        logits, case["labels"], normal(3).to(place.device), normal(3).to(place.device), mask, backend=place.backend
    )
    output.loss.backward()
    assert output.loss == 0 and output.num_tokens == 0 and output.context.ess == 1
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_confident_label_is_rounded_before_one_is_subtracted(place):
    """p_y = 1 - 2^-12: rounded to bfloat16 first, its gradient would be 0."""
    case = row_case(2, 64, place.device, torch.bfloat16)
    case["logits"][:] = 0.0
    case["logits"].scatter_(1, case["labels"][:, None], math.log(63.0 * 4095.0))
    logits = case["logits"].requires_grad_()
    log_probs_of(place, case).sum().backward()
    entry = logits.grad.gather(1, case["labels"][:, None]).double()
    exact = case["logits"].detach().double().requires_grad_()
    reference.token_log_probs(exact, case["labels"]).sum().backward()
    want = exact.grad.gather(1, case["labels"][:, None])
    assert want.min() > 1e-4
    torch.testing.assert_close(entry, want, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=0)


def test_softcap_brings_excluded_entries_back(place):
    """c tanh(-inf / c) is -c: an ordinary logit."""
    case = row_case(3, 70, place.device)
    case["logits"][:, 10:60] = -INF
    case["labels"][:] = 3
    assert_like_torch(place, case, softcap=5.0)


def test_every_row_gets_the_first_rows_gradient(place):
    case = row_case(5, 60, place.device)
    logits = case["logits"].requires_grad_()
    weights = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0], device=place.device)
    log_probs_of(place, case).backward(weights)
    unit = row_case(5, 60, place.device)
    unit["logits"].requires_grad_()
    log_probs_of(place, unit).sum().backward()
    torch.testing.assert_close(logits.grad, unit["logits"].grad * weights[:, None], rtol=1e-5, atol=1e-7)


def test_addresses_beyond_two_to_the_31(place):
    """Two rows that lie 2^31 + 8 elements apart; the memory between them is never touched."""
    if lane() == "sanitize":
        pytest.skip("the checker keeps a shadow of every byte between the rows")
    vocab, stride = 37, 2**31 + 8
    rows = row_case(2, vocab, place.device, torch.bfloat16)
    storage = torch.empty(stride + vocab, dtype=torch.bfloat16, device=place.device)
    far = storage.as_strided((2, vocab), (stride, 1))
    far.copy_(rows["logits"])
    want = run_rows(token_log_probs, rows, backend=place.backend)
    leaf = far.requires_grad_()
    log_probs, entropy = token_log_probs(
        leaf, rows["labels"], return_entropy=True, inplace_backward=True, backend=place.backend
    )
    assert torch.equal(log_probs, want[0]) and torch.equal(entropy, want[1])
    weights = torch.stack([normal(2, seed=1), normal(2, seed=2)]).to(place.device)
    torch.autograd.backward([log_probs, entropy], list(weights))
    assert torch.equal(leaf.detach(), want[2])


def test_a_log_ratio_of_500_is_no_on_policy_token(place):
    """Row 1 has probability e^-500: invalid data, an error and never e = 1."""
    case = row_case(2, 40, place.device)
    case["logits"][1, case["labels"][1]] = -500.0
    arguments = (case["logits"], case["labels"], torch.full((2,), -2.0, device=place.device))
    advantages = torch.ones(2, device=place.device)
    with pytest.raises(ValueError, match="the first is token 1"):
        p3o_loss_from_logits(*arguments, advantages, backend=place.backend)
    output = p3o_loss_from_logits(*arguments, advantages, validate=False, backend=place.backend)
    assert output.loss.isnan() and output.context.ess.isnan()


def test_zero_off_target_gradient_is_noticed_by_the_tolerances(place):
    case = row_case(2, BLOCK + 1, place.device)
    _, _, grad = run_rows(token_log_probs, case, backend=place.backend)
    rest = off_target(grad, case["labels"])
    with pytest.raises(AssertionError):
        assert_as_exact(torch.zeros_like(rest), rest, rest)
