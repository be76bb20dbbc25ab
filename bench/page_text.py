"""The performance page as Markdown, from the measured data and the files of ``bench/results`` alone."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from bench import gpu_report, gpu_static, scaling, vocabulary_workload
from bench.page_tables import (
    BASELINE,
    Row,
    break_even,
    distinct,
    mebibytes,
    pick,
    plural,
    table,
    token_table,
    variant_table,
    vocabulary_tables,
)
from bench.roofline import DEVICES
from bench.step_phases import PHASES

SHOWN_GPUS = {"4B": (8, 16, 32, 64, 128, 256, 512, 1024), "70B": (32, 64, 128, 256, 512, 1024)}
IMAGES = {
    "token_loss": "Times faster than the published loss against T, one panel for each number of threads",
    "from_hidden": "Bars: time over three bare matrix products, and peak memory, of losses from hidden states",
    "step": "Stacked bars: phases of an optimizer step with GRPO and with each source of e",
    "scaling": "Modelled extra time of P3O over GRPO in percent against the number of GPUs",
}
PHASE_NOTES = (
    "Packing makes micro-batches of samples; gradients is Megatron's finalizer (sum over replicas, division by the "
    "token count); sync takes full weights out of Megatron and puts them into an engine of the same process. The "
    "log-prob pass is the trainer's own: where one runs anyway, `reuse` costs nothing but its line under pre-pass."
)


def _image(name: str) -> str:
    return f"![{IMAGES[name]}](images/performance_{name}.png)"


def _head(environment: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return [
        "# Performance",
        "This page is written by `make bench` (`python -m bench.page`) from "
        "[data/performance.json](data/performance.json); `python -m bench.page --page-only` renders it again.",
        f"Measured {environment['date']} on {environment['cpu']}, {plural(environment['cores'], 'core')}, "
        f"commit {environment['commit']}; {versions}.",
        "On a CPU everything is measured; for GPUs there is what the compiler makes, a bound and a model, each under "
        "its own heading. Ratios of short steps move by 20% from run to run, with the allocator above all. "
        "`python -m bench.run` measures other sizes with pytest-benchmark; options such as `--max-tokens 4194304` "
        "are handed on to pytest.",
    ]


def _token(rows: Sequence[Row]) -> list[str]:
    threads = distinct(pick(rows, table="token"), "threads")
    return [
        "## Token loss on a CPU",
        "Forward and backward from log-probs, float32, a tenth of the tokens masked, e of the call: median "
        "milliseconds, in brackets how many times faster than the published loss of the first line. That one is "
        f"`{BASELINE}_loss` of `bench/baselines.py`, the operations of FeynRL's `compute_policy_loss` in our own "
        "writing. The shortest loss has no metrics and checks nothing. `triton` needs a GPU, and Liger has no loss "
        "from log-probs. Times with one thread are CPU times. The last column is peak extra memory at the largest T.",
        *(token_table(rows, count) for count in threads),
        " ".join(break_even(rows, count) for count in threads),
        _image("token_loss"),
        'Two anchors, and an e for each sequence; in brackets the time over that of `p3o_loss` with `backend="eager"`:',
        variant_table(rows),
    ]


def _vocabulary(rows: Sequence[Row], absent: Sequence[str]) -> list[str]:
    hidden = pick(rows, table="from_hidden")[0]
    sizes = f"V {hidden['vocab']:,}, float32, all tokens valid"
    return [
        "## Loss from logits on a CPU",
        f"Forward and backward, {sizes}. Peak extra memory has the gradient of the logits.",
        *vocabulary_tables(rows, "from_logits"),
        "## Loss from hidden states on a CPU",
        f"Forward and backward from hidden states of width {hidden['hidden']} to the gradients of hidden states and "
        f"weight, {sizes}, workspace {mebibytes(hidden['workspace_bytes'])} MiB. The bare GEMMs are X W^T, dz W and "
        "dz^T X into memory allocated before. GRPO is another loss of a token over the same products. With e of the "
        "call logits are computed twice, which makes four products.",
        *vocabulary_tables(rows, "from_hidden"),
        _image("from_hidden"),
        "Not measured here: " + "; ".join(absent) + "." if absent else "",
    ]


def _each(rows: Sequence[Row], name: str, form: str) -> str:
    """A value on every architecture."""
    return " / ".join("-" if row[name] is None else format(row[name], form) for row in rows)


def _static(rows: Sequence[Row]) -> list[str]:
    archs = "/".join(str(arch) for arch in distinct(rows, "arch"))
    lines, bounds = [], []
    for kernel in distinct(rows, "kernel"):
        made = pick(rows, kernel=kernel)
        middle = made[len(made) // 2]
        memory = ", ".join(f"{count} {name}" for name, count in middle["memory"].items())
        registers = f"{_each(made, 'registers', 'd')} ({gpu_static.register_budget(middle)})"
        counts = [_each(made, name, ".2f") for name in ("sass_per_element", "mufu_per_element")]
        named = [f"`{kernel}`", gpu_static.KERNELS[kernel]]
        lines.append([*named, registers, _each(made, "spill_bytes", "d"), *counts, f"sm_{middle['arch']}: {memory}"])
        found = {gpu: bound for row in made for gpu, bound in row["roofline"].items()}
        cells = [
            f"{found[gpu]['us_per_million_elements']:.2f} {found[gpu]['limited_by']}" if gpu in found else ""
            for gpu in DEVICES
        ]
        bounds.append([f"`{kernel}`", str(middle["bytes_per_element"]), *cells])
    shape = vocabulary_workload.CUDA[-1]
    paths = [
        [name, *(_path_bound(rows, kernels, gpu, shape.tokens * shape.vocab) for gpu in DEVICES)]
        for name, kernels in gpu_static.PATHS.items()
    ]
    head = ["kernel", "for", "registers (budget)", "spilled bytes", "SASS", "MUFU", "memory instructions of a block"]
    return [
        "## Kernels for GPUs: what the compiler makes, and a bound",
        f"Compiled without a GPU for sm_{archs}, in this order; instructions are those of a thread for an element, "
        "which is a logit, or a token in the kernels over tokens. A vector is 128 bits wide where the name of the "
        "instruction says so; narrower are the mask, one byte a token, and single numbers. Budgets are binding on "
        "sm_80 and sm_90. "
        "`make kernel-report` has every variant, `bench/budgets.py` every budget.",
        table(head, lines),
        "**Bound, not a measurement:** microseconds for a million elements, the largest of bytes over bandwidth, "
        "instructions over issue rate, and float64 and special instructions over theirs, and which one it is "
        "(`bench/roofline.py` has the rates).",
        table(["kernel", "bytes an element", *DEVICES], bounds),
        f"The same bound in ms for T {shape.tokens:,}, V {shape.vocab:,}, bfloat16 logits, launches added up:",
        table(["from logits", *DEVICES], paths),
    ]


def _path_bound(rows: Sequence[Row], kernels: Sequence[str], gpu: str, elements: int) -> str:
    seconds = gpu_static.bound_seconds(rows, kernels, gpu, elements)
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def _gpu(results: Sequence[Mapping[str, Any]]) -> list[str]:
    if not results:
        return [
            "## Measured on GPUs",
            "None yet. `make gpu-check` on a machine with a GPU runs the tests there, measures at real sizes in 10 "
            "minutes and writes its figures into [bench/results](../bench/results/README.md), from where this page "
            "takes them.",
        ]
    parts = ["## Measured on GPUs"]
    for result in results:
        facts = result["environment"]
        parts += [
            f"{facts['gpu']}, {facts['date']}, driver {facts['driver']}, torch {facts['torch']}, triton "
            f"{facts['triton']}, bandwidth {facts['bandwidth']}; `{facts['command']}`.",
            "\n".join(gpu_report.table(result["measurements"])),
        ]
    return parts


def _step(data: Mapping[str, Any]) -> list[str]:
    heading = "## A training step of the Megatron layer on a CPU"
    if "rows" not in data:
        return [heading, f"Not measured here: {data['problem']}."]
    rows, setting = data["rows"], data["setting"]
    base = sum(rows[0]["seconds"].values())
    lines = []
    for row in rows:
        total = sum(row["seconds"].values())
        own = row["seconds"]["log-prob pass"]
        cells = [f"{1e3 * row['seconds'][phase]:.1f}" for phase in PHASES]
        lines.append([row["candidate"], *cells, f"{1e3 * total:,.0f}", f"{(total - own) / base:.2f}x"])
    return [
        heading,
        f"{setting['layers']} layers of {setting['hidden']}, vocabulary {setting['vocab']:,}, float32; "
        f"{setting['sequences']} sequences of {setting['tokens_per_sequence']} tokens, "
        f"{setting['sequences_per_micro_batch']} in a micro-batch, on {plural(setting['ranks'], 'replica')} of one "
        "thread each over Gloo (`bench/step_phases.py`). Milliseconds on the clock, medians by phase.",
        table(["", *PHASES, "total", "of GRPO, without log-prob pass"], lines),
        PHASE_NOTES,
        _image("step"),
    ]


def scaling_clusters() -> dict[str, list[scaling.Cluster]]:
    return {model: [scaling.clusters(model, gpus) for gpus in counts] for model, counts in SHOWN_GPUS.items()}


def _formulas() -> list[str]:
    """The docstring of the model: its indented lines as code blocks."""
    parts: list[str] = []
    for paragraph in inspect.getdoc(scaling).split("\n\n")[1:]:
        indented = paragraph.startswith("    ")
        parts.append(f"```text\n{inspect.cleandoc(paragraph)}\n```" if indented else paragraph.replace("\n", " "))
    return parts


def _assumptions() -> list[str]:
    gpus = [
        [
            name,
            f"{gpu.flops / 1e12:,.0f}",
            f"{gpu.memory / 1e12:.2f}",
            f"{gpu.link / 1e9:.0f}",
            f"{gpu.network / 1e9:.0f}",
        ]
        for name, gpu in scaling.GPUS.items()
    ]
    assumed = scaling.Assumptions()
    values = [
        [field.name, f"{getattr(assumed, field.name):g}", scaling.MEANINGS[field.name]] for field in fields(assumed)
    ]
    models = [
        [
            name,
            f"{model.parameters / 1e9:.1f}",
            f"{model.layers}, {model.hidden:,}, {model.heads}/{model.kv_heads} x {model.head_size}, {model.ffn:,}, "
            f"{model.vocab:,}",
            f"TP {scaling.LAYOUTS[name].tensor}, PP {scaling.LAYOUTS[name].pipeline}, CP "
            f"{scaling.LAYOUTS[name].context}",
        ]
        for name, model in scaling.MODELS.items()
    ]
    return [
        "Rates of NVIDIA's data sheets (A100 80 GB, H100, H200, B200, all SXM), each way where a link has two:",
        table(["GPU", "dense bf16 TFLOP/s", "memory TB/s", "NVLink GB/s", "network GB/s"], gpus),
        "What no data sheet says is assumed, not measured:",
        table(["assumption", "value", "meaning"], values),
        "Models, in sizes of the published configurations of Qwen3-4B and Llama-3-70B:",
        table(["model", "billion parameters", "layers, width, heads, feed-forward, vocabulary", "layout"], models),
    ]


def _percent(share: float) -> str:
    """A model is not good for more digits."""
    return "< 0.01%" if share < 1e-4 else f"{share:.2%}" if share < 0.01 else f"{share:.1%}"


def _scaling() -> list[str]:
    lines = []
    for model, found in scaling_clusters().items():
        for cluster in found:
            parts = scaling.step_seconds(cluster, scaling.GRPO)
            total = sum(parts.values())
            cells = [_percent(scaling.overhead(cluster, source)) for source in scaling.SOURCES]
            links = parts["links of the model"] + parts["gradients"]
            shares = [f"{links / total:.0%}", f"{parts['loss'] / total:.2%}"]
            lines.append([model, f"{cluster.layout.gpus:,}", f"{cluster.layout.data}", f"{total:.2f}", *shares, *cells])
    batch = scaling.BATCH
    return [
        "## Up to 1,024 GPUs: a model, not a measurement",
        *_formulas(),
        *_assumptions(),
        f"A step of {batch.sequences:,} sequences of {batch.length:,} tokens on H100, the same step on all numbers of "
        "GPUs; percentages are what P3O adds to a step of GRPO.",
        table(
            ["model", "GPUs", "replicas", "GRPO, s", "of it links", "of it loss", *scaling.SOURCES],
            lines,
        ),
        _image("scaling"),
        "`python -m bench.scaling --help` has other models, GPUs and sizes of the groups.",
    ]


def page(data: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """The whole page."""
    rows = data["cpu"]["rows"]
    parts = [
        *_head(data["environment"]),
        *_token(rows),
        *_vocabulary(rows, data["cpu"]["absent"]),
        *_step(data["train_step"]),
        *_gpu(results),
        *_static(data["kernels"]),
        *_scaling(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
