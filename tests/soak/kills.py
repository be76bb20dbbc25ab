"""kill -9 of a run, or of one of its two ranks, again and again; ranks that stop; Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.soak.runs import (
    STEPS_PER_SAVE,
    Campaign,
    Process,
    Progress,
    finished,
    last_line,
    lines,
    resumed_step,
    rows,
    saved_step,
    started,
    state,
    train_flags,
    undisturbed,
)
from tests.soak.trials import Trial

TRAINS, SAVES, PUBLISHES, STARTS = "while it trains", "while it saves", "while it publishes", "before its first step"
MOMENTS = (TRAINS, SAVES, PUBLISHES, TRAINS, STARTS)
JITTER_S = {TRAINS: 0.15, SAVES: 0.03, PUBLISHES: 0.005, STARTS: 4.0}
"""The fault comes up to so long after its moment."""
INJECTED = {
    TRAINS: "SIGKILL up to 0.15 s after one of its next five steps",
    SAVES: "SIGKILL up to 30 ms after the folder of a new checkpoint appears",
    PUBLISHES: "SIGKILL up to 5 ms after the manifest of a new checkpoint appears",
    STARTS: "SIGKILL up to 4 s after its start",
}
TIMEOUT_MINUTES, TIMEOUT_S = "0.2", 12.0
"""How long ranks wait for each other."""
GRACE_S = 10.0
"""Beyond the timeout, for a process to end on a busy machine."""
DEAD_PEER = ("connection", "timed out", "timeout")
"""One of these is in the text of an error that blames another rank."""


def kills(campaign: Campaign, times: int) -> list[Trial]:
    """One run that is killed ``times`` times and goes on each time."""
    rollouts = 3 * times + 4
    whole = undisturbed(campaign, "whole", rollouts)
    expected = rows(campaign.folder / "whole")
    run_dir = campaign.directory("killed")
    trials, lost = [], []
    for number in range(times):
        moment = MOMENTS[number % len(MOMENTS)]
        kept = saved_step(run_dir)
        progress = Progress(run_dir)
        with started(train_flags(run_dir, rollouts)) as (process,):
            met = _meets(campaign, progress, process, moment, kept)
            process.popen.send_signal(signal.SIGKILL)
            process.popen.wait()
        done = len(lines(run_dir)) if progress.began else kept
        lost.append(done - saved_step(run_dir))
        found = resumed_step(process.text)
        wrong = "" if met else f"no moment {moment}: {last_line(process.text)}"
        if progress.new_steps(kept) > 0 and found != kept:
            wrong = f"went on after step {found}, saved was {kept}"
        if rows(run_dir) != expected[: len(lines(run_dir))]:
            wrong = f"other numbers than an undisturbed run among steps 1 to {done}"
        if not 0 <= lost[-1] <= STEPS_PER_SAVE:
            wrong = f"{lost[-1]} steps lost"
        trials.append(campaign.told(Trial(f"kill -9 {moment}", INJECTED[moment], not wrong, lost[-1], None, wrong)))
    statuses, text, _ = finished(train_flags(run_dir, rollouts))
    same = statuses == [0] and resumed_step(text) <= len(expected) and state(run_dir) == whole
    return trials if same else [_failed(trial, f"the end differs: {statuses}, {last_line(text)}") for trial in trials]


def _meets(campaign: Campaign, progress: Progress, process: Process, moment: str, kept: int) -> bool:
    """Waits for a moment at random; whether it came."""
    steps = campaign.random.randint(1, 5)
    ready = {
        TRAINS: lambda: progress.new_steps(kept) >= steps,
        SAVES: progress.saving,
        PUBLISHES: progress.publishing,
        STARTS: lambda: True,
    }
    met = progress.wait(ready[moment], process)
    time.sleep(campaign.random.uniform(0, JITTER_S[moment]))
    return met


def _failed(trial: Trial, note: str) -> Trial:
    return Trial(trial.fault, trial.injected, False, trial.steps_lost, trial.seconds, trial.note or note)


def rank_kills(campaign: Campaign, times: int) -> list[Trial]:
    """Two ranks, one of which is killed: the other must say so and end before the timeout is over."""
    rollouts, flags = 3 * times + 4, ("--distributed-timeout-minutes", TIMEOUT_MINUTES)
    whole = undisturbed(campaign, "whole-pair", rollouts, *flags, ranks=2)
    run_dir = campaign.directory("killed-pair")
    trials = []
    for _ in range(times):
        kept, victim = saved_step(run_dir), campaign.random.randrange(2)
        progress = Progress(run_dir)
        with started(train_flags(run_dir, rollouts, *flags), ranks=2) as processes:
            met = _meets(campaign, progress, processes[0], TRAINS, kept)
            processes[victim].popen.kill()
            wrong, seconds = _left_alone(processes[1 - victim]) if met else ("the moment did not come", None)
        lost = len(lines(run_dir)) - saved_step(run_dir)
        how = "SIGKILL to one of two ranks, up to 0.15 s after one of its next five steps"
        trials.append(campaign.told(Trial("kill -9 of one rank", how, not wrong, lost, seconds, wrong)))
    statuses, text, _ = finished(train_flags(run_dir, rollouts, *flags), ranks=2)
    same = statuses == [0, 0] and state(run_dir) == whole
    return trials if same else [_failed(trial, f"the end differs: {statuses}, {last_line(text)}") for trial in trials]


def _left_alone(survivor: Process) -> tuple[str, float]:
    """What is wrong with how a rank ends whose peer does not answer, and after how many seconds it ended."""
    begin = time.monotonic()
    status = survivor.wait(TIMEOUT_S + GRACE_S)
    seconds = time.monotonic() - begin
    if status is None:
        return f"still waiting {seconds:.0f} s later, with a timeout of {TIMEOUT_S:.0f} s", seconds
    named = any(word in survivor.text.lower() for word in DEAD_PEER)
    return "" if status and named else f"ended with {status}: {last_line(survivor.text)}", seconds


def slow_ranks(campaign: Campaign, times: int) -> list[Trial]:
    """A rank that is stopped: shorter than the timeout it costs time alone, longer is an error on the other."""
    rollouts, flags = 12, ("--distributed-timeout-minutes", TIMEOUT_MINUTES)
    whole = undisturbed(campaign, "whole-slow", rollouts, *flags, ranks=2)
    trials = []
    for number in range(times):
        for name, seconds in (("shorter", 3.0), ("longer", TIMEOUT_S + GRACE_S)):
            run_dir = campaign.directory(f"slow-{name}-{number}")
            trials.append(campaign.told(_stopped(campaign, run_dir, rollouts, flags, whole, name, seconds)))
    return trials


def _stopped(
    campaign: Campaign, run_dir: Path, rollouts: int, flags: tuple[str, ...], whole: str, name: str, seconds: float
) -> Trial:
    fault = f"a rank that stops, {name} than the timeout"
    victim, progress, found, lost = campaign.random.randrange(2), Progress(run_dir), None, None
    with started(train_flags(run_dir, rollouts, *flags), ranks=2) as processes:
        met = _meets(campaign, progress, processes[0], TRAINS, 0)
        processes[victim].popen.send_signal(signal.SIGSTOP)
        if name == "longer":
            how = f"SIGSTOP to one of two ranks, which wait {TIMEOUT_S:.0f} s for each other"
            wrong, found = _left_alone(processes[1 - victim])
        else:
            how, wrong = f"SIGSTOP to one of two ranks, SIGCONT {seconds:.0f} s later", ""
            time.sleep(seconds)
            processes[victim].popen.send_signal(signal.SIGCONT)
            statuses = [process.wait(120) for process in processes]
            wrong = "" if statuses == [0, 0] else f"ended with {statuses}: {last_line(processes[0].text)}"
    if name == "longer":
        lost = len(lines(run_dir)) - saved_step(run_dir)
        finished(train_flags(run_dir, rollouts, *flags), ranks=2)
    if not met or state(run_dir) != whole:
        wrong = wrong or "the end differs from that of an undisturbed run"
    return Trial(fault, how, not wrong, lost, found, wrong)


def signals(campaign: Campaign, times: int) -> list[Trial]:
    """Ctrl-C, which must say how to go on, and SIGTERM, which ends the process as it ends any."""
    rollouts = 12
    whole = undisturbed(campaign, "whole-signal", rollouts)
    trials = []
    for number in range(times):
        for sent, status in ((signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)):
            run_dir = campaign.directory(f"{sent.name}-{number}")
            progress = Progress(run_dir)
            with started(train_flags(run_dir, rollouts)) as (process,):
                _meets(campaign, progress, process, MOMENTS[number % 2], 0)
                process.popen.send_signal(sent)
                begin = time.monotonic()
                ended = process.wait(60)
            seconds, text = time.monotonic() - begin, process.text
            wrong = "" if ended == status else f"ended with {ended}: {last_line(text)}"
            if sent == signal.SIGINT and ("--resume" not in text or "Traceback" in text):
                wrong = wrong or f"does not say how to go on: {last_line(text)}"
            lost = len(lines(run_dir)) - saved_step(run_dir)
            finished(train_flags(run_dir, rollouts))
            if state(run_dir) != whole:
                wrong = wrong or "the end differs from that of an undisturbed run"
            how = f"{sent.name} after one of its first five steps, or while it saves"
            fault = "Ctrl-C" if sent == signal.SIGINT else "SIGTERM"
            trials.append(campaign.told(Trial(fault, how, not wrong, lost, seconds, wrong)))
    return trials
