"""The rollouts of a run: prompts, responses, rewards, checks and files, the same samples on every rank.

Responses are asked for by the ranks that hold an engine, rewards and files are the first rank's. With rollouts ahead,
engines work in a thread of their own, in the order in which rollouts and new weights were handed to them, so that a
rollout is sampled by the same weights however long anything takes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from p3o_train.agreement import everywhere, on_first_rank
from p3o_train.contract import Contract, check_samples
from p3o_train.engine import RolloutEngine, RolloutFailed
from p3o_train.random_state import named_generator
from p3o_train.recording import Request, Response, Sampling
from p3o_train.rollout_files import RolloutFileError, has_rollout, partial_rollouts, read_rollout, write_rollout
from p3o_train.tasks import Prompt, Task
from p3o_train.types import Sample

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """What every rollout of a run has in common."""

    batch_size: int
    """Prompts of a rollout."""
    group_size: int
    """Responses to each prompt."""
    sampling: Sampling
    evaluation: Sampling
    contract: Contract
    """What a response must hold to be trained on."""
    seed: int
    ahead: int = 0
    """Rollouts that are sampled while an earlier one is trained on; 0: none."""
    directory: Path | None = None
    """Of rollout files; None writes none."""
    identity: str = ""
    """Of the run, in every file: files of another run are refused."""


@dataclasses.dataclass(frozen=True)
class EngineShare:
    """The engine that this rank holds, and which requests it answers."""

    engine: RolloutEngine | None
    """None: other ranks sample."""
    index: int = 0
    count: int = 1
    """Requests index, index + count, ... of a rollout."""


class Rollouts:
    """Where the samples of a run come from. All ranks call the same methods in the same order."""

    def __init__(self, task: Task, share: EngineShare, settings: RolloutSettings) -> None:
        """Responses of rollouts that were broken off are read from their files and not asked for again."""
        self._task, self._share, self.settings = task, share, settings
        self._thread = ThreadPoolExecutor(1, "p3o rollouts") if settings.ahead else None
        self._updates: deque[Future[None]] = deque()
        self._begun: dict[int, Future[dict[int, Response]]] = {}
        self._done: dict[int, list[Sample]] = {}
        self._known: dict[int, dict[int, Response]] = {}
        self.reward_failures = 0
        """Rewards so far that failed and were taken for 0."""
        if settings.directory is not None:
            self._known = everywhere(self._read_partial)[0]

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Rollouts that are begun from now on are sampled by these weights (see ``RolloutEngine``)."""
        engine = self._share.engine

        def update() -> None:
            if engine is not None:
                engine.update_weights(weights, version)

        if self._thread is None:
            everywhere(update)
        else:
            self._updates.append(self._thread.submit(update))

    def begin(self, rollout_id: int) -> None:
        """Lets the engines work on a rollout while this thread goes on; nothing where no rollouts are ahead."""
        if self._thread is not None and rollout_id not in self._begun and rollout_id not in self._done:
            self._begun[rollout_id] = self._thread.submit(self._answers, rollout_id)

    def finish(self, rollout_id: int) -> list[Sample]:
        """The scored and checked samples of a rollout, the same on every rank, written before they are returned.

        Raises:
            RolloutFailed: requests that were not answered. What was is in a file, and used when the run goes on.
            ContractViolation: log-probs that cannot be trained on.
        """
        if rollout_id in self._done:
            return self._done.pop(rollout_id)
        stored: list[Sample] | None = everywhere(lambda: self._stored(rollout_id))[0]
        if stored is not None:
            self._begun.pop(rollout_id, None)
            return stored
        responses = self._gathered(rollout_id)
        prompts = self._prompts(rollout_id)
        rewards, self.reward_failures = everywhere(lambda: self._rewards(rollout_id, prompts, responses))[0]
        samples = [
            self._sample(rollout_id, index, prompt, responses.get(index), reward)
            for index, (prompt, reward) in enumerate(zip(prompts, rewards, strict=True))
        ]
        check_samples(samples, self.settings.contract, weight_version=rollout_id)
        self._write(rollout_id, samples)
        return samples

    def settle(self) -> None:
        """Waits for every rollout that was begun, so that its file is there."""
        for rollout_id in sorted(self._begun):
            self._done[rollout_id] = self.finish(rollout_id)

    def evaluate(self, prompts: Sequence[Prompt]) -> float:
        """Mean reward of one response to each prompt, sampled by the weights that the engines have."""
        names = [f"evaluation {index}" for index in range(len(prompts))]
        seeds = _seeds(self.settings.seed, "evaluation", len(prompts))
        requests = [Request(*asked) for asked in zip(names, [p.token_ids for p in prompts], seeds, strict=True)]

        def answer() -> dict[int, Response]:
            return self._ask(dict(enumerate(requests)), self.settings.evaluation)

        parts = everywhere(lambda: self._in_order(answer))
        responses = {index: response for part in parts for index, response in part.items()}
        tokens = [responses[index].token_ids for index in range(len(prompts))]
        rewards = everywhere(lambda: self._task.rewards(prompts, tokens, names) if _is_first() else [])[0]
        return sum(rewards) / len(rewards)

    def close(self) -> None:
        """Ends the thread and gives the engine back."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._share.engine is not None:
            self._share.engine.close()
        self._task.close()

    def _prompts(self, rollout_id: int) -> list[Prompt]:
        asked = self._task.prompts(rollout_id, self.settings.batch_size)
        return [prompt for prompt in asked for _ in range(self.settings.group_size)]

    def _answers(self, rollout_id: int) -> dict[int, Response]:
        """This rank's part of a rollout: index of the request -> response."""
        known = self._known.pop(rollout_id, {})
        prompts = self._prompts(rollout_id)
        seeds = _seeds(self.settings.seed, f"responses of rollout {rollout_id}", len(prompts))
        requests = {
            index: Request(_name(rollout_id, index), tuple(prompt.token_ids), seed)
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        }
        missing = {index: request for index, request in requests.items() if index not in known}
        return self._ask(missing, self.settings.sampling, known)

    def _ask(
        self, requests: Mapping[int, Request], sampling: Sampling, known: Mapping[int, Response] | None = None
    ) -> dict[int, Response]:
        share = self._share
        if share.engine is None:
            return {}
        mine = {index: request for index, request in requests.items() if index % share.count == share.index}
        answered = {index: one for index, one in (known or {}).items() if index % share.count == share.index}
        indices = list(mine)
        try:
            made = share.engine.generate(list(mine.values()), sampling) if mine else []
        except RolloutFailed as failure:
            finished = {indices[place]: response for place, response in failure.finished.items()}
            raise RolloutFailed(str(failure), answered | finished) from failure
        return answered | dict(zip(indices, made, strict=True))

    def _gathered(self, rollout_id: int) -> dict[int, Response]:
        """Every response of a rollout, on every rank."""
        begun = self._begun.pop(rollout_id, None)

        def part() -> dict[int, Response] | RolloutFailed:
            try:
                made = begun.result() if begun is not None else self._in_order(lambda: self._answers(rollout_id))
            except RolloutFailed as failure:  # what others have finished is kept as well
                return failure
            while self._updates and self._updates[0].done():
                self._updates.popleft().result()  # raises what went wrong with the weights
            return made

        parts = everywhere(part)
        failures = [made for made in parts if isinstance(made, RolloutFailed)]
        responses: dict[int, Response] = {}
        for made in parts:
            responses |= made.finished if isinstance(made, RolloutFailed) else made
        if failures:
            raise self._broken_off(rollout_id, failures[0], responses)
        return responses

    def _in_order(self, action: Callable[[], T]) -> T:
        """Behind what the thread has been given before, if there is a thread."""
        return action() if self._thread is None else self._thread.submit(action).result()

    def _broken_off(self, rollout_id: int, failure: RolloutFailed, responses: dict[int, Response]) -> RolloutFailed:
        prompts = self._prompts(rollout_id)
        unscored = float("nan")
        samples = [
            self._sample(rollout_id, index, prompts[index], response, unscored)
            for index, response in sorted(responses.items())
        ]
        self._write(rollout_id, samples, partial=True)
        kept = ""
        if self.settings.directory is not None:
            kept = f"; the finished ones are in {self.settings.directory} and are used when the run goes on (--resume)"
        text = f"rollout {rollout_id}: {failure} ({len(responses)} of {len(prompts)} responses were finished{kept})"
        return RolloutFailed(text, responses)

    def _rewards(
        self, rollout_id: int, prompts: Sequence[Prompt], responses: Mapping[int, Response]
    ) -> tuple[list[float], int]:
        """On the first rank one for each prompt, and how many so far were taken for 0 because they failed."""
        if not _is_first():
            return [], 0
        scored = [index for index in range(len(prompts)) if index in responses]
        tokens = [responses[index].token_ids for index in scored]
        names = [_name(rollout_id, index) for index in scored]
        rewards = dict(
            zip(scored, self._task.rewards([prompts[index] for index in scored], tokens, names), strict=True)
        )
        return [rewards.get(index, 0.0) for index in range(len(prompts))], self._task.reward_failures

    def _sample(self, rollout_id: int, index: int, prompt: Prompt, response: Response | None, reward: float) -> Sample:
        name = _name(rollout_id, index)
        if response is None or not response.token_ids:  # nothing to train on, and nothing to be compared with
            nothing = torch.zeros(0)
            return Sample(name, torch.tensor(prompt.token_ids), 0, nothing, nothing.bool(), is_dummy=True)
        return Sample.from_lists(
            [*prompt.token_ids, *response.token_ids],
            len(response.token_ids),
            response.log_probs,
            sample_id=name,
            reward=reward,
            group_id=index // self.settings.group_size,
            recording=response.recording,
        )

    def _write(self, rollout_id: int, samples: Sequence[Sample], partial: bool = False) -> None:
        directory = self.settings.directory
        if directory is not None:
            header = {"identity": self.settings.identity}
            on_first_rank(lambda: write_rollout(directory, rollout_id, samples, header, partial=partial))

    def _stored(self, rollout_id: int) -> list[Sample] | None:
        """The samples of a rollout that this run has finished before; read by the first rank."""
        directory = self.settings.directory
        if directory is None or not _is_first() or not has_rollout(directory, rollout_id):
            return None
        header, samples = read_rollout(directory, rollout_id)
        self._check_identity(header, rollout_id)
        return samples

    def _read_partial(self) -> dict[int, dict[int, Response]]:
        directory, known = self.settings.directory, {}
        if directory is not None and _is_first():
            for rollout_id in partial_rollouts(directory):
                header, samples = read_rollout(directory, rollout_id, partial=True)
                self._check_identity(header, rollout_id)
                known[rollout_id] = {_index(sample): _response(sample) for sample in samples if sample.recording}
        return known

    def _check_identity(self, header: Mapping[str, Any], rollout_id: int) -> None:
        if header.get("identity") != self.settings.identity:
            raise RolloutFileError(
                f"the file of rollout {rollout_id} in {self.settings.directory} was written by a run with other "
                "settings; go on with the settings of that run, or name another --run-dir"
            )


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _name(rollout_id: int, index: int) -> str:
    return f"rollout {rollout_id}, response {index}"


def _index(sample: Sample) -> int:
    return int(sample.sample_id.rpartition(" ")[2])


def _response(sample: Sample) -> Response:
    if sample.recording is None:
        raise ValueError(f"sample {sample.sample_id!r} has no recording")
    return Response(sample.response_ids.tolist(), sample.behavior_log_probs.tolist(), sample.recording)


def _seeds(seed: int, name: str, count: int) -> list[int]:
    """Of each response: the same in every topology, and when the run goes on."""
    generator = named_generator(seed, name)
    drawn: list[int] = torch.randint(2**63 - 1, (count,), generator=generator).tolist()
    return drawn
