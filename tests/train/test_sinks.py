"""The numbers of a run reach their files, and a resumed run leaves the file of an uninterrupted one."""

import importlib.machinery
import json
import logging
import math
import os
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch

from p3o_train.histogram import PREFIX
from p3o_train.sinks import HISTOGRAM_FILE, HistogramSink, JsonlSink, TensorBoardSink, WandbSink, open_sinks, read_jsonl

TENSORBOARD = "torch.utils.tensorboard"


def values(step):
    return {"train/reward_mean": step / 7, "train/p3o/normalized_ess": 1 / (1 + step)}


def written(path, steps, resume_step=None):
    sink = JsonlSink(path, resume_step)
    for step in steps:
        sink.write(step, values(step))
    sink.close()
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def tensorboard(monkeypatch):
    """A writer that notes its calls, in place of the real one."""
    made = []

    class SummaryWriter:
        def __init__(self, log_dir, purge_step):
            self.opened, self.calls = (log_dir, purge_step), []
            made.append(self)

        def add_scalar(self, *call):
            self.calls.append(call)

        def flush(self):
            self.calls.append("flush")

        def close(self):
            self.calls.append("close")

    package = ModuleType("tensorboard")
    package.__spec__ = importlib.machinery.ModuleSpec("tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, TENSORBOARD, SimpleNamespace(SummaryWriter=SummaryWriter))
    return made


@pytest.fixture
def wandb(monkeypatch):
    """A package that notes its calls, in place of the real one."""
    calls = []

    def init(**arguments):
        calls.append(("init", arguments))
        return SimpleNamespace(
            log=lambda numbers, step: calls.append(("log", numbers, step)), finish=lambda: calls.append("finish")
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return calls


@pytest.fixture
def nothing_installed(monkeypatch):
    for name in ("tensorboard", TENSORBOARD, "wandb"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_line_is_the_step_and_its_numbers(path):
    assert (
        written(path, [3])
        == b'{"step": 3, "train/reward_mean": 0.42857142857142855, "train/p3o/normalized_ess": 0.25}\n'
    )
    assert read_jsonl(path) == [{"step": 3, **values(3)}]
    assert type(read_jsonl(path)[0]["step"]) is int


def test_a_line_can_be_read_before_the_sink_is_closed(path):
    sink = JsonlSink(path)
    for step in range(3):
        sink.write(step, values(step))
        assert [row["step"] for row in read_jsonl(path)] == list(range(step + 1))
    sink.close()
    with pytest.raises(ValueError, match="closed file"):
        sink.write(3, values(3))


def test_numbers_of_other_libraries_are_written_as_numbers(path):
    sink = JsonlSink(path)
    sink.write(numpy.int64(0), {"a": numpy.float32(0.5), "b": torch.tensor(0.25), "c": 2, "d": True})
    sink.close()
    assert path.read_text() == '{"step": 0, "a": 0.5, "b": 0.25, "c": 2.0, "d": 1.0}\n'


def test_what_is_not_finite_is_null_in_strict_json_and_nan_when_read(path, caplog):
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    sink = JsonlSink(path)
    for step, number in enumerate((math.nan, math.inf, -math.inf)):
        sink.write(step, {"train/grad_norm": number, "train/reward_mean": 1.0})
    sink.close()
    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert rows == [{"step": step, "train/grad_norm": None, "train/reward_mean": 1.0} for step in range(3)]
    assert all(math.isnan(row["train/grad_norm"]) and row["train/reward_mean"] == 1.0 for row in read_jsonl(path))
    assert [record.getMessage() for record in caplog.records] == [
        "step 0: train/grad_norm is nan, written as null from now on"
    ]


def test_a_number_called_step_is_refused(path):
    sink = JsonlSink(path)
    with pytest.raises(ValueError, match='must not have the name "step"'):
        sink.write(0, {"step": 1.0})
    sink.close()
    assert path.read_bytes() == b""


def test_a_new_run_does_not_overwrite_another(path):
    before = written(path, range(3))
    with pytest.raises(FileExistsError, match=r"metrics.jsonl exists.*Pass resume_step.*another folder"):
        JsonlSink(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("cut", [0, 1, 30, 60], ids=["whole", "no end of line", "torn", "torn early"])
@pytest.mark.parametrize("resume_step", [0, 4, 9])
def test_a_resumed_run_ends_with_the_file_of_an_uninterrupted_one(path, tmp_path, cut, resume_step):
    """Ten steps were written, the last of them perhaps in part, after the checkpoint that the run goes on from."""
    whole = written(tmp_path / "whole.jsonl", range(12))
    interrupted = written(path, range(10))
    path.write_bytes(interrupted[: len(interrupted) - cut])
    assert len(read_jsonl(path)) == (10 if cut < 2 else 9)
    assert written(path, range(resume_step, 12), resume_step) == whole
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "whole.jsonl"]


def test_a_complete_line_without_its_end_is_kept(path):
    whole = written(path, range(4))
    path.write_bytes(whole[:-1])
    assert [row["step"] for row in read_jsonl(path)] == [0, 1, 2, 3]
    assert written(path, [], resume_step=4) == whole


def test_resuming_without_a_file_begins_one(path):
    assert [json.loads(line)["step"] for line in written(path, [5, 6], resume_step=5).splitlines()] == [5, 6]


def test_a_negative_resume_step_is_refused_before_it_drops_everything(path):
    before = written(path, range(3))
    with pytest.raises(ValueError, match=r"resume_step must be >= 0.*got -1"):
        JsonlSink(path, resume_step=-1)
    assert path.read_bytes() == before


def test_the_file_is_replaced_in_one_move(path, monkeypatch):
    before = written(path, range(5))

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        JsonlSink(path, resume_step=2)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    "line",
    ['{"step": 1, "a"', "", "[1, 2]", '{"a": 1.0}', '{"step": 1.5}', '{"step": true}', '{"step": 1, "a": "b"}', "\xff"],
)
def test_a_broken_line_is_named_and_nothing_changes(path, line):
    content = b'{"step": 0}\n' + line.encode("latin-1") + b'\n{"step": 2}\n'
    path.write_bytes(content)
    for read in (read_jsonl, lambda path: JsonlSink(path, resume_step=1)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
            read(path)
    assert path.read_bytes() == content


def test_a_broken_last_line_that_is_not_torn_is_named(path):
    path.write_text('{"step": 0}\n{"step": 1,\n')
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(path)


def test_an_empty_file_has_no_rows(path):
    path.write_bytes(b"")
    assert read_jsonl(path) == []


@pytest.mark.host_only
def test_a_killed_process_leaves_every_line_but_the_last_whole(path):
    code = (
        "import itertools, sys; from p3o_train.sinks import JsonlSink\n"
        "sink = JsonlSink(sys.argv[1])\n"
        "for step in itertools.count(): sink.write(step, {'a': 1 / 3}); step == 200 and print('ready', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    rows = read_jsonl(path)
    assert len(rows) > 200 and rows == [{"step": step, "a": 1 / 3} for step in range(len(rows))]


def test_tensorboard_gets_each_number_once_a_step_and_is_told_where_a_run_goes_on(tensorboard, tmp_path):
    sink = TensorBoardSink(tmp_path, resume_step=4)
    sink.write(4, {"a": 1.0, "b": 2.0})
    sink.close()
    assert tensorboard[0].opened == (str(tmp_path), 4)
    assert tensorboard[0].calls == [("a", 1.0, 4), ("b", 2.0, 4), "flush", "close"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_real_tensorboard_shows_a_resumed_run_without_what_came_to_nothing(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, resume_step, value in ((range(5), None, 1.0), (range(3, 6), 3, 2.0)):
        sink = TensorBoardSink(tmp_path, resume_step)
        for step in steps:
            sink.write(step, {"train/reward_mean": value})
        sink.close()
    events = accumulators.EventAccumulator(str(tmp_path)).Reload().Scalars("train/reward_mean")
    assert [(event.step, event.value) for event in events] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


def test_wandb_gets_the_numbers_of_a_step_at_once(wandb):
    sink = WandbSink("p3o", "first", {"lr": 0.1})
    sink.write(2, {"a": 1.0, "b": 2.0})
    sink.close()
    assert wandb == [
        ("init", {"project": "p3o", "name": "first", "config": {"lr": 0.1}}),
        ("log", {"a": 1.0, "b": 2.0}, 2),
        "finish",
    ]


def opened(directory, **options):
    sinks = open_sinks(directory, **options)
    for sink in sinks:
        sink.write(0, {"a": 1.0})
        sink.close()
    return [type(sink).__name__ for sink in sinks]


def test_all_sinks(tensorboard, wandb, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = tmp_path / "runs" / "first"
    assert opened(run, wandb_project="p3o", config={"lr": 1}) == [
        "JsonlSink",
        "HistogramSink",
        "TensorBoardSink",
        "WandbSink",
    ]
    assert read_jsonl(run / "metrics.jsonl") == [{"step": 0, "a": 1.0}]
    assert tensorboard[0].opened == (str(run / "tensorboard"), None) and ("a", 1.0, 0) in tensorboard[0].calls
    assert wandb[0] == ("init", {"project": "p3o", "name": "first", "config": {"lr": 1}})
    assert [record.getMessage() for record in caplog.records] == [
        f"the numbers of every step go to {run}/metrics.jsonl, {run}/ratio_histogram.jsonl, "
        f"TensorBoard in {run}/tensorboard, the W&B project p3o"
    ]


def test_tensorboard_can_be_left_out(tensorboard, tmp_path):
    assert opened(tmp_path, tensorboard=False) == ["JsonlSink", "HistogramSink"] and tensorboard == []


def test_without_packages_the_file_alone_and_the_log_says_so(nothing_installed, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert opened(tmp_path) == ["JsonlSink", "HistogramSink"]
    assert "not to TensorBoard, which is not installed (pip install tensorboard)" in caplog.text


@pytest.mark.parametrize(
    ("options", "command"),
    [({"tensorboard": True}, "pip install tensorboard"), ({"wandb_project": "p3o"}, "pip install wandb")],
)
def test_what_is_asked_for_and_missing_is_an_error_that_leaves_no_file(nothing_installed, tmp_path, options, command):
    with pytest.raises(ImportError, match=command):
        open_sinks(tmp_path, **options)
    assert os.listdir(tmp_path) == []


def test_after_an_error_the_other_sinks_are_closed_and_a_second_try_works(tensorboard, wandb, tmp_path, monkeypatch):
    def offline(**_):
        raise ConnectionError("offline")

    with monkeypatch.context() as broken:
        broken.setattr(sys.modules["wandb"], "init", offline)
        with pytest.raises(ConnectionError):
            open_sinks(tmp_path, wandb_project="p3o")
    assert tensorboard[0].calls == ["close"]
    assert len(opened(tmp_path, wandb_project="p3o")) == 4


def test_a_file_that_exists_is_found_before_anything_begins_elsewhere(tensorboard, wandb, tmp_path):
    opened(tmp_path, tensorboard=False)
    with pytest.raises(FileExistsError):
        open_sinks(tmp_path, wandb_project="p3o")
    assert tensorboard == [] and wandb == []
    assert len(opened(tmp_path, wandb_project="p3o", resume_step=0)) == 4
    assert tensorboard[0].opened[1] == 0 and read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 1.0}]


COUNTED = {"train/reward_mean": 0.5, PREFIX + "-inf": 2.0, PREFIX + "0.001": 4.0}


def test_counts_of_log_ratios_go_to_a_file_of_their_own_and_nowhere_else(tensorboard, wandb, tmp_path):
    for sink in open_sinks(tmp_path, wandb_project="p3o"):
        sink.write(3, COUNTED)
        sink.write(4, {"train/reward_mean": 0.25})
        sink.close()
    assert (tmp_path / HISTOGRAM_FILE).read_text() == '{"step": 3, "-inf": 2.0, "0.001": 4.0}\n'
    assert read_jsonl(tmp_path / "metrics.jsonl") == [
        {"step": 3, "train/reward_mean": 0.5},
        {"step": 4, "train/reward_mean": 0.25},
    ]
    assert [call for call in tensorboard[0].calls if call[0] == "train/reward_mean"] == [
        ("train/reward_mean", 0.5, 3),
        ("train/reward_mean", 0.25, 4),
    ]
    assert len(tensorboard[0].calls) == 5 and wandb[1] == ("log", {"train/reward_mean": 0.5}, 3)


@pytest.mark.parametrize("cut", [0, 1, 10], ids=["whole", "no end of line", "torn"])
def test_a_resumed_run_has_every_histogram_once(tmp_path, cut):
    def counted(path, steps, resume_step=None):
        sink = HistogramSink(path, resume_step)
        for step in steps:
            sink.write(step, {PREFIX + "0.001": step + 1})
        sink.close()
        return path.read_bytes()

    whole = counted(tmp_path / "whole.jsonl", range(12))
    path = tmp_path / HISTOGRAM_FILE
    interrupted = counted(path, range(10))
    path.write_bytes(interrupted[: len(interrupted) - cut])
    assert counted(path, range(6, 12), 6) == whole


def test_a_histogram_of_another_run_is_found_before_anything_begins(tensorboard, tmp_path):
    HistogramSink(tmp_path / HISTOGRAM_FILE).close()
    with pytest.raises(FileExistsError, match=HISTOGRAM_FILE):
        open_sinks(tmp_path)
    assert os.listdir(tmp_path) == [HISTOGRAM_FILE] and tensorboard == []
