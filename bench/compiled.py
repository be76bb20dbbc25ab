"""Compiles one kernel launch for a GPU that need not be there, and reads what came out.

A launch is a plain dict, as ``Variant.launch`` makes it and as ``build/kernel_report.json`` stores it. The
disassemblers for NVIDIA come with Triton; for AMD the assembly text says enough.
"""

import importlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from bench import sass

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_NVIDIA_MEMORY = re.compile(r"(?:LDG|STG|LDL|STL|LD|ST|ATOM|ATOMG|RED)(?:\.|$)")
_AMD_MEMORY = re.compile(r"^\s+((?:global|buffer|flat|scratch)_(?:load|store|atomic)_\w+)", re.MULTILINE)
_UNITS = {
    "sass": re.compile(""),
    "fp64": re.compile(r"D(?:ADD|MUL|FMA|SETP|MNMX)\b"),
    "mufu": re.compile(r"MUFU\b"),
    "conversion": re.compile(r"(?:F2F|F2I|I2F)\b.*64"),
}


def build(launch: Mapping[str, Any]) -> CompiledKernel:
    """Compiles ``launch``; Triton's cache answers when it has been compiled before."""
    kernel = getattr(importlib.import_module(launch["module"]), launch["function"])
    position = {name: index for index, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        dict(launch["signature"]),
        {(position[name],): value for name, value in launch["constexprs"].items()},
        {(position[name],): [["tt.divisibility", 16]] for name in launch["divisible_by_16"]},
    )
    arch = launch["arch"]
    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    options = {"num_warps": launch["num_warps"], "num_stages": launch["num_stages"]}
    return triton.compile(source, target=target, options=options)


def inspect(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Registers, spilled bytes and memory instructions of one launch; on NVIDIA also instructions per element."""
    assembly = build(launch).asm
    if isinstance(launch["arch"], str):
        return _inspect_amd(assembly["amdgcn"])
    return _inspect_nvidia(assembly["cubin"], launch)


def _inspect_amd(text: str) -> dict[str, Any]:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))

    return {
        "registers": number("vgpr_count"),
        "spill_bytes": number("private_segment_fixed_size"),
        "sgpr_spills": number("sgpr_spill_count"),
        "memory": _counted(_AMD_MEMORY.findall(text)),
    }


def _inspect_nvidia(cubin: bytes, launch: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "-res-usage", path)
        code = sass.parse(_run("nvdisasm", "-c", path))
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return {
        "registers": registers,
        "spill_bytes": stack,  # no kernel has a local array, so its stack frame is what was spilled
        "memory": _memory(code),
        **_per_element(code, launch),
    }


def _per_element(code: list[sass.Instruction], launch: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``_block``: for a token, or for a logit, summed over the sweeps of its row; nothing where that is empty."""
    path, hot_loops = _block(code, launch)
    counts = {unit: sum(bool(regex.match(entry.opcode)) for entry in path) for unit, regex in _UNITS.items()}
    elements = launch["block"] / (32 * launch["num_warps"])
    per_element = {f"{unit}_per_element": count / elements if path else None for unit, count in counts.items()}
    return per_element | {"block_memory": _memory(path), "hot_loops": hot_loops}


def _block(code: list[sass.Instruction], launch: Mapping[str, Any]) -> tuple[list[sass.Instruction], int]:
    """What a thread executes for a whole block, and the number of hot loops.

    Empty for a launch that reads sums only, and where hot loops do not match the sweeps: a part would look cheap.
    """
    if not launch["sweeps"]:
        return sass.block_path(code) if launch["reads"] else [], 0
    hot_loops = sass.hot_loops(code)
    if len(hot_loops) != launch["sweeps"]:
        return [], len(hot_loops)
    return [instruction for loop in hot_loops for instruction in loop], len(hot_loops)


def _memory(code: Iterable[sass.Instruction]) -> dict[str, int]:
    return _counted(entry.opcode for entry in code if _NVIDIA_MEMORY.match(entry.opcode))


def _counted(opcodes: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(opcodes).items()))


def _run(tool: str, *arguments: object) -> str:
    command = [str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
