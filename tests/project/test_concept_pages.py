"""The concept pages say what the code does: constants, names of metrics, figures and pictures are held against it."""

import dataclasses
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import p3o_kernels
from docs.make import ess_picture, numerics, numerics_cases, packing_pictures
from docs.make.pictures import PICTURES
from docs.make.style import IMAGES
from p3o_kernels._summary import KL_MODES as KERNEL_MODES
from p3o_train import refusals
from p3o_train.config import TrainConfig
from p3o_train.mirrors import mirrored
from p3o_train.objective import Objective
from p3o_train.sinks import FILE_NAME, open_sinks, read_jsonl
from p3o_train.types import PackedBatch
from tests.megatron.topologies import NEEDS_MEGATRON

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("p3o", "p3o_zh", "packing", "metrics")}
CONSTANTS = dict(re.findall(r"^\| `(p3o_\w+\.[\w.]+)` \| (\S+) \|", numerics.PAGE.read_text(encoding="utf-8"), re.M))


def first_cells(text: str) -> list[str]:
    """What the first column of every table has in backticks."""
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


# numerics.md


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_has_the_value_on_the_page(name):
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    assert float(CONSTANTS[name]) == getattr(value, "value", value)


def test_every_float_constant_of_the_kernels_is_on_the_page():
    listed = {name.rpartition(".")[2] for name in CONSTANTS}
    missing = []
    for module in pkgutil.iter_modules(p3o_kernels.__path__):
        for name, value in vars(importlib.import_module(f"p3o_kernels.{module.name}")).items():
            if name.isupper() and isinstance(getattr(value, "value", value), float) and name not in listed:
                missing.append(f"{module.name}.{name}")
    assert len(CONSTANTS) >= 25 and missing == []


def test_the_numerics_page_is_the_one_that_its_data_make():
    facts, lines = numerics.read_data()
    assert numerics.page(facts, lines) == numerics.PAGE.read_text(encoding="utf-8")
    beyond = [line for line in lines if line.eager > line.allowed or (line.interpreted > line.allowed)]
    assert all(line.is_artefact and line.eager <= line.allowed for line in beyond)


def test_errors_are_still_within_what_the_page_allows():
    rows = numerics_cases.measure()
    assert [row[:3] for row in rows] == [line[:3] for line in numerics.read_data()[1]]
    assert [row for row in rows if row.ours > row.allowed] == []
    assert all(row.pytorch > 0 or row.quantity == "e" for row in rows), "an error of 0 compares the truth with itself"


# pictures


def test_the_picture_of_e_shows_the_equations():
    for column in ess_picture.columns():
        ratios, grid = column.ratios, column.grid.double()
        e = (ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())).item()
        # the log-ratio is a difference of two float32 numbers near -2
        assert abs(column.ess - e) < 1e-6
        torch.testing.assert_close(column.weight.double(), grid.clamp(max=e), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(column.pull.double(), (1 - e) * (1 - 1 / grid), rtol=1e-5, atol=2e-6)


def test_the_packing_picture_shows_every_token_once():
    made = packing_pictures.batches()
    tokens = [packing_pictures.token_name(token) for batch in made for token in batch.tokens.tolist()]
    names = [f"{name}{place}" for name, length, _ in packing_pictures.SEQUENCES for place in range(length)]
    assert sorted(token for token in tokens if token[0] in "ab") == sorted(names)
    counts = [batch.num_tokens for batch in made]
    assert sum(counts) == sum(response for _, _, response in packing_pictures.SEQUENCES)
    assert "{} on rank\n0, {} on rank 1.".format(*counts) in TEXT["packing"]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_one_that_its_code_draws(name):
    """By the text in it, which does not depend on the version of matplotlib; run python -m docs.make.pictures."""
    file = io.StringIO()
    PICTURES[name]().savefig(file, format="svg")
    stored = (IMAGES / name).read_text(encoding="utf-8")
    assert texts(file.getvalue()) == texts(stored) != []
    assert len(stored) < 120_000


def texts(svg: str) -> list[str]:
    return re.findall(r"<!-- (.*?) -->", svg, re.DOTALL)


# p3o.md, p3o_zh.md and packing.md


def test_both_languages_have_the_same_blocks_and_pictures():
    def skeleton(text):
        rows = [line.count(" | ") for line in text.splitlines() if line.startswith("|")]
        return re.findall(r"```.*?```|\]\(images/[^)]*\)", text, re.DOTALL), rows, len(re.findall(r"^## ", text, re.M))

    assert skeleton(TEXT["p3o"]) == skeleton(TEXT["p3o_zh"])
    assert len(skeleton(TEXT["p3o"])[0]) == 12


@pytest.mark.parametrize("name", ["p3o", "p3o_zh"])
def test_every_kl_mode_is_explained(name):
    assert {f"`{mode}`" for mode in KERNEL_MODES} <= set(re.findall(r"`\w+`", TEXT[name]))
    assert set(refusals.KL_MODES) - set(KERNEL_MODES) <= {"off"} and "`--p3o-kl-mode off`" in TEXT[name]


def test_the_fields_of_a_packed_batch_are_those_of_the_code():
    table = TEXT["packing"].split("## Context parallel")[0]
    fields = {field.name for field in dataclasses.fields(PackedBatch)}
    assert len(first_cells(table)) == 10 and set(first_cells(table)) <= fields


# metrics.md

OURS, MIRRORED = TEXT["metrics"].split("## Names of other dashboards")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """metrics.jsonl of two short runs: P3O with data of two ages and an evaluation, and GRPO."""
    from p3o_train.runtime import megatron_run
    from tests.megatron.runs import SMALL, trainer_of

    made = {}
    for method in ("p3o", "grpo"):
        folder = tmp_path_factory.mktemp(method)
        config = dataclasses.replace(SMALL, run_dir=str(folder), num_rollouts=3, eval_interval=2, n_eval_prompts=2)
        config = dataclasses.replace(config, save_interval=0, save_rollouts=True, rollouts_ahead=1)
        made[method] = rows_of(config, Objective(method, ess_scope="step"), trainer_of, megatron_run)
    return made


def rows_of(config: TrainConfig, objective, trainer_of, megatron_run):
    with megatron_run(config.parallelism):
        trainer = trainer_of(config, objective)
        sinks = open_sinks(config.run_dir, tensorboard=False)
        for step, row in trainer.run():
            for sink in sinks:
                sink.write(step, row)
        for sink in sinks:
            sink.close()
        trainer.rollouts.close()
    return read_jsonl(Path(config.run_dir) / FILE_NAME)


@NEEDS_MEGATRON
@pytest.mark.host_only
@pytest.mark.parametrize("method", ["p3o", "grpo"])
def test_the_page_has_every_metric_and_no_other(written, method):
    found = set().union(*written[method])
    names = {name.replace("train/p3o/", f"train/{method}/") for name in first_cells(OURS)}
    if method == "grpo":  # which has no e that is known before the step
        names -= {"train/grpo/ess_age_0", "train/grpo/ess_age_1"}
    assert found == names


@NEEDS_MEGATRON
@pytest.mark.host_only
def test_metrics_are_what_the_page_says_of_each_other(written):
    steps = [{name.removeprefix("train/p3o/"): value for name, value in row.items()} for row in written["p3o"]]
    assert len(steps) == 6
    for row in steps:
        assert row["adaptive_cap"] == row["normalized_ess"]
        # 1e-8 in the denominator of e
        assert row["normalized_ess"] == pytest.approx(1 / (1 + (row["ratio_std"] / row["ratio_mean"]) ** 2), rel=1e-6)
        assert row["total_loss"] == pytest.approx(row["score_loss"] + row["adaptive_kl_loss"], rel=1e-12, abs=1e-12)
        kl = (1 - row["normalized_ess"]) * row["behavior_kl_proxy"]
        assert row["adaptive_kl_loss"] == pytest.approx(kl, rel=1e-9, abs=1e-15)
        age = row["train/current_rollout_id"] - row["train/rollout_policy_snapshot_rollout"]
        assert row["rollout_policy_age_rollouts"] == age == row["policy_age_max"]
        assert row["reference_kl"] == row["entropy"] == row["invalid_tokens"] == 0
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [name in row for row in steps for name in ["eval/reward_mean"]] == [True, False, False, False, True, False]
    assert [row["train/time/rollout_s"] > 0 for row in steps] == [True, False] * 3
    assert steps[0]["normalized_ess"] > 1 - 1e-6 and steps[0]["log_ratio_abs_mean"] < 1e-5


@pytest.mark.parametrize("column, framework", [(1, "verl"), (2, "slime")])
def test_names_of_other_dashboards_are_those_of_the_code(column, framework):
    lines = [line.strip("| ").split("|") for line in MIRRORED.splitlines() if line.startswith("| `")]
    ours = {name: float(place) for place, name in enumerate(first_cells(MIRRORED))}
    cells = [[cell.strip(" `") for cell in line] + [""] for line in lines]
    listed = {line[column]: ours[line[0]] for line in cells if line[column]}
    assert listed == mirrored(ours, framework, "train/p3o/")
    assert listed


def test_the_page_knows_every_mean_of_the_kernels():
    means = p3o_kernels.P3OMetrics.zeros().means()
    assert {f"train/p3o/{name}" for name in means} <= set(first_cells(OURS))
