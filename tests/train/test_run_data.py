"""Run directories are read as they are, also while the run goes on, and what cannot be read is named."""

import math
from pathlib import Path

import pytest

from p3o_train.run_data import LAST_STEPS, read_runs, unique_labels
from tests.train.run_folders import STEPS, counts, numbers, write_run


def test_numbers_histograms_and_settings_come_back(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", "grpo", lr=0.5)])
    assert run.rows == [{"step": step, **numbers(step, "grpo")} for step in range(1, STEPS + 1)]
    assert len(run.histograms) == STEPS and [one for one in run.histograms[2] if one] == [*counts(3).values()]
    assert run.settings == {"lr": 0.5} and run.method == "grpo" and run.label == "a"
    assert run.steps == list(range(1, STEPS + 1))


def test_a_run_that_goes_on_is_read_without_the_line_that_is_being_written(tmp_path):
    directory = write_run(tmp_path / "a")
    for name in ("metrics.jsonl", "ratio_histogram.jsonl"):
        path = directory / name
        path.write_bytes(path.read_bytes()[:-9])
    (run,) = read_runs([directory])
    assert run.steps[-1] == STEPS - 1 and len(run.histograms) == STEPS - 1


def test_only_the_numbers_are_needed(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", histogram=False, without=["train/p3o"])])
    assert run.histograms == [] and run.settings == {} and run.method == ""


def test_curves_and_means(tmp_path):
    def change(step, made):
        if step == 25:
            del made["train/reward_mean"]
        return made | {"nan": math.nan, "train/p3o/cap_fraction": math.nan if step == 30 else 0.25}

    (run,) = read_runs([write_run(tmp_path / "a", change=change)])
    steps, values = run.curve("train/reward_mean")
    assert 25 not in steps and len(steps) == STEPS - 1 and values[0] == 0.01
    assert run.curve("nan") == run.curve("train/grpo/cap_fraction") == ([], [])
    assert math.isnan(run.curve("train/{}/cap_fraction")[1][-1])
    last = [step for step in range(STEPS - LAST_STEPS + 1, STEPS + 1) if step != 25]
    assert run.last_mean("train/reward_mean") == pytest.approx(sum(last) / len(last) / 100, rel=1e-12)
    assert run.last_mean("train/{}/cap_fraction") == 0.25
    assert math.isnan(run.last_mean("nan"))


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["/x/a"], ["a"]),
        (["/x/a", "/x/b"], ["a", "b"]),
        (["/x/a/run", "/x/b/run", "/x/c"], ["a/run", "b/run", "c"]),
        (["/a/s/run", "/b/s/run", "/b/t/run"], ["a/s/run", "b/s/run", "t/run"]),
        (["/a/run", "/b", "/c/run"], ["a/run", "b", "c/run"]),
        (["/run", "/a/run"], ["/run", "a/run"]),
    ],
)
def test_labels_are_as_short_as_they_can_be(paths, labels):
    assert unique_labels([Path(path) for path in paths]) == labels


def test_given_labels_are_taken(tmp_path):
    write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert [run.label for run in read_runs([tmp_path / "a", tmp_path / "b"], ["x", "y"])] == ["x", "y"]
    for labels in (["x"], ["x", "x"], ["x", ""], ["x", "y", "z"]):
        with pytest.raises(ValueError, match=r"--labels must be 2 different names.*got \["):
            read_runs([tmp_path / "a", tmp_path / "b"], labels)


def test_what_cannot_be_read_is_named_with_the_remedy(tmp_path):
    def refused(message, *directories):
        with pytest.raises(ValueError, match=message):
            read_runs(directories)

    fine = write_run(tmp_path / "fine")
    (tmp_path / "empty").mkdir()
    refused(r"nowhere does not exist; expected the --run-dir", fine, tmp_path / "nowhere")
    refused(r"metrics\.jsonl is a file; expected the --run-dir", fine / "metrics.jsonl")
    refused(r"empty has no metrics\.jsonl; expected the --run-dir", tmp_path / "empty")
    refused(r"fine is given more than once", fine, tmp_path / "empty" / ".." / "fine")
    for content in (b"", b'{"step": 1, "tr'):
        (tmp_path / "empty" / "metrics.jsonl").write_bytes(content)
        refused(r"empty/metrics\.jsonl has no complete line yet; wait", tmp_path / "empty")
    lines = (fine / "metrics.jsonl").read_text().splitlines(keepends=True)
    (fine / "metrics.jsonl").write_text("".join([*lines[:4], lines[4][:-20] + "\n", *lines[5:]]))
    refused(r"fine/metrics\.jsonl, line 5: expected a JSON object.*repair or remove the line", fine)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ratio_histogram.jsonl", '{"step": 3, "0.3": 1.0}\n', r"step 3: bins must begin at one of .*got 0\.3; remove"),
        ("config.json", '{"lr": ', "is no JSON: .*repair or remove it"),
        ("config.json", "[1]", "must hold a JSON object of settings, got list"),
    ],
)
def test_broken_files_beside_the_numbers(tmp_path, name, content, message):
    directory = write_run(tmp_path / "a", histogram=False)
    (directory / name).write_text(content)
    with pytest.raises(ValueError, match=rf"a/{name}.*{message}"):
        read_runs([directory])
