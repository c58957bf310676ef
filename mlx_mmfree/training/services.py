"""Sends the log of a run to Weights & Biases or to TensorBoard as well."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import TrainingError, UsageError
from .data_parallel import DataParallel
from .results import Callback


class WandbReport(Callback):
    """Sends the records to Weights & Biases.

    Args:
        project: Name of the project; `None` leaves it to wandb.
        folder: Folder of the run, which names the run.
        settings: The settings, which are sent with the run.

    Raises:
        TrainingError: wandb is not installed.
    """

    def __init__(self, project: str | None, folder: Path, settings: Mapping[str, Any]):
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", "wandb") from error
        self._init = wandb.init
        self._options: dict[str, Any] = {
            "project": project,
            "name": folder.resolve().name,
            "dir": str(folder),
            "config": dict(settings),
        }

    def on_begin(self, step: int) -> None:
        hint = "Run 'wandb login', or set WANDB_MODE=offline to keep the run on this machine"
        with _starting("wandb", hint):
            self._run = self._init(**self._options)

    def on_train(self, record: Mapping[str, Any]) -> None:
        self._run.log(_numbers(record), step=record["step"])

    def on_validation(self, record: Mapping[str, Any]) -> None:
        self.on_train(record)

    def on_end(self) -> None:
        self._run.finish()


class TensorBoardReport(Callback):
    """Writes the records as events that TensorBoard shows: `tensorboard --logdir FOLDER`.

    Args:
        folder: Folder of the run; the events go into its folder `tensorboard`.
        settings: The settings, which are shown as text.

    Raises:
        TrainingError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", "tensorboardX") from error
        self._make = SummaryWriter
        self._folder = folder / "tensorboard"
        self._settings = settings

    def on_begin(self, step: int) -> None:
        with _starting("tensorboard", f"Check the folder '{self._folder}'"):
            # a resumed run repeats what came after its checkpoint
            self._writer = self._make(str(self._folder), purge_step=step + 1 if step else None)
        rows = [f"| {name} | {value} |" for name, value in self._settings.items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), 0)

    def on_train(self, record: Mapping[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def on_validation(self, record: Mapping[str, Any]) -> None:
        self.on_train(record)

    def on_end(self) -> None:
        self._writer.close()


SERVICES = ("wandb", "tensorboard")


def chosen_services(given: str | None, command: str) -> list[str]:
    """The services of a text in which commas separate them.

    Raises:
        UsageError: One is unknown. The message names the command.
    """
    names = [name.strip() for name in given.split(",")] if given else []
    for name in names:
        if name not in SERVICES:
            raise UsageError(
                f"[{command}] 'report_to' must be {' or '.join(SERVICES)} but got {name!r:.80}."
            )
    return names


def service_callbacks(
    services: Collection[str],
    project: str | None,
    folder: Path,
    record: Mapping[str, Any],
    processes: DataParallel,
) -> list[Callback]:
    """The callbacks of services. Only the first process has any."""
    callbacks: list[Callback] = []
    if processes.is_first and "wandb" in services:
        callbacks.append(WandbReport(project, folder, record))
    if processes.is_first and "tensorboard" in services:
        callbacks.append(TensorBoardReport(folder, record))
    return callbacks


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a record; each layer's metrics have a name of their own."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            numbers |= {f"{name}/{layer:03}": each for layer, each in enumerate(value)}
        elif name != "step":
            numbers[name] = value
    return numbers


@contextmanager
def _starting(service: str, hint: str) -> Iterator[None]:
    """Turns whatever a service raises when it starts into one line; each has errors of its own.

    Raises:
        TrainingError: The service does not start.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise TrainingError(
            f"[training] 'report_to' {service} does not start: {reason:.300}. {hint}, or leave "
            f"{service} out."
        ) from error


def _missing(service: str, package: str) -> TrainingError:
    return TrainingError(
        f"[training] 'report_to' {service} needs the package {package}, which is not installed. "
        f"Install it: pip install {package}"
    )
