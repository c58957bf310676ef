"""The loop over steps: validation, reports, progress and the best weights."""

import math
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import TrainingError, TrainingStopped, install_extra
from ..layers import set_quantization_strength
from ..models import TokenModel
from ..platform.progress import Progress
from ..platform.resident_memory import resident_memory
from . import run_folder
from .curve import plot_run
from .data_parallel import DataParallel
from .losses.loss import Loss, next_token_loss
from .optimizer_step import Batches, LearningRate, OptimizerStep, StepResult
from .results import Callback, Clock, RunLog, environment, read_log
from .run_settings import LoopSettings
from .stopping import StopRequest
from .ternary_changes import TernaryWeights

Validation = Callable[[Any], dict[str, Any]]
"""Maps the model to metrics by name. The metric `valid_loss` decides which weights are the best."""


class Trainer:
    """Trains a model step by step. A run can be killed at any time and resumed.

    Only the trainable parameters and running statistics are changed, written to checkpoints and
    restored from them.

    Args:
        model: The model. Its trainable parameters are changed in place.
        settings: The run.
        optimizer: The optimizer, which gets the mean gradient.
        schedule: The learning rate of each step.
        batches: The batches of each step.
        validation: Measures the model every `steps_per_eval` steps and at the end.
        loss: The sum of the losses of a batch.
        processes: The processes that train together, each on batches of its own; `None` takes all that
            `mlx.launch` started, or this one alone.
        callbacks: Are called with each record, best model and checkpoint.
        metrics: What else the log says of the last step.

    Raises:
        TrainingError: The model has no trainable parameters, `quantization_warmup` is given for a model
            without quantisation, or `patience` without a validation.
    """

    def __init__(
        self,
        model: TokenModel,
        settings: LoopSettings,
        optimizer: optim.Optimizer,
        schedule: LearningRate,
        batches: Batches,
        validation: Validation | None = None,
        *,
        loss: Loss = next_token_loss,
        processes: DataParallel | None = None,
        callbacks: Sequence[Callback] = (),
        metrics: Callable[[], dict[str, float]] | None = None,
    ):
        if not tree_flatten(model.trainable_parameters()):
            raise TrainingError(
                "[training] 'model' must have trainable parameters but all are frozen. Unfreeze what is "
                "to be trained, or add adapters."
            )
        if settings.quantization_warmup and not set_quantization_strength(model, 1):
            raise TrainingError(
                "[training] 'quantization_warmup' must be 0 for a model without ternary layers in their "
                f"training variant but got {settings.quantization_warmup}. Leave it out."
            )
        if settings.patience and validation is None:
            raise TrainingError(
                "[training] 'patience' must be 0 where nothing is validated but got "
                f"{settings.patience}. Give held-out text or samples too."
            )
        self.model = model
        self._settings = settings
        self._optimizer = optimizer
        self._optimizer.init(model.trainable_parameters())
        self._validation = validation
        self._processes = DataParallel() if processes is None else processes
        self._step = OptimizerStep(
            model, settings, optimizer, schedule, batches, loss, self._processes
        )
        self._callbacks = callbacks if self._processes.is_first else ()
        self._metrics = metrics
        # before a checkpoint is restored, so that a resumed run compares with the same weights
        self._ternary = TernaryWeights(model)
        self._is_extended = False
        self._progress = run_folder.new_progress(settings.record)

    def train(self) -> dict[str, Any]:
        """Runs up to the last step, or until validations have not improved for long enough.

        The first Ctrl-C or SIGTERM ends the run after the current step and saves its state.

        Returns:
            The progress of the run: step, tokens, best loss and step.

        Raises:
            TrainingError: The loss is not finite, the folder cannot be written, or the checkpoint in
                the folder belongs to a run with other settings.
            TrainingStopped: A signal ended the run early.
        """
        self._resume()
        is_first = self._processes.is_first
        self._processes.check_same("step", self._progress["step"])
        # no name holds these weights, whose memory new ones take from the first step on
        self.model.update(
            self._processes.of_first(tree_unflatten(list(run_folder.learned(self.model).items())))
        )
        with ExitStack() as ends:
            for callback in self._callbacks:
                callback.on_begin(self._progress["step"])
                ends.callback(callback.on_end)
            log = self._begin()
            done = self._progress["step"]
            bar = Progress(
                "training", self._settings.steps, "step", is_shown=is_first, initial=done
            )
            with bar, StopRequest(is_quiet=not is_first) as request:
                self._run(log, bar, request)
        if is_first and self._progress["step"] < self._settings.steps:
            print(
                f"The run ends after step {self._progress['step']} of {self._settings.steps}: "
                f"{self._settings.patience} validations in a row gave no better loss.",
                file=sys.stderr,
            )
        folder = self._settings.folder
        curve = folder / "curve.png"
        if is_first and not plot_run(
            read_log(folder / run_folder.LOG_FILE), folder.resolve().name, curve
        ):
            print(
                "No loss curve was drawn, because matplotlib is not installed. "
                + install_extra("plot"),
                file=sys.stderr,
            )
        return self._progress

    def _begin(self) -> RunLog:
        """Opens the log. The log of a new run gets its first records."""
        settings, step = self._settings, self._progress["step"]
        log = RunLog(
            settings.folder / run_folder.LOG_FILE if self._processes.is_first else None, step
        )
        mx.reset_peak_memory()
        if step == 0:
            processes = self._processes.size
            ternary = {"ternary_layers": self._ternary.names} if self._ternary.names else {}
            log.write(
                step=0,
                **environment(),
                processes=processes,
                settings=settings.record,
                **ternary,
            )
            if settings.validates_first:
                self._validate(log)
        elif self._is_extended:
            log.write(step=step, extended_to=settings.steps)
        return log

    def _run(self, log: RunLog, bar: Progress, request: StopRequest) -> None:
        settings, progress = self._settings, self._progress
        self.model.train()
        clock = Clock()
        while progress["step"] < settings.steps and not self._is_out_of_patience():
            result = self._step(progress["step"])
            progress["step"] += 1
            progress["tokens"] += result.tokens
            progress["unreported"]["loss"] += result.loss
            progress["unreported"]["terms"] += result.terms
            clock.tokens += result.tokens
            bar.update()
            if self._is_due(settings.steps_per_report):
                record = self._report(log, clock, result)
                bar.set_postfix_str(
                    f"loss {record['loss']:.3f}, {record['tokens_per_second']:.0f} {settings.unit}/s",
                    # the next step shows it
                    refresh=False,
                )
            with clock.paused():
                if self._is_due(settings.steps_per_eval):
                    self._validate(log)
                stop = self._processes.largest(request.signal)
                if stop or self._is_due(settings.save_every) or self._is_out_of_patience():
                    self._save()
            if stop:
                raise TrainingStopped(
                    f"[training] {signal.Signals(stop).name} stopped the run after step "
                    f"{progress['step']} of {settings.steps}; its state is kept in "
                    f"'{settings.folder}'. Repeat the command to go on from there.",
                    stop,
                )

    def _is_due(self, every: int) -> bool:
        step: int = self._progress["step"]
        return step % every == 0 or step == self._settings.steps

    def _is_out_of_patience(self) -> bool:
        patience: int = self._settings.patience
        return 0 < patience <= self._progress["validations_since_best"]

    def _resume(self) -> None:
        folder = self._settings.folder
        progress = run_folder.read_progress(folder)
        if progress is None:
            return
        self._is_extended = run_folder.check_record(folder, progress, self._settings.record)
        run_folder.restore_checkpoint(folder, self.model, self._optimizer)
        self._progress = progress | {"settings": self._settings.record}

    def _report(self, log: RunLog, clock: Clock, result: StepResult) -> dict[str, Any]:
        progress = self._progress
        sums = progress["unreported"]
        memory = resident_memory()
        record = {
            "step": progress["step"],
            "tokens": progress["tokens"],
            "loss": sums["loss"] / sums["terms"],
            **({} if self._metrics is None else self._metrics()),
            "learning_rate": result.learning_rate,
            "gradient_norm": result.gradient_norm,
            "tokens_per_second": clock.rate(),
            "peak_memory_bytes": mx.get_peak_memory(),
            **({} if memory is None else memory._asdict()),
        }
        progress["unreported"] = {"loss": 0.0, "terms": 0}
        log.write(**record)
        for callback in self._callbacks:
            callback.on_train(record)
        return record

    def _validate(self, log: RunLog) -> None:
        if self._validation is None:
            return
        progress = self._progress
        self.model.eval()
        metrics = self._processes.of_first(self._validation(self.model) | self._ternary.metrics())
        self.model.train()
        if not math.isfinite(metrics["valid_loss"]):
            raise TrainingError(
                f"[training] the validation loss is {metrics['valid_loss']} at step {progress['step']}; "
                f"{run_folder.saved_state(self._settings.folder)}. Lower 'learning_rate'."
            )
        record = {"step": progress["step"], "tokens": progress["tokens"], **metrics}
        log.write(**record)
        is_best = metrics["valid_loss"] < progress["best_loss"]
        if is_best:
            progress["best_loss"], progress["best_step"] = metrics["valid_loss"], progress["step"]
            progress["validations_since_best"] = 0
        else:
            progress["validations_since_best"] += 1
        for callback in self._callbacks:
            callback.on_validation(record)
            if is_best:
                callback.on_best(progress["step"])

    def _save(self) -> None:
        # first what belongs to the checkpoint: a run that is killed in between writes both again
        for callback in self._callbacks:
            callback.on_save(self._progress["step"])
        if self._processes.is_first:
            with run_folder.writing(self._settings.folder):
                run_folder.save_checkpoint(
                    self._settings.folder, self.model, self._optimizer, self._progress
                )
