"""Rewards in workers: in order, within their limit, and every failure is told or counted."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p3o_train import reward_workers
from p3o_train.reward_workers import RewardFailed, RewardWorkers

pytest.importorskip("pebble")
pytestmark = pytest.mark.host_only  # starts processes

LIMIT = 1.0
OWN = """
import os, signal, sys, time

class TwoPart(Exception):
    def __init__(self, one, two): super().__init__(f"{one} and {two}")

def act(response_text, label):
    if response_text == "loop":
        while True: pass
    if response_text == "stubborn":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        while True: pass
    if response_text == "exit 3": os._exit(3)
    if response_text == "exit 0": os._exit(0)
    if response_text == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if response_text == "sys.exit": sys.exit(5)
    if response_text == "raise": raise TwoPart("this", "that")
    if response_text == "nan": return float("nan")
    if response_text == "slow": time.sleep(0.3)
    return float(label)

def loop(response_text, label):
    while True: pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the module ``acting_rewards``, on the path of this process and of its workers."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "acting_rewards.py").write_text(OWN)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def strict(folder):
    with RewardWorkers("acting_rewards:act", time_limit_s=LIMIT) as workers:
        yield workers


@pytest.fixture(scope="module")
def lenient(folder):
    with RewardWorkers("acting_rewards:act", time_limit_s=LIMIT, on_failure="zero") as workers:
        yield workers


def score(workers, *texts):
    return workers.score([(text, str(place + 1)) for place, text in enumerate(texts)], [f"s{text}" for text in texts])


def test_cheap_rewards_take_no_process_and_no_time():
    with RewardWorkers("digits") as workers:
        pairs = [(f" {number}\n1+1=2", "7") for number in range(512)]
        before, seconds = multiprocessing.active_children(), []
        for _ in range(20):
            begin = time.perf_counter()
            rewards = workers.score(pairs, [str(number) for number in range(512)])
            seconds.append(time.perf_counter() - begin)
        assert multiprocessing.active_children() == before
    assert rewards == [float(number == 7) for number in range(512)]
    # the best of many, since a busy machine makes the others slow; a process would take more than this alone
    assert min(seconds) < 5e-3


def test_rewards_come_in_order(strict):
    assert score(strict, "slow", "", "slow", "", "") == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_nothing_to_score(strict):
    assert score(strict) == []


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("loop", "gave no result within 1 s"),
        ("exit 0", "gave no result within 1 s"),
        ("exit 3", "exit code 3"),
        ("segfault", "by SIGSEGV"),
        ("sys.exit", "failed with SystemExit: 5"),
        ("raise", "failed with TwoPart: this and that"),
        ("nan", "failed with ValueError: must return a finite number, got nan"),
    ],
)
def test_a_failure_is_named(strict, text, cause):
    with pytest.raises(RewardFailed) as error:
        score(strict, "", text)
    words = [f"sample 's{text}'", "reward 'acting_rewards:act'", cause, "label is '2'", f"response {text!r}"]
    assert [word for word in words if word not in str(error.value)] == []
    assert strict.failures == 0


def test_workers_go_on_after_a_failure(strict):
    with pytest.raises(RewardFailed):
        score(strict, "exit 3")
    assert score(strict, "") == [1.0]


def test_failures_count_as_zero_where_this_was_asked_for(lenient, caplog):
    begin = time.perf_counter()
    with caplog.at_level(logging.WARNING, logger="p3o_train"):
        assert score(lenient, "", "loop", "exit 3", "raise", "", "stubborn", "") == [1, 0, 0, 0, 5, 0, 7]
    # two limits, 3 s until a process that does not react is killed, and new workers
    assert time.perf_counter() - begin < 20
    assert lenient.failures == 4
    assert "4 of 7 rewards failed and count as 0; the first: sample 'sloop'" in caplog.text
    assert score(lenient, "nan", "") == [0.0, 2.0]
    assert lenient.failures == 5


def test_a_label_that_does_not_fit_is_named_without_a_process():
    workers = RewardWorkers("digits")
    with pytest.raises(RewardFailed, match=r"sample 'b': reward 'digits' failed with ValueError: label.*got 'seven'"):
        workers.score([("7", "7"), ("7", "seven")], ["a", "b"])
    workers = RewardWorkers("digits", on_failure="zero")
    assert workers.score([("7", "7"), ("7", "seven")], ["a", "b"]) == [1.0, 0.0]
    assert workers.failures == 1


def test_mathematics_that_never_ends():
    pytest.importorskip("math_verify")
    with RewardWorkers("math", workers=1, time_limit_s=3.0, on_failure="zero") as workers:
        pairs = [("\\boxed{\\frac{1}{2}}", "0.5"), ("\\boxed{9^{9^{9^{9}}}+1}", "\\sin(3)"), ("\\boxed{4}", "2+2")]
        assert workers.score(pairs, ["half", "tower", "four"]) == [1.0, 0.0, 1.0]
        assert workers.failures == 1


def test_no_worker_goes_on_after_a_failure(folder):
    before = set(multiprocessing.active_children())
    workers = RewardWorkers("acting_rewards:act", time_limit_s=60.0)
    with pytest.raises(RewardFailed, match="TwoPart"):
        score(workers, "loop", "raise")
    assert set(multiprocessing.active_children()) <= before


def test_workers_without_their_package(folder, monkeypatch):
    monkeypatch.setattr(reward_workers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install pebble"):
        RewardWorkers("acting_rewards:act")
    assert RewardWorkers("digits").score([("7", "7")], ["a"]) == [1.0]


def test_texts_that_fill_the_pipe_do_not_hold_up_the_end(folder):
    """While workers hang, the thread that feeds them waits for room in the pipe."""
    begin = time.perf_counter()
    with RewardWorkers("acting_rewards:loop", time_limit_s=LIMIT) as workers, pytest.raises(RewardFailed):
        score(workers, *["x" * 1_000_000] * 20)
    assert time.perf_counter() - begin < 20  # of 10 rounds of a second and more


def test_workers_that_never_start_are_told(folder, monkeypatch):
    monkeypatch.setattr(reward_workers, "START_LIMIT_S", -1e9)
    with (
        RewardWorkers("acting_rewards:act", on_failure="zero") as workers,
        pytest.raises(RewardFailed, match="1 of 1 responses have no reward after"),
    ):
        score(workers, "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"workers": 0}, "workers must be >= 1 .* got 0"),
        ({"time_limit_s": 0}, "time_limit_s > 0 and finite, got 2 and 0"),
        ({"time_limit_s": float("inf")}, "got 2 and inf"),
        ({"on_failure": "ignore"}, "on_failure must be one of .*got 'ignore'"),
        ({"reward_name": "exactly"}, "'exactly'"),
    ],
)
def test_arguments_are_checked(arguments, text):
    with pytest.raises(ValueError, match=text):
        RewardWorkers(**{"reward_name": "exact"} | arguments)


def test_names_are_counted():
    with pytest.raises(ValueError, match="names must be one for each pair, got 1 for 2"):
        RewardWorkers("exact").score([("", ""), ("", "")], ["a"])


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from p3o_train.reward_workers import RewardWorkers
if __name__ == "__main__":
    workers = RewardWorkers("acting_rewards:act", time_limit_s=float(sys.argv[2]))
    workers.score([("", "1")], ["a"])
    print("ready", flush=True)
    workers.score([("loop", "1")] * 2, ["a", "b"])
"""


def processes(group):
    """Ids of the processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(process_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    ("number", "limit"),
    # a process that is killed cannot clean up: its workers end by their own clock, a second after the limit
    [(signal.SIGINT, 60.0), (signal.SIGKILL, 1.0)],
)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_an_end_from_outside_leaves_no_process(folder, tmp_path, number, limit):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(folder), str(limit)]
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # a shell starts background jobs, such as a test run, with Ctrl-C ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert run.stdout.readline() == b"ready\n"
        time.sleep(0.5)  # the workers take the responses that hang
        assert len(processes(run.pid)) >= 3
        if number == signal.SIGINT:
            os.killpg(run.pid, number)  # as a terminal does
        else:
            os.kill(run.pid, number)
        run.wait(20)
        deadline = time.monotonic() + 20
        while processes(run.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes(run.pid) == []
    finally:
        run.stdout.close()
        for process in processes(run.pid):
            os.kill(process, signal.SIGKILL)
