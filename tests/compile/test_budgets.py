"""Every kernel compiles for GPUs that are not here, within its budget of registers, spills and memory instructions.

The budgets are in ``bench.budgets``. Triton's cache makes every run but the first one quick.
"""

import json

import pytest

from bench import compiled
from bench.budgets import ARCHITECTURES, violations
from bench.kernel_report import entry
from bench.roofline import DEVICES
from p3o_kernels import _backend
from p3o_kernels._variants import VARIANTS, Variant

pytestmark = [
    pytest.mark.host_only,
    pytest.mark.skipif(_backend.INTERPRETED, reason="interpreted kernels cannot be compiled"),
]
# the smallest and the largest form of every kernel
REPRESENTATIVE = [
    "ratio_sums has_mask",
    "token_loss",
    "token_loss has_mask, per_sequence, general",
    "scale_grad per_token, has_entropy, has_mask",
    "context",
    "finish_loss",
]


def variant(name: str) -> Variant:
    return next(variant for variant in VARIANTS if variant.name == name)


def wasteful(function: str, block: int) -> dict[str, object]:
    """A launch of a kernel that breaks a budget, in the form of a report entry."""
    pointers = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
    return {
        "role": "K2",
        "variant": function,
        "module": "wasteful_kernels",
        "function": function,
        "signature": pointers | {"num_tokens": "i32", "BLOCK": "constexpr"},
        "constexprs": {"BLOCK": block},
        "divisible_by_16": list(pointers),
        "num_warps": 8,
        "num_stages": 1,
        "arch": 90,
        "dtype": "float32",
        "reads": ["x_ptr"],
        "writes": ["out_ptr"],
        "block": block,
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS])
def test_every_variant_keeps_its_budget(name, arch):
    assert violations(entry(variant(name).launch(arch))) == []


@pytest.mark.parametrize("arch", [100, "gfx942"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_other_targets_compile_with_wide_memory_instructions(name, arch):
    made = entry(variant(name).launch(arch))
    wide = sum(count for opcode, count in made["memory"].items() if opcode.endswith((".128", "dwordx4")))
    kinds = [made["signature"][argument] for argument in made["reads"] + made["writes"]]
    assert wide >= kinds.count("*fp32")
    assert made["registers"] <= 128


def test_a_report_entry_compiles_to_itself():
    made = entry(variant("token_loss has_mask").launch(90))
    again = compiled.inspect(json.loads(json.dumps(made)))
    assert {name: made[name] for name in again} == again


def test_counts_are_those_of_one_whole_block():
    """The mask goes by four bytes at a time, all else by 128 bits; the tail and its single tokens do not count."""
    made = entry(variant("token_loss has_mask, has_context").launch(90))
    assert made["block_memory"] == {"LDG.E": 1, "LDG.E.128": 3, "STG.E.128": 1}
    assert made["memory"]["LDG.E"] > 1
    assert 60 < made["sass_per_element"] < 100


def test_bounds_cover_the_devices_of_the_architecture():
    made = entry(variant("token_loss has_mask").launch(90))
    assert made["bytes_per_token"] == 17
    assert made["roofline"].keys() == {"H100", "H200"}
    # 17 bytes a token through 4.8 TB/s
    at_least = 17e6 / DEVICES["H200"].bandwidth * 1e6
    assert made["roofline"]["H200"]["us_per_million_tokens"] == pytest.approx(at_least, rel=1e-3)


def test_masking_every_block_breaks_the_budget():
    found = violations(entry(wasteful("masked_kernel", block=1024)))
    assert len(found) == 2
    assert "0 LDG.E.128" in found[0]
    assert "0 STG.E.128" in found[1]


def test_a_giant_tile_breaks_the_budget():
    found = violations(entry(wasteful("giant_tile_kernel", block=1 << 15)))
    assert any("registers is" in sentence for sentence in found)
