"""Checkpoints: complete or not there, whatever happens while they are written. Megatron's are in tests/megatron."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from p3o_train import checkpoint_files as files
from p3o_train.checkpoint import has_snapshot, latest_iteration, load_checkpoint
from tests.distributed.ranks import on_all_ranks
from tests.train.checkpoints import IDENTITY, Run, consistent, fails_on_rank_one


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_state_streams_and_progress_come_back(tmp_path):
    run = Run()
    random.seed(3)
    torch.manual_seed(4)
    run.save(tmp_path, 7, snapshot={"a": torch.tensor([1.5])})
    want = random.random(), torch.rand(3).tolist(), run.state()
    torch.manual_seed(0)
    other = Run()
    loaded = other.load(tmp_path)
    assert (random.random(), torch.rand(3).tolist(), other.state()) == want
    assert loaded.iteration == 7 and loaded.progress == {"iteration": 7}
    assert loaded.snapshot["a"].tolist() == [1.5] and has_snapshot(tmp_path)
    # and it goes on as the first one does
    run.to(8)
    other.to(8)
    assert other.state() == run.state()


def test_the_newest_are_kept_and_any_of_them_loads(tmp_path):
    for iteration in (1, 2, 3, 4):
        Run().save(tmp_path, iteration, keep=2)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004", files.TRACKER]
    assert Run().load(tmp_path).iteration == 4
    assert Run().load(tmp_path, iteration=3).iteration == 3
    assert Run().load(tmp_path / "iter_0000003").iteration == 3
    assert not has_snapshot(tmp_path)


def test_the_latest_is_not_replaced_by_one_of_the_same_iteration(tmp_path):
    Run().save(tmp_path, 5)
    with pytest.raises(FileExistsError, match="iter_0000005 is the latest checkpoint already"):
        Run().save(tmp_path, 5)
    assert consistent(tmp_path) == 5


class Crash(BaseException):
    """What a kill looks like from inside."""


def test_a_crash_at_any_call_leaves_a_checkpoint(tmp_path, monkeypatch):
    """Before the k-th call that changes the disk, for every k, while iteration 3 replaces 1 and 2."""
    calls = {name: getattr(os, name) for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir")}
    reached = []

    for crash_at in range(1000):
        directory = tmp_path / str(crash_at)
        run = Run()
        run.save(directory, 1)
        run.save(directory, 2)
        count = [0]

        def counted(name, count=count, crash_at=crash_at):
            def call(*args, **kwargs):
                count[0] += 1
                if count[0] > crash_at:
                    raise Crash
                return calls[name](*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, counted(name))
            try:
                run.save(directory, 3)
                crashed = False
            except Crash:
                crashed = True
        reached.append(consistent(directory))
        for iteration in (3, 4) if reached[-1] == 2 else (4,):
            Run().save(directory, iteration)
            assert consistent(directory) == iteration and not list(directory.glob("*.tmp"))
        shutil.rmtree(directory)
        if not crashed:
            break
    assert len(reached) > 8  # so that the calls were met at all
    assert reached == sorted(reached) and set(reached) == {2, 3}


def test_kill_9_at_any_moment(tmp_path):
    """A process that saves as fast as it can, killed 8 times; each time the next one goes on from what it finds."""
    generator, begin, seen = random.Random(1), 1, []
    for _ in range(8):
        command = [sys.executable, "-m", "tests.train.checkpoints", str(tmp_path), str(begin)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()  # of the first save: interpreter and torch are loaded
        time.sleep(generator.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        printed = process.communicate()[0].split()
        found = consistent(tmp_path)
        assert found >= int(printed[-1] if printed else begin)
        seen.append(found)
        begin = found + 1
    assert seen == sorted(set(seen)) and seen[-1] > 8


def damaged(path, how):
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[: len(content) // 2] if how == "truncated" else content)
    if how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_damage_is_found_and_nothing_changes(how, tmp_path):
    Run().save(tmp_path, 1)
    damaged(tmp_path / "iter_0000001" / "rank_00000.pt", how)
    run = Run()
    before, stream = run.state(), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"rank_00000\.pt is .*; load another iteration"):
        run.load(tmp_path)
    assert run.state() == before and torch.equal(torch.get_rng_state(), stream)


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({**IDENTITY, "lr": 0.2}, "lr was 0.1 and is 0.2"),
        ({**IDENTITY, "seed": 1}, "seed was 'absent' and is 1"),
        ({"lr": 0.1}, "tensor_model_parallel_size was 1 and is 'absent'"),
    ],
)
def test_a_checkpoint_of_another_run(identity, message, tmp_path):
    Run().save(tmp_path, 1)
    with pytest.raises(ValueError, match=message):
        Run().load(tmp_path, identity=identity)


def test_another_model(tmp_path):
    Run().save(tmp_path, 1)
    other = Run()
    other.model = torch.nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"holds another model: 0.weight is \(\(1, 2\), .* there and \(\(1, 3\)"):
        other.load(tmp_path)


def test_another_optimizer(tmp_path):
    """Refused before the model, which would fit, is touched."""
    Run().save(tmp_path, 1)
    other = Run()
    other.optimizer.optimizer.add_param_group({"params": [torch.zeros(3)]})
    before = other.state()
    with pytest.raises(ValueError, match=r"holds another optimizer: 0\.2 is None there"):
        other.load(tmp_path)
    assert other.state() == before


@pytest.mark.parametrize("position", range(0, 380, 7))
def test_a_flipped_bit_of_the_manifest(position, tmp_path):
    """Most of them leave valid JSON: another number, name or checksum."""
    Run().save(tmp_path, 1)
    path = tmp_path / "iter_0000001" / files.MANIFEST
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    whole = json.loads(path.read_text())
    try:
        harmless = json.loads(content) == whole  # white space
    except ValueError:
        harmless = False
    path.write_bytes(content)
    if not harmless:
        with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
            Run().load(tmp_path)


@pytest.mark.parametrize("left", ["nothing", "an empty iteration", "a bad tracker", "a bad manifest"])
def test_no_complete_checkpoint(left, tmp_path):
    if left != "nothing":
        Run().save(tmp_path, 1)
    if left == "an empty iteration":
        (tmp_path / "iter_0000001" / files.MANIFEST).unlink()
    if left == "a bad tracker":
        (tmp_path / files.TRACKER).write_text("release")
    if left == "a bad manifest":
        (tmp_path / "iter_0000001" / files.MANIFEST).write_text('{"iteration": 1')
    with pytest.raises(ValueError, match=r"no checkpoint|no complete|must hold the number|is damaged"):
        Run().load(tmp_path)


def test_another_number_of_ranks(tmp_path):
    Run().save(tmp_path, 1)
    (error,) = {*on_all_ranks(loading, 2, str(tmp_path))}
    assert "was written by 1 rank(s), but 2 are loading it" in error


def loading(rank, directory):
    run = Run()
    try:
        load_checkpoint(directory, model=[run.model], optimizer=run.optimizer, scheduler=None, identity=IDENTITY)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_an_error_on_one_rank_is_that_of_all(tmp_path):
    for error, iteration, ranks in on_all_ranks(fails_on_rank_one, 2, str(tmp_path)):
        assert "No space left on device" in error and iteration == 1 and ranks == 2


def test_latest_iteration_of_nothing(tmp_path):
    assert latest_iteration(tmp_path) is None and latest_iteration(tmp_path / "absent") is None
