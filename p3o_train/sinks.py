"""Where the numbers of a step go: files of JSON lines always, TensorBoard and Weights & Biases as wanted.

Only the rank that logs opens sinks.

A line of the file is one strict JSON object, ``{"step": 3, "train/reward_mean": 0.5}``. JSON has neither NaN nor
infinity, so such a number is written as null: readers of tables take null for a missing number and keep the column
numeric. ``read_jsonl`` gives it back as NaN.

Counts of log-ratios (``p3o_train.histogram``) are no numbers to draw over the steps: they have a file of their own, and
the other places do not get them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from p3o_train.histogram import PREFIX

FILE_NAME = "metrics.jsonl"
HISTOGRAM_FILE = "ratio_histogram.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the numbers of every step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of one step, under their names."""

    def close(self) -> None:
        """Nothing can be written afterwards."""


class JsonlSink:
    """One JSON object a line. A process that is killed leaves at most one torn line, the last one.

    A machine that goes down may lose the lines that it has not put on disk yet.

    Args:
        path: the file, in a folder that exists.
        resume_step: the first step that will be written, when a run goes on. Lines of earlier steps stay as they are,
            later ones and a torn last one go, so that the file ends as that of a run that was never interrupted.
            Without a file a new one begins. None: a new run.

    Raises:
        FileExistsError: a new run, and the file exists.
        ValueError: a negative ``resume_step``; a line that is not one of this class. The file is as it was.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        path = Path(path)
        kept = _kept_bytes(path, resume_step)
        if kept is not None:
            replace_file(path, kept)
        self._file = open(path, "x" if kept is None else "a", encoding="utf-8", newline="\n")  # noqa: SIM115
        self._warned: set[str] = set()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line.

        Raises:
            ValueError: a number called "step".
        """
        if "step" in values:
            raise ValueError(f'values must not have the name "step", which is that of the step itself; got {values}')
        numbers = {name: float(value) for name, value in _to_draw(values).items()}
        for name in [name for name, number in numbers.items() if not math.isfinite(number)]:
            if name not in self._warned:
                _log.warning("step %d: %s is %s, written as null from now on", step, name, numbers[name])
                self._warned.add(name)
        finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        self._file.write(json.dumps({"step": int(step), **finite}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The lines of a ``JsonlSink``: the step, an int, under "step", other numbers as floats, null as NaN.

    A torn last line is left out.

    Raises:
        ValueError: any other line that is no object of numbers with a step, by its number.
    """
    return [row for row, _ in _parsed(Path(path), Path(path).read_bytes())]


def _parsed(path: Path, content: bytes) -> list[tuple[dict[str, float], bytes]]:
    """(row, line) of every complete line."""
    *lines, last = content.split(b"\n")
    parsed = []
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is None:
            raise ValueError(
                f'{path}, line {number}: expected a JSON object of numbers with a whole "step", got {line[:80]!r}; '
                "repair or remove the line"
            )
        parsed.append((row, line))
    # without its end of line a line may be torn, or may lack nothing else
    row = _row(last)
    return parsed if row is None else [*parsed, (row, last)]


def _row(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line.decode())
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    # bool is a kind of int, but no number of a step
    if not all(value is None or type(value) in (int, float) for value in row.values()):
        return None
    return {name: math.nan if value is None else value for name, value in row.items()}


def _kept_bytes(path: Path, resume_step: int | None) -> bytes | None:
    """What a sink that goes on keeps of the file; None: there is no file, as a new run needs it."""
    if resume_step is not None and resume_step < 0:
        raise ValueError(f"resume_step must be >= 0, the first step that will be written; got {resume_step}")
    if not path.exists():
        return None
    if resume_step is None:
        raise FileExistsError(
            f"{path} exists: it holds the numbers of another run. Pass resume_step, the first step that will be "
            "written, to go on with that run from a checkpoint; otherwise choose another folder or remove the file"
        )
    lines = [line + b"\n" for row, line in _parsed(path, path.read_bytes()) if row["step"] < resume_step]
    return b"".join(lines)


def replace_file(path: Path, content: bytes) -> None:
    """All of the content or the file as it was, whatever happens in between."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class HistogramSink:
    """The counts of log-ratios, and nothing else: ``{"step": 3, "-0.01": 17.0, "0.001": 4.0}``, by the lower edges of
    the bins that are not empty. A step without counts has no line.

    Arguments and errors are those of ``JsonlSink``.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self._lines = JsonlSink(path, resume_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line, where there are counts."""
        counts = {name.removeprefix(PREFIX): value for name, value in values.items() if name.startswith(PREFIX)}
        if counts:
            self._lines.write(step, counts)

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def _to_draw(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith(PREFIX)}


class TensorBoardSink:
    """Event files in ``directory``.

    Args:
        resume_step: the first step that will be written, when a run goes on: TensorBoard hides what the interrupted
            run had written from there on.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("tensorboard=True needs a package that is not here: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(os.fspath(directory), purge_step=resume_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar each."""
        for name, value in _to_draw(values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases, which begins here. A run that goes on is a second one there, of the same name.

    Args:
        project: where the run is listed.
        name: of the run.
        config: what the run was started with.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any] | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                f"wandb_project={project!r} needs a package that is not here: pip install wandb"
            ) from error
        self._run: Any = wandb.init(project=project, name=name, config=dict(config or {}))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """All numbers at once."""
        self._run.log(_to_draw(values), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def open_sinks(
    directory: str | os.PathLike[str],
    *,
    tensorboard: bool | None = None,
    wandb_project: str | None = None,
    resume_step: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[Sink]:
    """The sinks of a run, ``directory/metrics.jsonl`` first and ``directory/ratio_histogram.jsonl`` second. One line of
    the log says which.

    Args:
        directory: the folder of the run, made if needed; its name is that of the run in Weights & Biases.
        tensorboard: event files in ``directory/tensorboard``. None: if tensorboard is installed.
        wandb_project: the project in Weights & Biases. None: nothing goes there.
        resume_step: the first step that will be written, when a run goes on; None for a new run.
        config: what the run was started with, for Weights & Biases.

    Raises:
        ImportError: what was asked for is not installed.
        FileExistsError, ValueError: those of ``JsonlSink``.
    """
    directory = Path(directory)
    installed = importlib.util.find_spec("tensorboard") is not None
    for name in (FILE_NAME, HISTOGRAM_FILE):  # for their errors: before anything is begun elsewhere
        _kept_bytes(directory / name, resume_step)
    directory.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = []
    places = [str(directory / FILE_NAME), str(directory / HISTOGRAM_FILE)]
    with contextlib.ExitStack() as opened:
        if installed if tensorboard is None else tensorboard:
            sinks.append(TensorBoardSink(directory / TENSORBOARD_FOLDER, resume_step))
            opened.callback(sinks[-1].close)
            places.append(f"TensorBoard in {directory / TENSORBOARD_FOLDER}")
        elif tensorboard is None:
            places.append("not to TensorBoard, which is not installed (pip install tensorboard)")
        if wandb_project is not None:
            sinks.append(WandbSink(wandb_project, directory.resolve().name, config))
            opened.callback(sinks[-1].close)
            places.append(f"the W&B project {wandb_project}")
        # last, so that a second try after an error above finds no file
        sinks.insert(0, JsonlSink(directory / FILE_NAME, resume_step))
        opened.callback(sinks[0].close)
        sinks.insert(1, HistogramSink(directory / HISTOGRAM_FILE, resume_step))
        opened.pop_all()
    _log.info("the numbers of every step go to %s", ", ".join(places))
    return sinks
