"""A rollout server that dies, hangs, answers with errors or garbage in the middle of a rollout, and comes back."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from p3o_train.rollout_files import partial_rollouts, read_rollout
from tests.soak.runs import Campaign, finished, last_line, lines, saved_step, started, state, train_flags
from tests.soak.server import Server
from tests.soak.trials import Trial

ROLLOUTS, PER_ROLLOUT = 6, 16
DEADLINE_S, RETRIES_S, GRACE_S = 10.0, 4.0, 20.0
"""For one answer; for the waits between four attempts; for a process to end on a busy machine."""
FAULTS = {
    "dies": "connections are closed, and the port is",
    "hangs": "no answer",
    "trickles": "an answer of one blank every half second",
    "answers 500": "status 500 for every request",
    "sends garbage": "status 200 and bytes that are no JSON",
    "sends half an answer": "the connection is closed after the header",
}
RETRIED = "answers 500 once"


def _flags(run_dir: Path, server: Server) -> list[str]:
    more = ["--rollout-engine", "sglang", "--sglang-urls", server.url, "--rollout-max-concurrency", "1"]
    return train_flags(run_dir, ROLLOUTS, *more)


def servers(campaign: Campaign, times: int) -> list[Trial]:
    """Each fault in a run of its own, from the middle of a rollout on."""
    options = {"module": "tests.soak.train", "environment": {"P3O_SOAK_DEADLINE_S": str(DEADLINE_S)}}
    with contextlib.closing(Server()) as server:
        run_dir = campaign.directory("whole-server")
        statuses, text, _ = finished(_flags(run_dir, server), **options)
        if statuses != [0]:
            raise RuntimeError(f"the undisturbed run with a server ended with {statuses}: {last_line(text)}")
        whole = state(run_dir)
    trials = []
    for number in range(times):
        for fault in (*FAULTS, RETRIED):
            with contextlib.closing(Server()) as server:
                run_dir = campaign.directory(f"server-{number}")
                answers = campaign.random.randint(PER_ROLLOUT + 1, PER_ROLLOUT * (ROLLOUTS - 1))
                trials.append(campaign.told(_one(run_dir, server, fault, answers, whole, options)))
    return trials


def _one(run_dir: Path, server: Server, fault: str, answers: int, whole: str, options: dict[str, object]) -> Trial:
    server.after(answers, fault)
    flags = _flags(run_dir, server)
    with started(flags, **options) as (process,):  # type: ignore[arg-type]
        end = time.monotonic() + 120
        while server.met_at is None and process.popen.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        met = server.met_at or time.monotonic()
        status = process.wait(DEADLINE_S + RETRIES_S + GRACE_S if fault != RETRIED else 120)
        seconds, text = time.monotonic() - met, process.text
    if fault == RETRIED:
        wrong = "" if status == 0 and state(run_dir) == whole else f"ended with {status}: {last_line(text)}"
        return Trial(f"rollout server {fault}", "status 500 for one request", not wrong, None, None, wrong)
    wrong = ""
    if status is None:
        wrong = f"still waiting {seconds:.0f} s later, with a deadline of {DEADLINE_S:.0f} s"
    elif status != 1 or server.url not in text or "Traceback" in text:
        wrong = f"ended with {status}: {last_line(text)}"
    wrong = wrong or _half_written(run_dir, answers)
    lost = len(lines(run_dir)) - saved_step(run_dir)
    server.listen()
    statuses, text, _ = finished(flags, **options)  # type: ignore[arg-type]
    if statuses != [0] or state(run_dir) != whole:
        wrong = wrong or f"went on to {statuses}, another end than undisturbed: {last_line(text)}"
    return Trial(f"rollout server {fault}", f"{FAULTS[fault]}, from some request on", not wrong, lost, seconds, wrong)


def _half_written(run_dir: Path, answers: int) -> str:
    """What is wrong with the files of a rollout that was broken off."""
    rollout_id, done = divmod(answers, PER_ROLLOUT)
    if partial_rollouts(run_dir / "rollouts") != [rollout_id]:
        return f"no file of what was finished of rollout {rollout_id}"
    _, samples = read_rollout(run_dir / "rollouts", rollout_id, partial=True)
    left = list(run_dir.glob("**/*.tmp"))
    return (
        ""
        if len(samples) == done and not left
        else f"{len(samples)} of {done} responses are kept, {len(left)} half files"
    )
