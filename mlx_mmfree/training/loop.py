"""The training loop."""

import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_reduce
from tqdm import tqdm

from ..errors import TrainingError, TrainingStopped
from ..layers import set_quantization_strength
from ..models import Decoder
from ..ops import long_sum
from .batches import Batch
from .callbacks import Callback
from .checkpoint import (
    check_record,
    kept_state,
    new_progress,
    read_progress,
    restore_checkpoint,
    save_checkpoint,
)
from .data_parallel import DataParallel
from .interruption import StopRequest
from .log import Clock, RunLog, environment, plot_curve
from .loss import Loss, next_token_loss
from .run_folder import writing

Batches = Callable[[int], list[Batch]]
"""Maps a step to its batches, one for each accumulated forward pass."""

Validation = Callable[[Decoder], dict[str, float]]
"""Maps the model to named figures; `valid_loss` picks the best weights."""


class Sums(NamedTuple):
    """What a step adds up over its batches, before anything is divided.

    Attributes:
        loss: Sum of the losses, float32 `()`.
        tokens: Number of learned tokens, int32 `()`.
        gradient: Sum of the gradients, as `model.trainable_parameters()`.
    """

    loss: mx.array
    tokens: mx.array
    gradient: Any


@dataclass(frozen=True)
class LoopSettings:
    """How long the loop runs and what it does on the way.

    Attributes:
        folder: Log, curve and checkpoint.
        steps: Optimizer steps.
        seed: Seed of dropout, together with the step.
        clip_norm: Largest norm of the gradient; 0 means no clipping.
        steps_per_report: Steps between two log lines.
        steps_per_eval: Steps between two validations.
        save_every: Steps between two checkpoints.
        patience: Validations in a row without a better loss after which the run ends; 0: never.
        validates_first: Also measure the model before the first step.
        quantization_warmup: Steps over which weights and activations of ternary layers pass from float
            to quantised; validations measure quantised ones. 0: quantised from the start.
        clear_cache_bytes: MLX's cache is cleared after a step that leaves it larger; `None`: never.
        record: What must be the same when the run is resumed, as plain values. Its `steps` alone, if
            it has them, may grow once the run is finished.
    """

    folder: Path
    steps: int
    seed: int = 0
    clip_norm: float = 0.0
    steps_per_report: int = 10
    steps_per_eval: int = 200
    save_every: int = 100
    patience: int = 0
    validates_first: bool = False
    quantization_warmup: int = 0
    clear_cache_bytes: int | None = None
    record: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains a model step by step, and can be killed and resumed at any step.

    Only the trainable parameters are learned, kept in checkpoints and restored from them.

    Args:
        model: The model, its trainable parameters are changed in place.
        settings: The run.
        optimizer: Takes the mean gradient.
        schedule: Learning rate of a step, counted from 0.
        batches: The data.
        validation: Measures the model; called every `steps_per_eval` steps and at the end.
        loss: Sum of the losses of a batch.
        processes: Those that train together, each on batches of its own; `None`: all that
            `mlx.launch` started, or this one.
        callbacks: Told of each record, best model and checkpoint.

    Raises:
        TrainingError: The model has no trainable parameters, or no quantisation to warm up.
    """

    def __init__(
        self,
        model: Decoder,
        settings: LoopSettings,
        optimizer: optim.Optimizer,
        schedule: Callable[[int], mx.array],
        batches: Batches,
        validation: Validation | None = None,
        *,
        loss: Loss = next_token_loss,
        processes: DataParallel | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        if not tree_flatten(model.trainable_parameters()):
            raise TrainingError("[training] the model has no trainable parameters: all are frozen.")
        if settings.quantization_warmup and not set_quantization_strength(model, 1):
            raise TrainingError(
                "[training] 'quantization_warmup' must be 0 for a model without ternary layers in their "
                f"training form but got {settings.quantization_warmup}."
            )
        self.model = model
        self._settings = settings
        self._optimizer = optimizer
        self._optimizer.init(model.trainable_parameters())
        self._schedule = schedule
        self._batches = batches
        self._validation = validation
        self._loss_and_gradient = nn.value_and_grad(model, loss)
        self._processes = DataParallel() if processes is None else processes
        self._callbacks = callbacks if self._processes.is_first else ()
        self._is_extended = False
        self._progress = new_progress(settings.record)

    def train(self) -> dict[str, Any]:
        """Runs to the last step, or until patience ends; returns the progress record.

        The first Ctrl-C or SIGTERM ends the run after the step, with its state saved.

        Raises:
            TrainingError: The loss is not finite, the folder cannot be written, or the run's
                checkpoint has other settings.
            TrainingStopped: The run was asked to end.
        """
        self._resume()
        is_first = self._processes.is_first
        self._processes.check_same("step", self._progress["step"])
        self.model.update(self._processes.of_first(self.model.trainable_parameters()))
        log = self._begin()
        bar = tqdm(
            total=self._settings.steps,
            initial=self._progress["step"],
            unit="step",
            dynamic_ncols=True,
            # left out where stderr is no terminal
            disable=None if is_first else True,
        )
        with bar, StopRequest(is_quiet=not is_first) as request:
            self._run(log, bar, request)
        if is_first and self._progress["step"] < self._settings.steps:
            print(
                f"The run ends after step {self._progress['step']} of {self._settings.steps}: "
                f"{self._settings.patience} validations in a row gave no better loss.",
                file=sys.stderr,
            )
        curve = self._settings.folder / "curve.png"
        if is_first and not plot_curve(self._settings.folder / "log.jsonl", curve):
            print(
                "No curve was drawn: pip install 'mlx-mmfree[plot]' adds matplotlib.",
                file=sys.stderr,
            )
        return self._progress

    def _begin(self) -> RunLog:
        """The log of the run; of a new one, with its first records."""
        settings, step = self._settings, self._progress["step"]
        log = RunLog(settings.folder / "log.jsonl" if self._processes.is_first else None, step)
        mx.reset_peak_memory()
        if step == 0:
            processes = self._processes.size
            log.write(step=0, **environment(), processes=processes, settings=settings.record)
            if settings.validates_first:
                self._validate(log)
        elif self._is_extended:
            log.write(step=step, extended_to=settings.steps)
        return log

    def _run(self, log: RunLog, bar: tqdm, request: StopRequest) -> None:
        settings, progress = self._settings, self._progress
        self.model.train()
        clock = Clock()
        while progress["step"] < settings.steps and not self._is_out_of_patience():
            loss, tokens, norm, rate = self._step(progress["step"])
            progress["step"] += 1
            progress["tokens"] += tokens
            progress["unreported"]["loss"] += loss
            progress["unreported"]["tokens"] += tokens
            clock.tokens += tokens
            bar.update()
            if self._is_due(settings.steps_per_report):
                record = self._report(log, clock, norm, rate)
                bar.set_postfix_str(
                    f"loss {record['loss']:.3f}, {record['tokens_per_second']:.0f} tokens/s"
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
                    f"'{settings.folder}'. The same command goes on from there.",
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
        progress = read_progress(folder)
        if progress is None:
            return
        self._is_extended = check_record(folder, progress, self._settings.record)
        restore_checkpoint(folder, self.model, self._optimizer)
        self._progress = progress | {"settings": self._settings.record}

    def _step(self, step: int) -> tuple[float, int, float, float]:
        """One optimizer step: summed loss, learned tokens, gradient norm and learning rate."""
        with _warming_up(self.model, step, self._settings.quantization_warmup):
            sums = self._sums(step)
        total, tokens = float(sums.loss), int(sums.tokens)
        length = float(gradient_norm(sums.gradient)) / tokens
        if not math.isfinite(total) or not math.isfinite(length):
            raise TrainingError(
                f"[training] the loss is {total / tokens} and the gradient norm {length} at step "
                f"{step}; {kept_state(self._settings.folder)}. Lower 'learning_rate' or 'clip_norm'."
            )
        factor = min(1.0, (self._settings.clip_norm or math.inf) / (length + 1e-6)) / tokens
        # a float32 gradient would turn 16-bit weights into float32 ones
        gradient = tree_map(
            lambda g, weight: (g.astype(mx.float32) * factor).astype(weight.dtype),
            sums.gradient,
            self.model.trainable_parameters(),
        )
        del sums
        rate = self._schedule(step)
        self._optimizer.learning_rate = rate
        self._optimizer.update(self.model, gradient)
        mx.eval(self.model.parameters(), self._optimizer.state)
        limit = self._settings.clear_cache_bytes
        if limit is not None and mx.get_cache_memory() > limit:
            mx.clear_cache()
        return total, tokens, length, float(rate)

    def _sums(self, step: int) -> Sums:
        """Loss, tokens and gradient of a step over its batches, and over all processes."""
        total, tokens, gradient = mx.zeros(()), 0, None
        for part, batch in enumerate(self._batches(step)):
            # dropout depends on the position in the run alone, so that a resumed run repeats it
            mx.random.seed(_mixed(self._settings.seed, step, part, self._processes.rank))
            loss, added = self._loss_and_gradient(self.model, batch)
            total = total + loss
            tokens += batch.tokens
            gradient = added if gradient is None else tree_map(mx.add, gradient, added)
            mx.eval(total, gradient)
        return Sums(*self._processes.sums(total, mx.array(tokens, mx.int32), gradient))

    def _report(self, log: RunLog, clock: Clock, norm: float, rate: float) -> dict[str, Any]:
        progress = self._progress
        sums = progress["unreported"]
        record = {
            "step": progress["step"],
            "tokens": progress["tokens"],
            "loss": sums["loss"] / sums["tokens"],
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens_per_second": clock.rate(),
            "peak_memory_bytes": mx.get_peak_memory(),
        }
        progress["unreported"] = {"loss": 0.0, "tokens": 0}
        log.write(**record)
        for callback in self._callbacks:
            callback.on_train(record)
        return record

    def _validate(self, log: RunLog) -> None:
        if self._validation is None:
            return
        progress = self._progress
        self.model.eval()
        figures = self._processes.of_first(self._validation(self.model))
        self.model.train()
        if not math.isfinite(figures["valid_loss"]):
            raise TrainingError(
                f"[training] the validation loss is {figures['valid_loss']} at step {progress['step']}; "
                f"{kept_state(self._settings.folder)}. Lower 'learning_rate'."
            )
        record = {"step": progress["step"], "tokens": progress["tokens"], **figures}
        log.write(**record)
        is_best = figures["valid_loss"] < progress["best_loss"]
        if is_best:
            progress["best_loss"], progress["best_step"] = figures["valid_loss"], progress["step"]
            progress["validations_since_best"] = 0
        else:
            progress["validations_since_best"] += 1
        for callback in self._callbacks:
            callback.on_validation(record)
            if is_best:
                callback.on_best(progress["step"])

    def _save(self) -> None:
        if self._processes.is_first:
            with writing(self._settings.folder):
                save_checkpoint(self._settings.folder, self.model, self._optimizer, self._progress)
        for callback in self._callbacks:
            callback.on_save(self._progress["step"])


def gradient_norm(gradient: Any) -> mx.array:
    """Euclidean norm of all arrays together, in float32."""
    return mx.sqrt(
        tree_reduce(lambda a, g: a + long_sum(g.astype(mx.float32).square()), gradient, 0.0)
    )


@contextmanager
def _warming_up(model: Decoder, step: int, steps: int) -> Iterator[None]:
    """Quantises with the strength of a step inside the `with` block, and fully after it."""
    if step >= steps:
        yield
        return
    set_quantization_strength(model, step / steps)
    try:
        yield
    finally:
        set_quantization_strength(model, 1)


def _mixed(*numbers: int) -> int:
    """One 64-bit seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
