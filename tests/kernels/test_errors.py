"""Bad input: an error that names the argument, what came and what is expected."""

import pytest
import torch

from p3o_kernels import RatioStats, exact_kl, p3o_loss, ratio_stats


def good(device="cpu", tokens=6):
    return {
        "log_probs": -torch.ones(tokens, device=device),
        "behavior_log_probs": -torch.ones(tokens, device=device),
        "advantages": torch.ones(tokens, device=device),
        "mask": torch.ones(tokens, dtype=torch.bool, device=device),
    }


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


CASES = {
    "behavior shape": ({"behavior_log_probs": torch.zeros(5)}, ValueError, r"behavior_log_probs \(5,\)"),
    "mask shape": ({"mask": torch.ones(1, dtype=torch.bool)}, ValueError, r"mask \(1,\)"),
    "advantages broadcast": ({"advantages": torch.zeros(1)}, ValueError, r"advantages \(1,\)"),
    "reference shape": ({"ref_log_probs": torch.zeros(2)}, ValueError, r"ref_log_probs \(2,\)"),
    "float64": ({"log_probs": torch.zeros(6).double()}, TypeError, "log_probs must be float32.*reference"),
    "integers": ({"advantages": torch.zeros(6).int()}, TypeError, "advantages must be float32.*torch.int32"),
    "float mask": ({"mask": torch.ones(6)}, TypeError, r"mask must be torch.bool.*mask.bool\(\)"),
    "nothing": ({"behavior_log_probs": None}, TypeError, "behavior_log_probs must be a torch.Tensor, got None"),
    "not a tensor": ({"advantages": [1.0] * 6}, TypeError, "advantages must be a torch.Tensor, got list"),
    "device": ({"advantages": torch.zeros(6, device="meta")}, ValueError, "advantages meta"),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be one of none, sum, mean; got 'avg'"),
    "kl_mode": ({"kl_mode": "k3"}, ValueError, "kl_mode must be one of proxy, proxy_safe, importance; got 'k3'"),
    "exact": ({"kl_mode": "exact"}, ValueError, "rollouts do not record.*exact_kl"),
    "backend": ({"backend": "cuda"}, ValueError, "backend must be one of auto, triton, eager, compiled; got 'cuda'"),
    "clip_low": ({"clip_low": -0.1}, ValueError, "clip_low must be >= 0, got -0.1"),
    "clip_high": ({"clip_high": float("nan")}, ValueError, "clip_high must be finite, got nan"),
    "coefficient": ({"ref_kl_coef": 0.1}, ValueError, "ref_kl_coef is 0.1 but ref_log_probs is missing"),
    "entropy missing": ({"entropy_coef": 0.1}, ValueError, "entropy_coef is 0.1 but entropy is missing"),
    "coefficient type": ({"entropy_coef": "1"}, TypeError, "entropy_coef must be a number, got str"),
    "num_tokens zero": ({"num_tokens": 0}, ValueError, "num_tokens must be >= 1, got 0"),
    "num_tokens float": ({"num_tokens": 2.5}, TypeError, "num_tokens must be an int"),
    "num_tokens tensor": ({"num_tokens": torch.tensor(0)}, ValueError, "num_tokens must be >= 1, got 0"),
    "num_tokens of a sum": ({"num_tokens": 3, "reduction": "sum"}, ValueError, "num_tokens divides a mean"),
    "context": ({"context": 0.5}, TypeError, "context must be an ESSContext.*got float"),
    "offsets dtype": ({"cu_seqlens": torch.tensor([0, 6])}, TypeError, r"cu_seqlens must be torch.int32.*int\(\)"),
    "offsets shape": ({"cu_seqlens": offsets(0, 6)[None]}, ValueError, r"cu_seqlens must have shape \[B \+ 1\]"),
    "offsets end": ({"cu_seqlens": offsets(0, 3, 5)}, ValueError, r"end at T = 6, got \[0, 3, 5\]"),
    "offsets start": ({"cu_seqlens": offsets(1, 6)}, ValueError, r"start at 0.*got \[1, 6\]"),
    "offsets decrease": ({"cu_seqlens": offsets(0, 4, 2, 6)}, ValueError, r"never decrease.*got \[0, 4, 2, 6\]"),
    "no sequence": ({"cu_seqlens": offsets(0)}, ValueError, "cu_seqlens must end at T = 6, got no sequence"),
    "advantages of sequences": (
        {"cu_seqlens": offsets(0, 2, 6), "advantages": torch.zeros(3)},
        ValueError,
        r"advantages must be \[2\], one per sequence.*got \(3,\)",
    ),
}


@pytest.mark.host_only
@pytest.mark.parametrize("name", CASES)
def test_bad_argument(name):
    changes, error, message = CASES[name]
    arguments = good() | changes
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(error, match=message):
        p3o_loss(**arguments)
    assert all(value.is_meta or torch.equal(value, arguments[key]) for key, value in before.items())


@pytest.mark.host_only
def test_context_and_group_exclude_each_other():
    context = RatioStats.zeros().to_context()
    with pytest.raises(ValueError, match="context and process_group exclude each other"):
        p3o_loss(**good(), context=context, process_group=object())


def test_offsets_are_checked_where_the_kernel_runs(place):
    tensors = good(place.device)
    tensors["advantages"] = torch.ones(2, device=place.device)
    bad = torch.tensor([0, 9, 5], dtype=torch.int32, device=place.device)
    with pytest.raises(ValueError, match=r"end at T = 6, got \[0, 9, 5\]"):
        p3o_loss(**tensors, cu_seqlens=bad, backend=place.backend)


@pytest.mark.host_only
def test_triton_on_a_cpu_says_what_to_do():
    from p3o_kernels import _backend

    if _backend.INTERPRETED:
        pytest.skip("the interpreter runs on a CPU")
    with pytest.raises(ValueError, match=r'backend="triton" needs CUDA tensors, got cpu.*TRITON_INTERPRET=1'):
        p3o_loss(**good(), backend="triton")


@pytest.mark.host_only
def test_statistics_check_their_arguments():
    with pytest.raises(ValueError, match=r"behavior_log_probs \(2,\)"):
        ratio_stats(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"vector must have shape \(4,\).*got \(3,\)"):
        RatioStats.from_vector(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"vector must be torch.float64, got torch.float32"):
        RatioStats.from_vector(torch.zeros(4))


@pytest.mark.host_only
def test_exact_kl_checks_its_arguments():
    with pytest.raises(ValueError, match=r"same shape \[..., V\], got \(2, 3\) and \(2, 4\)"):
        exact_kl(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"mask must be \(2,\), got \(3,\)"):
        exact_kl(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match="policy_logits must be floating point"):
        exact_kl(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3))
