"""Markdown of the performance page: tables and sentences from the measured rows, nothing written by hand."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench import cpu_times
from bench.vocabulary_workload import GEMMS, MIB, NAIVE, NAIVE_COMPILED
from bench.workload import BASELINE, BASELINE_COMPILED

Row = Mapping[str, Any]
# in the order in which tables show them
TOKEN_NAMES = {
    BASELINE: "published loss (FeynRL style), eager autograd",
    BASELINE_COMPILED: "published loss under `torch.compile`",
    cpu_times.PLAIN: "shortest loss, no metrics, eager autograd",
    cpu_times.PLAIN_COMPILED: "shortest loss under `torch.compile`",
    "eager": '`p3o_loss`, `backend="eager"`',
    "compiled": '`p3o_loss`, `backend="compiled"`',
    cpu_times.PER_SEQUENCE: "`p3o_loss_per_sequence`",
    cpu_times.P4O: "`p4o_loss`",
}
VOCABULARY_NAMES = {
    (GEMMS, "any"): "the three bare GEMMs",
    ("p3o", "given_context"): "{call}, e given",
    ("p3o", "micro_batch"): "{call}, e of the call",
    (NAIVE, "given_context"): "eager autograd over whole logits",
    (NAIVE_COMPILED, "given_context"): "the same, log-probs under `torch.compile`",
    ("liger_grpo", "any"): "`LigerFusedLinearGRPOLoss(compiled=False)`, GRPO",
    ("liger_grpo_compiled", "any"): "`LigerFusedLinearGRPOLoss()`, GRPO",
}
CALLS = {"from_logits": "`p3o_loss_from_logits`", "from_hidden": "`p3o_loss_from_hidden`"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def milliseconds(seconds: float) -> str:
    """Three digits, below 1,000: 0.456, 12.3, 2,410."""
    value = 1e3 * seconds
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def mebibytes(size: float) -> str:
    value = size / MIB
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def pick(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def distinct(rows: Iterable[Row], name: str) -> list[Any]:
    """Values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(row[name] for row in rows))


def seconds_of(rows: Sequence[Row], provider: str, **wanted: Any) -> float:
    (row,) = pick(rows, provider=provider, **wanted)
    return float(row["seconds"])


def token_table(rows: Sequence[Row], threads: int) -> str:
    """Milliseconds and how many times faster than the published loss, for each T; memory at the largest one."""
    found = pick(rows, table="token", threads=threads)
    sizes = distinct(found, "tokens")
    lines = []
    for provider in (name for name in TOKEN_NAMES if pick(found, provider=name)):
        cells = [TOKEN_NAMES[provider]]
        for tokens in sizes:
            at = pick(found, provider=provider, tokens=tokens)
            base = seconds_of(found, BASELINE, tokens=tokens)
            cells.append(f"{milliseconds(at[0]['seconds'])} ({base / at[0]['seconds']:.1f}x)" if at else "")
        peak = max(pick(found, provider=provider), key=lambda row: row["tokens"])
        lines.append([*cells, f"{peak['peak_bytes'] / peak['tokens']:.0f}"])
    return table([plural(threads, "thread"), *(f"T {tokens:,}" for tokens in sizes), "bytes a token"], lines)


def break_even(rows: Sequence[Row], threads: int) -> str:
    """From which measured T on each backend is faster than the published loss."""
    found = pick(rows, table="token", threads=threads)
    sizes = distinct(found, "tokens")
    parts = []
    for backend in (name for name in ("eager", "compiled") if pick(found, provider=name)):
        slower = [
            tokens
            for tokens in sizes
            if seconds_of(found, backend, tokens=tokens) > seconds_of(found, BASELINE, tokens=tokens)
        ]
        after = [tokens for tokens in sizes if not slower or tokens > max(slower)]
        parts.append(
            f'`backend="{backend}"` is faster than the published loss '
            + ("at every measured T" if not slower else f"from T {after[0]:,} on" if after else "at no measured T")
        )
    return f"With {plural(threads, 'thread')} {' and '.join(parts)}."


def variant_table(rows: Sequence[Row]) -> str:
    found = pick(rows, table="variants")
    threads = distinct(found, "threads")
    lines = []
    for provider in distinct(found, "provider"):
        cells = [TOKEN_NAMES[provider]]
        for count in threads:
            base, mine = (seconds_of(found, name, threads=count) for name in ("eager", provider))
            cells.append(f"{milliseconds(mine)} ({mine / base:.2f}x)")
        (peak,) = pick(found, provider=provider, threads=threads[0])
        lines.append([*cells, mebibytes(peak["peak_bytes"])])
    head = [f"T {found[0]['tokens']:,}", *(f"ms, {plural(count, 'thread')}" for count in threads), "peak extra MiB"]
    return table(head, lines)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows of one table from logits or hidden states, as ``VOCABULARY_NAMES`` lists them."""
    return [row for pair in VOCABULARY_NAMES for row in pick(rows, provider=pair[0], scope=pair[1])]


def vocabulary_table(rows: Sequence[Row], source: str, tokens: int, threads: int) -> str:
    """Milliseconds, over the bare GEMMs where there are some, over eager autograd, and memory."""
    found = pick(rows, table=source, tokens=tokens, threads=threads)
    gemms = pick(found, provider=GEMMS)
    naive = seconds_of(found, NAIVE)
    lines = []
    for row in in_order(found):
        name = VOCABULARY_NAMES[row["provider"], row["scope"]].format(call=CALLS[source])
        over = [f"{row['seconds'] / gemms[0]['seconds']:.2f}x"] if gemms else []
        memory = "" if row["provider"] == GEMMS else mebibytes(row["peak_bytes"])
        lines.append([name, milliseconds(row["seconds"]), *over, f"{row['seconds'] / naive:.2f}x", memory])
    over = ["of the GEMMs"] if gemms else []
    return table([f"T {tokens:,}, {plural(threads, 'thread')}", "ms", *over, "of eager", "peak extra MiB"], lines)


def vocabulary_tables(rows: Sequence[Row], source: str) -> list[str]:
    found = pick(rows, table=source)
    return [
        vocabulary_table(found, source, tokens, threads)
        for tokens in distinct(found, "tokens")
        for threads in distinct(pick(found, tokens=tokens), "threads")
    ]


def compact(rows: Sequence[Row]) -> str:
    """At most six rows for another page: the token loss, and the loss from hidden states, with one thread."""
    token = pick(rows, table="token", threads=1)
    tokens = cpu_times.MAIN_TOKENS if pick(token, tokens=cpu_times.MAIN_TOKENS) else token[0]["tokens"]
    token = pick(token, tokens=tokens)
    hidden = pick(rows, table="from_hidden", threads=1)
    hidden = pick(hidden, tokens=max(distinct(hidden, "tokens")))
    lines = []
    for provider in (BASELINE, "eager", "compiled"):
        for row in pick(token, provider=provider):
            share = f"{row['seconds'] / seconds_of(token, BASELINE):.2f}x of the published loss"
            name = f"token loss, T {tokens:,}: {TOKEN_NAMES[provider]}"
            lines.append([name, milliseconds(row["seconds"]), share, mebibytes(row["peak_bytes"])])
    for provider, scope in (("p3o", "given_context"), (NAIVE, "given_context"), ("liger_grpo", "any")):
        for row in pick(hidden, provider=provider, scope=scope):
            share = f"{row['seconds'] / seconds_of(hidden, GEMMS):.2f}x of the three bare GEMMs"
            name = VOCABULARY_NAMES[provider, scope].format(call=CALLS["from_hidden"])
            name = f"from hidden, T {row['tokens']:,}: {name}"
            lines.append([name, milliseconds(row["seconds"]), share, mebibytes(row["peak_bytes"])])
    return table(["forward and backward on one CPU thread", "ms", "time", "peak extra MiB"], lines)
