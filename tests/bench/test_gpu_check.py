"""The one command for a GPU machine: what it says without one, and what it makes of measurements."""

import json
import time

import pytest
import torch

from bench import gpu_check, gpu_report
from bench.gpu_report import Measurement

SIZES = {"vocab": 125_000, "tokens": 8000, "hidden": 1000}  # 1e9 logits, 6e12 flops in three products


def made_up(source, scope, provider="p3o", **values):
    return Measurement(source, scope, provider, **SIZES, **values)


MEASUREMENTS = [
    made_up("logits", "log_probs", seconds=1e-3, peak_bytes=2**20),
    made_up("logits", "given_context", seconds=2e-3, peak_bytes=2**31),
    made_up("logits", "micro_batch", seconds=2e-3, peak_bytes=2**31),
    made_up("logits", "any", "te_cross_entropy", problem="not installed"),
    made_up("hidden", "any", "three_gemms", seconds=10e-3, peak_bytes=0),
    made_up("hidden", "given_context", seconds=12.5e-3, peak_bytes=2**30),
]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().out == (
        "gpu_check: this Python's torch finds no CUDA device; run it on a GPU machine.\n"
    )


def test_shares_of_the_bound():
    """At 4 TB/s: 2e9 bytes in 1 ms are 2,000 GB/s, half of it; 4e9 and 6e9 in 2 ms half and three quarters."""
    found = gpu_report.rows(MEASUREMENTS, bandwidth=4e12)
    assert [row.get("gb_per_second") for row in found[:3]] == pytest.approx([2000.0, 2000.0, 3000.0])
    assert [row.get("share_of_bandwidth") for row in found[:3]] == pytest.approx([0.5, 0.5, 0.75])
    assert "share_of_bandwidth" not in found[3]


def test_rates_of_matrix_products():
    """6e12 flops in 10 ms are 600 TFLOP/s; in 12.5 ms 480, 80% of it."""
    found = gpu_report.rows(MEASUREMENTS, bandwidth=4e12)[4:]
    assert [row["tflop_per_second"] for row in found] == pytest.approx([600.0, 480.0])
    assert [row["share_of_gemms"] for row in found] == pytest.approx([1.0, 0.8])


def test_results_are_written(tmp_path):
    environment = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "1.2", "torch": "2.11.0", "date": "2026-01-02"}
    found = gpu_report.rows(MEASUREMENTS, bandwidth=4e12)
    paths = gpu_report.write(tmp_path / "results", environment, "9 passed in 1 s", found)
    assert [path.name for path in paths] == ["nvidia-h100-80gb-hbm3.json", "nvidia-h100-80gb-hbm3.md"]
    data = json.loads(paths[0].read_text())
    assert data["environment"] == environment
    assert data["measurements"][1]["share_of_bandwidth"] == 0.5
    text = paths[1].read_text()
    assert text.startswith("# NVIDIA H100 80GB HBM3\n")
    assert all(part in text for part in ("- torch: 2.11.0", "9 passed in 1 s", "not installed"))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert cells[2] == ["logits", "125,000", "log_probs", "p3o", "1.000", "2000", "50.0%", "", "", "1"]
    assert cells[7] == ["hidden", "125,000", "given_context", "p3o", "12.500", "", "", "480", "80.0%", "1024"]


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [("NVIDIA H200", 4.8e12), ("NVIDIA A100-SXM4-80GB", 2.039e12), ("NVIDIA H100 PCIe", None), ("NVIDIA H20", None)],
)
def test_bandwidth_of_the_data_sheet(name, bandwidth):
    """Only for a name that is known whole: a PCIe board of the same chip has another memory."""
    assert gpu_report.data_sheet_bandwidth(name) == bandwidth


@pytest.fixture
def on_a_cpu(monkeypatch):
    """``measure`` of a tiny batch on the CPU, without peers: all of it but CUDA's clock and memory counter."""
    make_batch = gpu_check.make_batch
    monkeypatch.setattr(gpu_check, "make_batch", lambda shape, source, device: make_batch(shape, source, "cpu"))
    monkeypatch.setattr(gpu_check, "peak_bytes", lambda step, device: 1)
    monkeypatch.setattr(gpu_check, "synchronized", time.perf_counter)
    monkeypatch.setattr(gpu_check.peers, "find_spec", lambda module: None)

    def measure(source, share):
        shape = gpu_check.CUDA[0]._replace(tokens=4, hidden=8, vocab=16, dtype=torch.float32, workspace_bytes=1024)
        return gpu_check.measure(source, shape, gpu_check.Budget(1000.0, clock=lambda: 0.0), share)

    return measure


@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_everything_is_measured(on_a_cpu, source):
    found = {(entry.provider, entry.scope): entry for entry in on_a_cpu(source, share=1000.0)}
    extra = "log_probs" if source == "logits" else gpu_check.LARGE_TILE
    scopes = ("given_context", "micro_batch")
    ours = {("p3o", scope) for scope in (*scopes, extra)}
    timed = ours | {(name, scope) for name in ("naive", "naive_compiled") for scope in scopes}
    timed |= {("three_gemms", "any")} if source == "hidden" else set()
    assert {key for key, entry in found.items() if entry.problem is None and entry.seconds > 0} == timed
    assert {entry.problem for key, entry in found.items() if key not in timed} == {"not installed"}


def test_out_of_time_is_reported(on_a_cpu):
    """Everything is listed: what is absent with its reason, the rest as skipped."""
    problems = {entry.provider: entry.problem for entry in on_a_cpu("hidden", share=10.0)}
    assert problems["p3o"] == problems["three_gemms"] == "skipped: no time left"
    assert problems["liger_grpo"] == "not installed"


def test_a_step_that_fails_is_a_line_of_the_report():
    def build():
        raise TypeError("an argument was renamed\nlong explanation")

    steps, peaks = {}, {}
    assert gpu_check._prepare("peer any", build, steps, peaks) == "failed: TypeError: an argument was renamed"
    assert steps == peaks == {}
