"""The compiled backend against the eager one, for every option that is a graph of its own."""

import pytest
import torch

from p3o_kernels import ESSContext, p3o_loss

pytestmark = pytest.mark.host_only
TOKENS = 5000
ESS = torch.tensor(0.4, dtype=torch.float64)
CASES = {
    "no mask": {"mask": None},
    "importance, context": {"kl_mode": "importance", "context": ESSContext(ESS, ESS, ESS, ESS, ESS)},
    "proxy, per token": {"kl_mode": "proxy", "reduction": "none"},
    "all terms": {"ref_kl_coef": 0.3, "entropy_coef": 0.1, "num_tokens": 7000},
    "sequences": {"cu_seqlens": torch.tensor([0, 1200, 1200, TOKENS], dtype=torch.int32), "reduction": "sum"},
}


def arguments(changes):
    generator = torch.Generator().manual_seed(0)
    log_probs, noise, advantages = (torch.randn(TOKENS, generator=generator) for _ in range(3))
    tensors = {"log_probs": log_probs, "behavior_log_probs": log_probs + 2.0 * noise, "advantages": advantages}
    tensors["mask"] = torch.rand(TOKENS, generator=generator) > 0.2
    if "ref_kl_coef" in changes:
        tensors |= {"ref_log_probs": log_probs + 3.0 * noise, "entropy": noise.abs()}
    if "cu_seqlens" in changes:
        tensors["advantages"] = advantages[:3].clone()
    return tensors | changes


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name):
    results = []
    for backend in ("eager", "compiled"):
        keywords = arguments(CASES[name])
        keywords["log_probs"].requires_grad_()
        output = p3o_loss(**keywords, backend=backend)
        output.loss.sum().backward()
        results.append((output, keywords["log_probs"].grad))
    (eager, eager_grad), (compiled, compiled_grad) = results
    # the same float32 formulas; a fused multiply-add may round once where eager rounds twice
    torch.testing.assert_close(compiled.loss, eager.loss, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(compiled_grad, eager_grad, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(compiled.metrics.vector, eager.metrics.vector, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("where", ["behavior_log_probs", "advantages"])
def test_invalid_data_is_found(where):
    keywords = arguments({})
    keywords["mask"][9] = True
    keywords[where][9] = torch.nan
    with pytest.raises(ValueError, match=r"invalid data on 1 of .*token 9"):
        p3o_loss(**keywords, backend="compiled")
    output = p3o_loss(**keywords, backend="compiled", validate=False)
    assert output.loss.isnan() and output.metrics.to_dict("")["invalid_tokens"] == 1


def test_masked_poison_changes_no_bit():
    keywords = arguments({})
    clean = p3o_loss(**keywords, backend="compiled")
    for name in ("log_probs", "behavior_log_probs", "advantages"):
        keywords[name] = torch.where(keywords["mask"], keywords[name], torch.nan)
    poisoned = p3o_loss(**keywords, backend="compiled")
    assert torch.equal(clean.loss, poisoned.loss) and torch.equal(clean.metrics.vector, poisoned.metrics.vector)
