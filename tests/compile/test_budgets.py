"""Every kernel compiles for GPUs that are not here, within its budget of registers, spills and memory instructions.

The budgets are in ``bench.budgets``. Triton's cache makes every run but the first one quick.
"""

import json
import re
from collections.abc import Callable

import pytest

from bench import compiled, sass
from bench.budgets import ARCHITECTURES, BUDGETS, violations
from bench.kernel_report import entry
from bench.roofline import DEVICES
from p3o_kernels import _backend
from p3o_kernels._variants import VARIANTS, Variant

pytestmark = [
    pytest.mark.host_only,
    pytest.mark.skipif(_backend.INTERPRETED, reason="interpreted kernels cannot be compiled"),
]
TOKEN_VARIANTS = [variant.name for variant in VARIANTS if variant.role == "K2"]
# forms that training runs, with budgets of their own
ROW_VARIANTS = ["row_stats bf16", "row_stats bf16, has_entropy", "row_grad bf16", "row_loss bf16"]
# of the others some, because each takes a second to compile: every kernel and dtype, without and with its options
OTHER_ROW_VARIANTS = [
    ("row_stats fp16", 80),
    ("row_stats fp32, has_entropy, has_softcap", 90),
    ("row_grad fp32", 90),
    ("row_grad fp16, has_entropy, has_softcap", 80),
    ("row_loss fp32, has_entropy", 90),
    ("row_loss bf16, has_softcap", 80),
    ("row_merge fp32, has_entropy", 90),
    ("scale_rows bf16", 80),
]
# the smallest and the largest form of every kernel over tokens, and the sweeps of those over rows
REPRESENTATIVE = [
    "ratio_sums has_mask",
    "token_loss",
    "token_loss has_mask, per_sequence, general",
    "scale_grad per_token, has_entropy, has_mask",
    "context",
    "finish_loss",
    "finish_loss anchored",
    "anchor_sums has_mask",
    "two_anchor_loss has_mask, per_sequence",
    "sequence_sums has_mask",
    "sequence_loss has_mask, per_sequence",
    "row_stats bf16, has_entropy",
    "row_loss bf16",
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
        "sweeps": 0,
    }


def wasteful_row(function: str) -> dict[str, object]:
    """A launch that takes the place of the plainest K3."""
    pointers = {"logits_ptr": "*bf16", "out_ptr": "*bf16"}
    changed = {
        "module": "wasteful_kernels",
        "function": function,
        "signature": pointers | {"vocab": "i32", "BLOCK": "constexpr"},
        "constexprs": {"BLOCK": 4096},
        "divisible_by_16": list(pointers),
    }
    return variant("row_grad bf16").launch(90) | changed


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", TOKEN_VARIANTS + ROW_VARIANTS)
def test_variants_keep_their_budget(name, arch):
    assert violations(entry(variant(name).launch(arch))) == []


@pytest.mark.parametrize(("name", "arch"), OTHER_ROW_VARIANTS)
def test_other_forms_of_row_kernels_keep_registers_and_wide_memory_instructions(name, arch):
    assert violations(entry(variant(name).launch(arch))) == []


def test_every_budget_is_that_of_a_role_or_of_a_variant():
    assert BUDGETS.keys() <= {variant.role for variant in VARIANTS} | {variant.name for variant in VARIANTS}


@pytest.mark.parametrize("arch", [100, "gfx942"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_other_targets_compile_with_wide_memory_instructions(name, arch):
    made = entry(variant(name).launch(arch))
    wide = sum(count for opcode, count in made["memory"].items() if opcode.endswith((".128", "dwordx4")))
    kinds = [made["signature"][argument] for argument in made["reads"] + made["writes"]]
    assert wide >= sum(kind in ("*fp32", "*bf16") for kind in kinds)
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
    assert made["bytes_per_element"] == 17
    assert made["roofline"].keys() == {"H100", "H200"}
    # 17 bytes a token through 4.8 TB/s
    at_least = 17e6 / DEVICES["H200"].bandwidth * 1e6
    assert made["roofline"]["H200"]["us_per_million_elements"] == pytest.approx(at_least, rel=1e-3)


@pytest.mark.parametrize(("name", "size"), [("row_stats bf16", 2), ("row_grad bf16", 4), ("row_loss bf16", 4)])
def test_bound_of_a_row_kernel_is_that_of_its_logits(name, size):
    """Read once, the gradient written once: the second sweep of K1K3 finds its row in the cache."""
    made = entry(variant(name).launch(90))
    assert made["bytes_per_element"] == size
    at_least = size * 1e6 / DEVICES["H200"].bandwidth * 1e6
    assert made["roofline"]["H200"]["us_per_million_elements"] == pytest.approx(at_least, rel=1e-2)


def test_masking_every_block_breaks_the_budget():
    found = violations(entry(wasteful("masked_kernel", block=1024)))
    assert len(found) == 2
    assert "0 LDG.E.128" in found[0]
    assert "0 STG.E.128" in found[1]


def test_a_giant_tile_breaks_the_budget():
    found = violations(entry(wasteful("giant_tile_kernel", block=1 << 15)))
    assert any("registers is" in sentence for sentence in found)


def test_masking_every_block_of_a_row_breaks_the_budget():
    made = entry(wasteful_row("masked_row_kernel"))
    assert violations(made) == ["row_grad bf16 on sm_90: 0 loops with LDG.E.128 where a row is walked 1 times"]
    assert made["sass_per_element"] is None


def test_a_second_exponential_of_each_logit_breaks_the_budget():
    found = violations(entry(wasteful_row("two_powers_row_kernel")))
    assert any("mufu_per_element is 2" in sentence for sentence in found)


LOAD = re.compile(r"(?P<before>.*) LDG\.E\.128 (?P<after>.*\n)")
DAMAGE = {
    "one more instruction a logit": (r"\g<0>" + 8 * "/*0000*/ FADD R0, R0, R0 ;\n", "sass_per_element is"),
    "a load in two halves": (2 * r"\g<before> LDG.E.64 \g<after>", "'LDG.E.64': 2"),
    "a spill": (r"\g<0>/*0000*/ STL [R1], R2 ;\n", "'STL': 1"),
}


def violations_of(monkeypatch, name: str, change: Callable[[str], str]) -> list[str]:
    """Of a variant whose machine code is changed before it is counted."""
    parse = sass.parse
    with monkeypatch.context() as patch:
        patch.setattr(sass, "parse", lambda text: parse(change(text)))
        return violations(entry(variant(name).launch(90)))


def damaged_at(index: int, replacement: str) -> Callable[[str], str]:
    """Changes one of the wide loads, counted from the top."""

    def change(text: str) -> str:
        match = list(LOAD.finditer(text))[index]
        return text[: match.start()] + match.expand(replacement) + text[match.end() :]

    return change


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("name", "loads"), [("row_stats bf16", 2), ("row_grad bf16", 2), ("row_loss bf16", 8)])
def test_a_worse_sweep_breaks_the_budget(monkeypatch, name, loads, damage):
    """Every wide load of the sweeps counts; the last block, which is not whole, has the same number and does not."""
    replacement, complaint = DAMAGE[damage]
    if damage.startswith("one more"):
        found = violations_of(monkeypatch, name, lambda text: LOAD.sub(replacement, text))
        assert len(found) == 1 and complaint in found[0]
        return
    found = [violations_of(monkeypatch, name, damaged_at(index, replacement)) for index in range(2 * loads)]
    assert sum(any(complaint in sentence for sentence in sentences) for sentences in found) == loads


@pytest.mark.parametrize("name", ["row_stats bf16", "row_grad bf16", "row_loss bf16"])
def test_sweeps_with_narrow_loads_break_the_budget(monkeypatch, name):
    found = violations_of(monkeypatch, name, lambda text: text.replace("LDG.E.128", "LDG.E.64"))
    assert len(found) == 1 and "0 loops with LDG.E.128 where" in found[0]
