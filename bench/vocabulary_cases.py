"""Cases of the vocabulary benchmarks, and the table of what they measured."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench import peers
from bench.vocabulary_workload import CPU, CUDA, GEMMS, MIB, NAIVE, SMOKE, Shape

FILES = ("bench/bench_from_logits.py", "bench/bench_from_hidden.py")


def cases(source: str) -> list[tuple[str, str]]:
    """(provider, scope); absent providers too, which are skipped with their reason."""
    return [(provider, scope) for provider in peers.providers(source) for scope in peers.scopes(provider)]


def shapes(device: str, smoke: bool) -> Sequence[Shape]:
    return (SMOKE,) if smoke else CUDA if device == "cuda" else (CPU,)


def read(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each measurement, in the order in which they ran."""
    return [benchmark["extra_info"] | {"seconds": benchmark["stats"]["median"]} for benchmark in report["benchmarks"]]


def _ratio(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], provider: str) -> float:
    """Time of ``provider`` on the same input and, where both know one, in the same scope, over that of ``row``."""
    for other in rows:
        same = all(other[name] == row[name] for name in ("source", "vocab"))
        if same and other["provider"] == provider and (other["scope"] == row["scope"] or provider == GEMMS):
            return float(other["seconds"] / row["seconds"])
    return math.nan


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        f"{'from':8}{'V':>8}  {'scope':14}{'provider':21}{'loss':14}{'median ms':>10}{'speed-up':>10}"
        f"{'of GEMMs':>10}{'peak MiB':>10}"
    ]
    for row in rows:
        speedup, share = _ratio(rows, row, NAIVE), _ratio(rows, row, GEMMS)
        lines.append(
            f"{row['source']:8}{row['vocab']:8d}  {row['scope']:14}{row['provider']:21}{row['loss']:14}"
            f"{1e3 * row['seconds']:10.1f}{'-' if math.isnan(speedup) else f'{speedup:.2f}x':>10}"
            f"{'-' if math.isnan(share) else f'{share:.0%}':>10}{row['peak_mib']:10.1f}"
        )
    return lines


def legend(device: str) -> list[str]:
    """What the columns mean, and who is missing."""
    return [
        f"speed-up: against {NAIVE} in the same scope; of GEMMs: time of the bare matrix products over this one's",
        "peak MiB: gradients included. GRPO and cross-entropy: same products and vocabulary, other loss of a token",
        *(f"not measured: {line}" for line in peers.absences(device)),
    ]


def loss_name(provider: str) -> str:
    """Which loss a provider computes."""
    peer = peers.PEERS.get(provider)
    return peer.loss if peer else "none" if provider == GEMMS else "P3O"


def info(source: str, shape: Shape, provider: str, scope: str, peak: int) -> dict[str, Any]:
    """What is recorded beside the time."""
    return {
        "source": source,
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "vocab": shape.vocab,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "provider": provider,
        "scope": scope,
        "loss": loss_name(provider),
        "peak_mib": peak / MIB,
    }
