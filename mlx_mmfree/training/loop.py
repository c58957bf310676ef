"""The training loop: steps, reports, validations, checkpoints, and resuming after a stop.

`train_model` runs it for a model of any kind, from files.
"""

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import TrainingError, TrainingStopped, install_extra
from ..layers import set_quantization_strength
from ..layers.matrix import matrices
from ..models import Decoder, TokenModel, set_dropout
from ..platform.progress import Progress
from ..platform.resident_memory import resident_memory
from . import run_folder
from .curve import plot_run
from .data_parallel import DataParallel
from .distillation_loss import distillation_loss
from .first_model import FirstModel, task_of
from .loss import Loss, next_token_loss
from .memory import MemoryPlan, plan_memory, plan_rows
from .optimizer import build_optimizer, build_schedule
from .optimizer_step import Batches, LearningRate, OptimizerStep, StepResult, checkpoint_blocks
from .reports import weights_in_words
from .results import Callback, Clock, RunLog, TrainedModel, environment, read_log
from .run_folder import check_record, own_run_folder, read_progress, weights_digest
from .run_settings import LoopSettings
from .settings import Settings, tokenizer_folder

_NOTE = (
    b"\nThe run will stop after this step and be saved. Press Ctrl-C again to stop it at once.\n"
)


class StopRequest:
    """Records the first SIGINT or SIGTERM inside the `with` block. A second one acts as usual.

    Ignored signals stay ignored. Outside Python's main thread, no signal is recorded.

    Args:
        is_quiet: Whether to print no message.

    Attributes:
        signal: Number of the recorded signal, or 0.
    """

    def __init__(self, is_quiet: bool = False):
        self.signal = 0
        self._is_quiet = is_quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        if not self._is_quiet:
            # print() is not safe in a signal handler: it may interrupt another print()
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _NOTE)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


_LOW_BITS = np.uint32(0x55555555)


class TernaryWeights:
    """The ternary weights of a model when it was made, with which later ones are compared.

    Trits are kept packed, in 2 bits each.

    Args:
        model: The model; its ternary layers in their training form are looked at.

    Attributes:
        names: The paths of these layers, first to last.
    """

    def __init__(self, model: nn.Module):
        found = matrices(model)
        self._matrices = [
            (name, matrix)
            for name, matrix in found.items()
            if matrix.is_ternary and matrix.holds_floats
        ]
        self.names = [name for name, _ in self._matrices]
        self._first = [np.array(matrix.packed_trits()) for _, matrix in self._matrices]

    def figures(self) -> dict[str, list[float]]:
        """Shares of the trits of each layer, from 0 to 1.

        Returns:
            `zero_trits`, those that are zero, and `flipped_trits`, those that were another one when the
            model was made. Nothing if the model has no such layer.
        """
        if not self._matrices:
            return {}
        zeros, flips = [], []
        for (_, matrix), first in zip(self._matrices, self._first, strict=True):
            now = np.array(matrix.packed_trits())
            count = matrix.output_dims * matrix.input_dims
            padding = now.size * 16 - count
            # a zero has the code 1, and so has the padding
            zeros.append((_count(now & ~(now >> 1)) - padding) / count)
            changed = now ^ first
            flips.append(_count(changed | (changed >> 1)) / count)
        return {"zero_trits": zeros, "flipped_trits": flips}


def _count(words: np.ndarray) -> int:
    """How many of the 2-bit fields have their lower bit set."""
    return int(np.bitwise_count(words & _LOW_BITS).sum(dtype=np.int64))


Validation = Callable[[Any], dict[str, Any]]
"""Maps the model to figures by name. The figure `valid_loss` decides which weights are the best."""


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
        callbacks: Are told of each record, best model and checkpoint.
        figures: What else the log says of the last step.

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
        figures: Callable[[], dict[str, float]] | None = None,
    ):
        if not tree_flatten(model.trainable_parameters()):
            raise TrainingError(
                "[training] 'model' must have trainable parameters but all are frozen. Unfreeze what is "
                "to be trained, or add adapters."
            )
        if settings.quantization_warmup and not set_quantization_strength(model, 1):
            raise TrainingError(
                "[training] 'quantization_warmup' must be 0 for a model without ternary layers in their "
                f"training form but got {settings.quantization_warmup}. Leave it out."
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
        self._figures = figures
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
        if is_first and not plot_run(read_log(folder / "log.jsonl"), folder.resolve().name, curve):
            print(
                "No loss curve was drawn, because matplotlib is not installed. "
                + install_extra("plot"),
                file=sys.stderr,
            )
        return self._progress

    def _begin(self) -> RunLog:
        """Opens the log. That of a new run gets its first records."""
        settings, step = self._settings, self._progress["step"]
        log = RunLog(settings.folder / "log.jsonl" if self._processes.is_first else None, step)
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
            **({} if self._figures is None else self._figures()),
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
        figures = self._processes.of_first(self._validation(self.model) | self._ternary.figures())
        self.model.train()
        if not math.isfinite(figures["valid_loss"]):
            raise TrainingError(
                f"[training] the validation loss is {figures['valid_loss']} at step {progress['step']}; "
                f"{run_folder.kept_state(self._settings.folder)}. Lower 'learning_rate'."
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
        # first what belongs to the checkpoint: a run that is killed in between writes both again
        for callback in self._callbacks:
            callback.on_save(self._progress["step"])
        if self._processes.is_first:
            with run_folder.writing(self._settings.folder):
                run_folder.save_checkpoint(
                    self._settings.folder, self.model, self._optimizer, self._progress
                )


def train_model(
    settings: Settings,
    processes: DataParallel | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    first: FirstModel | None = None,
) -> dict[str, Any]:
    """Begins or resumes a training run, and writes models with its best weights at the end.

    What is learned depends on the kind of the model: the next token of texts, tokens that are left out
    of them, the labels of texts or of images, or texts that belong to others. A teacher tells what it
    expects of the next token too.

    The folder `settings.output` gets `tokenizer/`, unless images are learned, `log.jsonl`, `curve.png`,
    `checkpoint/` and `best.safetensors`. At the end it gets `model/` and, for a ternary model,
    `masters/`, which holds float weights for further training. A finished run goes on if it is given
    more `steps`. Its further steps then follow the learning rate of the longer run.

    Args:
        settings: The run.
        processes: The processes that train together, each on its share of the rows of a batch; `None`
            takes all that `mlx.launch` started, or this one alone.
        callbacks: As for `Trainer`.
        first: The model to begin with, if it has been built already.

    Returns:
        The progress of the run and, in the first process, the figures of the packed model on the
        held-out files, under `held_out`.

    Raises:
        TrainingError: A file or setting is wrong, the folder cannot be written or belongs to another
            run at work, or the loss is not finite.
        TrainingStopped: A signal ended the run early. Its state is saved.

    Example:
        >>> from pathlib import Path
        >>> from mlx_mmfree.training.corpus.mixture import Stage
        >>> written = Path("stories.txt").write_text("Once upon a time there was a frog. " * 400)
        >>> sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32}
        >>> model = {"model_type": "hgrn_bit", "num_hidden_layers": 1, **sizes}
        >>> stage = Stage(until=1, weights={"stories.txt": 1})
        >>> settings = Settings(output="run", model=model, stages=(stage,), steps=2, warmup_steps=1)
        >>> train_model(settings)["step"]
        2
    """
    first = first or FirstModel(settings)
    first.task.check_files(settings)
    if processes is None:
        processes = DataParallel(timeout_s=settings.process_timeout_s)
    with own_run_folder(settings.path(settings.output), is_first=processes.is_first):
        return _train(settings, processes, callbacks, first)


def _train(
    settings: Settings,
    processes: DataParallel,
    callbacks: Sequence[Callback],
    first: FirstModel,
) -> dict[str, Any]:
    output = settings.path(settings.output)
    share = processes.share(settings.batch_size)
    progress = read_progress(output)
    if progress is not None:
        # checked before anything is written for other settings
        check_record(output, progress, progress["settings"] | settings.record())
    model, kind = first.load(), first.task
    tokenizer = first.tokenizer_folder
    if tokenizer is None and kind.reads_text:
        tokenizer = processes.after_first(
            lambda: tokenizer_folder(
                settings,
                model.vocab_size,
                is_resumed=progress is not None,
                columns=kind.columns(settings),
                mask_token=kind.mask_token,
            )
        )
    # the first process makes the token files that the others read
    task = processes.after_first(lambda: kind(settings, model, tokenizer, share))
    teacher = first.load_teacher(tokenizer)
    record = {
        # random weights follow from the settings
        "weights": None if settings.init_from is None else weights_digest(model),
        "texts": dict(task.digests),
        **({} if teacher is None else {"teacher": weights_digest(teacher)}),
    }
    if processes.is_first:
        for words in (weights_in_words(model), task.size()):
            for callback in callbacks:
                callback.on_start(words)
    _prepare(model, settings)
    result = TrainedModel(output, model, tokenizer, has_validation=bool(settings.valid))
    progress = Trainer(
        model,
        settings.loop(record, kind.unit),
        build_optimizer(settings),
        build_schedule(settings, model.dims),
        task.batches,
        task.validate if settings.valid else None,
        loss=_loss(settings, model, teacher),
        processes=processes,
        callbacks=[result, *callbacks],
    ).train()
    if not processes.is_first:
        return progress
    result.finish()
    model.eval()
    return progress | {"held_out": task.held_out(model)}


def plan_training(
    settings: Settings,
    model: TokenModel,
    processes: DataParallel,
    *,
    teacher: Decoder | None = None,
) -> MemoryPlan:
    """Plans the memory of each process of a run. Nothing is computed or written.

    Args:
        settings: The run.
        model: The model that it begins with, whose weights may be uncomputed still.
        processes: The processes that train together.
        teacher: Its teacher, if it has one, whose weights may have no values.

    Raises:
        TrainingError: A batch cannot be split between the processes, or the model has no dropout.
    """
    _, size = processes.share(settings.batch_size)
    _prepare(model, settings)
    task = task_of(model)
    step = partial(
        plan_memory,
        model,
        build_optimizer(settings),
        _loss(settings, model, teacher),
        settings=settings.loop({}),
        processes=processes,
        parts=settings.accumulation_steps,
        companions=() if teacher is None else [teacher],
    )
    batch_of = partial(task.largest_batch, settings, model)
    logits = settings.sequence_length * model.num_logits
    return plan_rows(step, batch_of, settings.batch_size // size, logits)


def _loss(settings: Settings, model: Any, teacher: Decoder | None) -> Loss:
    if teacher is None:
        return task_of(model).loss(settings)
    return distillation_loss(teacher, model, **settings.divergence)


def _prepare(model: TokenModel, settings: Settings) -> None:
    """Gives a model the dropout and the backward pass that the settings ask for."""
    if settings.dropout and not set_dropout(model, settings.dropout):
        raise TrainingError(
            "[train] 'dropout' must be 0 for a model without blocks of a token and a channel mixer, as "
            f"one of images or with reversible blocks, but got {settings.dropout}. Leave it out."
        )
    if settings.grad_checkpoint:
        checkpoint_blocks(model)
