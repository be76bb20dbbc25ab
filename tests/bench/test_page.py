"""The performance page says what its data say, and the committed page is what the committed data render to."""

import json

import pytest

from bench import gpu_static, page, page_tables, page_text, scaling, step_phases
from bench.budgets import BUDGETS
from bench.vocabulary_workload import MIB

CANDIDATES = {"grpo": (1.0, 0.0, 0.0, 6.0, 1.0, 1.0, 1.0), "p3o step, reuse": (1.0, 4.0, 0.5, 6.0, 1.0, 1.0, 1.5)}


def token(provider, tokens, seconds, threads=1, peak=0, table="token"):
    row = {"table": table, "threads": threads, "tokens": tokens, "provider": provider}
    return row | {"seconds": seconds, "peak_bytes": peak}


def vocabulary(source, provider, scope, seconds, peak=MIB):
    sizes = {"tokens": 64, "hidden": 32, "vocab": 1024, "workspace_bytes": 2 * MIB}
    row = {"table": source, "threads": 1, "provider": provider, "scope": scope, "seconds": seconds, "peak_bytes": peak}
    return row | sizes


ROWS = [
    token("feynrl_style", 1000, 1e-3),
    token("eager", 1000, 2e-3),
    token("compiled", 1000, 4e-3),
    token("feynrl_style", 4000, 8e-3, peak=160_000),
    token("eager", 4000, 16e-3, peak=80_000),
    token("compiled", 4000, 2e-3, peak=40_000),
    token("eager", 4000, 8e-3, table="variants"),
    token("p4o_loss", 4000, 12e-3, peak=3 * MIB, table="variants"),
    vocabulary("from_logits", "p3o", "given_context", 0.5),
    vocabulary("from_logits", "naive", "given_context", 1.0),
    vocabulary("from_hidden", "three_gemms", "any", 2.0),
    vocabulary("from_hidden", "p3o", "given_context", 2.2, peak=100 * MIB),
    vocabulary("from_hidden", "naive", "given_context", 4.0, peak=768 * MIB),
]
KERNEL = {
    "kernel": "row_loss bf16",
    "role": "K1K3",
    "memory": {"LDG.E.128": 8, "STG.E.128": 4},
    "arch": 90,
    "registers": 49,
    "spill_bytes": 16,
    "sass_per_element": 12.25,
    "mufu_per_element": 2.125,
    "bytes_per_element": 4,
    "roofline": {"H100": {"us_per_million_elements": 1.25, "limited_by": "memory"}},
}
# its hot loop was not found, so nothing is known of an element
OTHER = {"arch": 80, "registers": 58, "spill_bytes": 0, "sass_per_element": None, "mufu_per_element": None}
OTHER = KERNEL | OTHER | {"memory": {}, "roofline": {}}
DATA = {
    "environment": {
        "date": "2026-01-02",
        "cpu": "some CPU",
        "cores": 2,
        "commit": "0123456789",
        "versions": {"torch": "2.13.0", "liger-kernel": "not installed"},
    },
    "cpu": {"rows": ROWS, "absent": ["liger_grpo (liger_kernel): not installed"]},
    "train_step": {
        "setting": {
            "layers": 4,
            "hidden": 256,
            "vocab": 8192,
            "sequences": 8,
            "tokens_per_sequence": 256,
            "sequences_per_micro_batch": 4,
            "ranks": 2,
        },
        "rows": [
            {"candidate": name, "seconds": dict(zip(step_phases.PHASES, seconds, strict=True))}
            for name, seconds in CANDIDATES.items()
        ],
    },
    "kernels": [OTHER, KERNEL],
}
RESULT = {
    "environment": {
        "gpu": "NVIDIA H100 80GB HBM3",
        "date": "2026-03-04",
        "driver": "1.2",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "bandwidth": "3.35 TB/s (data sheet)",
        "command": "python -m bench.gpu_check",
    },
    "measurements": [
        {
            "source": "logits",
            "vocab": 128_256,
            "scope": "log_probs",
            "provider": "p3o",
            "problem": None,
            "seconds": 1e-3,
        }
    ],
}


def cells(text, begin):
    """Cells of the lines of tables that begin with ``begin``."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {begin} |")]
    return [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]


@pytest.fixture(scope="module")
def text():
    return page_text.page(DATA, [])


def test_token_times(text):
    """8 ms against 2 ms is 4 times faster; 40,000 bytes are 10 for each of 4,000 tokens."""
    name = page_tables.TOKEN_NAMES["compiled"]
    assert cells(text, name) == [["4.00 (0.2x)", "2.00 (4.0x)", "10"]]
    assert (
        'With 1 thread `backend="eager"` is faster than the published loss at no measured T and `backend="compiled"` '
        "is faster than the published loss from T 4,000 on." in text
    )


def test_variants(text):
    assert cells(text, "`p4o_loss`") == [["12.0 (1.50x)", "3.0"]]


def test_vocabulary_times(text):
    """2.2 s are 1.1 times the GEMMs and 0.55 of eager; from logits there are no GEMMs to compare with."""
    assert cells(text, "`p3o_loss_from_hidden`, e given") == [["2,200", "1.10x", "0.55x", "100"]]
    assert cells(text, "`p3o_loss_from_logits`, e given") == [["500", "0.50x", "1.0"]]
    assert cells(text, "the three bare GEMMs") == [["2,000", "1.00x", "0.50x", ""]]
    assert "Not measured here: liger_grpo (liger_kernel): not installed." in text


def test_step_phases(text):
    """15 s of which 4 are a pass that runs anyway: 11 over 10."""
    assert cells(text, "grpo")[0][-2:] == ["10,000", "1.00x"]
    found = cells(text, "p3o step, reuse")[0]
    assert found == ["1000.0", "4000.0", "500.0", "6000.0", "1000.0", "1000.0", "1500.0", "15,000", "1.10x"]


def test_without_megatron_it_says_so():
    text = page_text.page(DATA | {"train_step": {"problem": "megatron not installed"}}, [])
    assert "Not measured here: megatron not installed." in text
    assert "performance_step.png" not in text


def test_kernels_and_their_bound(text):
    """8,192 x 151,936 logits at 1.25 us for a million are 1.56 ms; no other GPU was compiled for."""
    budget = BUDGETS["row_loss bf16"].registers
    made = ["loss and gradient of the logits, e given", f"58 / 49 ({budget})", "0 / 16", "- / 12.25", "- / 2.12"]
    found = cells(text, "`row_loss bf16`")
    assert found[0] == [*made, "sm_90: 8 LDG.E.128, 4 STG.E.128"]
    assert found[1] == ["4", "", "1.25 memory", "", ""]
    assert cells(text, "loss and gradient, e given") == [["", "1.56", "", ""]]
    assert cells(text, "log-probs alone (pre-pass)") == [["", "", "", ""]]


def test_bounds_of_launches_add_up():
    """1.25 and 2.5 us for a million of 4 million logits; without one of the two there is no bound."""
    stats = KERNEL | {"kernel": "row_stats bf16"}
    slower = {"H100": {"us_per_million_elements": 2.5, "limited_by": "memory"}}
    both = ("row_stats bf16", "row_grad bf16")
    rows = [stats, KERNEL | {"kernel": "row_grad bf16", "roofline": slower}]
    assert gpu_static.bound_seconds(rows, both, "H100", 4_000_000) == pytest.approx(15e-6)
    assert gpu_static.bound_seconds([stats], both, "H100", 4_000_000) is None


def test_gpu_measurements_are_shown_or_missed(text):
    assert "None yet. `make gpu-check`" in text
    measured = page_text.page(DATA, [RESULT])
    assert "NVIDIA H100 80GB HBM3, 2026-03-04, driver 1.2" in measured
    assert "| log_probs | p3o" in measured and "None yet" not in measured


def test_model_is_labelled_and_explained(text):
    section = text.partition("## Up to 1,024 GPUs: a model, not a measurement")[2]
    assert "```text\nall-reduce of b bytes over n ranks" in section
    cluster = scaling.clusters("4B", 512)
    (found,) = (row for row in cells(section, "4B") if row[0] == "512")
    assert found[1:3] == ["256", f"{sum(scaling.step_seconds(cluster, scaling.GRPO).values()):.2f}"]
    assert found[-1] == f"{100 * scaling.overhead(cluster, 'prepass'):.1f}%"
    assert "< 0.01%" in section


def test_compact_table():
    found = page_tables.compact(ROWS).splitlines()
    assert 3 <= len(found) - 2 <= 6
    assert cells("\n".join(found), f"token loss, T 1,000: {page_tables.TOKEN_NAMES['eager']}") == [
        ["2.00", "2.00x of the published loss", "0.00"]
    ]
    assert found[-2].endswith("| 2,200 | 1.10x of the three bare GEMMs | 100 |")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1.234e-4, "0.123"), (2.344e-3, "2.34"), (0.0123, "12.3"), (2.4104, "2,410")]
)
def test_milliseconds(seconds, shown):
    assert page_tables.milliseconds(seconds) == shown


def test_pictures(tmp_path):
    page.draw(DATA, tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {f"performance_{name}.png" for name in page_text.IMAGES}
    assert all(0 < size < 120_000 for size in sizes.values())


def test_pictures_without_a_step(tmp_path):
    page.draw(DATA | {"train_step": {"problem": "megatron not installed"}}, tmp_path)
    assert not (tmp_path / "performance_step.png").exists()


@pytest.mark.host_only
def test_smoke_run_renders_again_to_the_same(tmp_path, monkeypatch, capsys):
    """Nothing is compiled but one kernel; Liger is absent, and the page says so."""
    monkeypatch.setattr("bench.peers.find_spec", lambda module: None)
    assert page.main(["--smoke", "--output", str(tmp_path)]) == 0
    written = (tmp_path / page.PAGE).read_text()
    assert "liger_grpo (liger_kernel): not installed" in written
    assert "LigerFusedLinearGRPOLoss" not in written
    assert capsys.readouterr().out.startswith("| forward and backward on one CPU thread |")
    (tmp_path / page.PAGE).unlink()
    assert page.main(["--page-only", "--output", str(tmp_path)]) == 0
    assert (tmp_path / page.PAGE).read_text() == written


def test_page_only_needs_data(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        page.main(["--page-only", "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "run without --page-only first" in capsys.readouterr().err


def test_a_part_that_fails_writes_nothing(tmp_path, monkeypatch, capsys):
    def fail():
        return page.run_part(["bench.cpu_times", "--threads=none"], 1)

    monkeypatch.setattr(page, "measure", fail)
    assert page.main(["--output", str(tmp_path)]) == 1
    assert "invalid int value: 'none'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_committed_page_is_what_its_data_render_to():
    data = json.loads((page.DOCS / page.DATA).read_text(encoding="utf-8"))
    assert (page.DOCS / page.PAGE).read_text(encoding="utf-8") == page_text.page(data, page.gpu_results())
    for name in page_text.IMAGES:
        assert (page.DOCS / "images" / f"performance_{name}.png").exists()
    assert data["train_step"].get("rows"), "measure where megatron-core is installed"
    assert {row["threads"] for row in data["cpu"]["rows"]} == set(page.THREADS)
