"""Distils a transformer into a student with other token mixers, stage by stage."""

import gc
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedReader
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import TrainingError
from ...files.reading import open_file, write_json
from ...files.stored_array import StoredArray
from ...files.writing import new_file
from ...hub.checkpoint.checkpoint import described_checkpoint, open_checkpoint
from ...hub.checkpoint.load import OpenedModel
from ...hub.checkpoint.save import check_apart
from ...hub.publish.model_card import ModelCard, table
from ...hub.remote.source import find_source
from ...layers.matrix import fixed_dtype_names, matrices
from ...layers.ternary.groups import make_ternary
from ...models import Decoder, architecture_of
from ...models.parts.mixers import MixerChoice
from ...models.parts.ternary_linears import TernaryLinears
from ...ops import long_sum
from ...platform.progress import Progress
from .. import results
from ..batches import Batch
from ..data_parallel import DataParallel
from ..losses import distillation_loss as distillation
from ..losses import loss as losses
from ..losses.distillation_loss import KnownBatch
from ..losses.loss import Loss, batch_logits
from ..memory import MemoryPlan, plan_memory, plan_rows
from ..optimizer import build_optimizer, build_schedule
from ..optimizer_step import Batches, checkpoint_blocks
from ..precision import compute_dtype, frozen_in_dtype
from ..reports import describe_weights
from ..results import BestWeights, Callback, check_results, save_trained
from ..run_folder import load_learned, made_run_folder, own_run_folder, weights_digest, writing
from ..tasks.corpus import CausalLMTask
from ..trainer import Trainer, Validation
from .settings import MEASURED, STAGES, DistilSettings, StageName
from .student import (
    Effort,
    base_config,
    build_student,
    effort_of,
    mixers_of,
    open_first,
    replaced_layers,
    student_config,
)


@dataclass(frozen=True)
class TeacherLogits:
    """The file of one stage.

    For each row of the data, in the order of the steps, and for each of its positions it has the `top_k`
    likeliest tokens, int32, and their logits less the largest, float16. The name tells the run that it
    belongs to, so that another run writes a file of its own. It appears only when it is complete.

    Args:
        folder: The folder of the stage.
        record: What the logits depend on, plain values.
        shape: The numbers of rows, positions of a row, and tokens of a position.
        command: The command in messages.
    """

    folder: Path
    record: Mapping[str, Any]
    shape: tuple[int, int, int]
    command: str = DistilSettings.command

    @property
    def file(self) -> Path:
        text = json.dumps([self.record, self.shape], sort_keys=True)
        return self.folder / f"teacher-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npy"

    @property
    def _dtype(self) -> np.dtype[Any]:
        top_k = (self.shape[2],)
        return np.dtype([("tokens", np.int32, top_k), ("logits", np.float16, top_k)])

    def write(self, teacher: Decoder, batches: Batches, steps: int) -> None:
        """Writes the file, unless it is there.

        Args:
            teacher: The teacher.
            batches: The batches of each step.
            steps: Number of steps.

        Raises:
            TrainingError: The disk is full, or the folder cannot be written.
        """
        if self.file.exists():
            return
        teacher.eval()
        rows, positions, _ = self.shape
        header = {"descr": self._dtype.descr, "fortran_order": False, "shape": (rows, positions)}
        needed = rows * positions * self._dtype.itemsize
        bar = Progress("teacher's logits", rows, "row")
        with (
            writing(self.folder),
            bar,
            new_file(self.file, needed) as new,
            new.open("wb") as stream,
        ):
            np.lib.format.write_array_header_1_0(stream, header)
            for step in range(steps):
                for batch in batches(step):
                    for row in range(len(batch.inputs)):
                        stream.write(self._row(teacher, batch.part(slice(row, row + 1))).tobytes())
                        bar.update()

    def _row(self, teacher: Decoder, batch: Batch) -> np.ndarray:
        logits, top_k = batch_logits(teacher, batch)[0].astype(mx.float32), self.shape[2]
        chosen = mx.argpartition(-logits, kth=top_k - 1, axis=-1)[:, :top_k]
        likeliest = mx.take_along_axis(logits, chosen, axis=-1)
        row = np.empty(len(logits), self._dtype)
        row["tokens"] = np.array(chosen.astype(mx.int32))
        row["logits"] = np.array(likeliest - likeliest.max(axis=-1, keepdims=True))
        return row

    def batches(self, batches: Batches) -> Batches:
        """The same batches with what the teacher expects, read from the file as they are needed.

        Raises:
            TrainingError: The file is damaged.
        """
        known = self._read()

        def of_step(step: int) -> list[Batch]:
            parts = batches(step)
            row = step * sum(len(part.inputs) for part in parts)
            found: list[Batch] = []
            for part in parts:
                stored = known[row : row + len(part.inputs)]
                row += len(part.inputs)
                arrays = {name: np.ascontiguousarray(stored[name]) for name in ("tokens", "logits")}
                found.append(
                    KnownBatch(**vars(part), likeliest=arrays["tokens"], logits=arrays["logits"])
                )
            return found

        return of_step

    def _read(self) -> StoredArray:
        def refuse(stream: BufferedReader) -> None:
            raise ValueError("it was changed while it was read")

        try:
            with open_file(self.file) as stream:
                if np.lib.format.read_magic(stream) != (1, 0):
                    raise ValueError("it is of another version of the format")
                shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
                start, size = stream.tell(), os.fstat(stream.fileno()).st_size
                found = StoredArray(stream, dtype, shape, start, refuse, self._damaged)
        except (OSError, ValueError) as error:
            raise self._damaged(str(error)) from error
        needed = start + math.prod(self.shape[:2]) * self._dtype.itemsize
        if dtype != self._dtype or shape != self.shape[:2] or size != needed:
            raise self._damaged(f"it holds {shape} of {dtype} in {size:,} bytes")
        return found

    def _damaged(self, why: str) -> TrainingError:
        return TrainingError(
            f"[{self.command}] '{self.file}' must be what this run wrote but {why}. Remove it, and the "
            "run writes it again."
        )


def mixer_loss(teacher: Decoder, layers: Sequence[int]) -> Loss:
    r"""How far each new mixer is from the attention that it replaces, on the same input.

    .. math::
        \frac{1}{|S|} \sum_{l \in S} \frac{\sum \lVert M_l(x_l) - A_l(x_l) \rVert^2}
        {\sum \lVert A_l(x_l) - \bar A_l \rVert^2}

    :math:`x_l` are the normed inputs of layer l in the teacher, so that no layer waits for another, as
    in the first stage of MOHAWK (Bick et al., arXiv 2408.10189). The mean :math:`\bar A_l` is over all
    tokens of the batch. A mixer that gives this mean has a loss of 1. The result is summed over
    tokens, as losses are.

    Args:
        teacher: The teacher, which is frozen here.
        layers: The layers S.
    """
    _freeze(teacher)

    def loss(student: Decoder, batch: Batch) -> mx.array:
        with _recorded(teacher) as inputs:
            losses.batch_hidden(teacher, batch)
        errors = []
        for layer in layers:
            block = teacher.blocks[layer]
            x = block.token_norm(inputs[layer])
            wanted = mx.stop_gradient(block.token_mixer(x)[0])
            got = student.blocks[layer].token_mixer(mx.stop_gradient(x))[0]
            errors.append(_relative_error(got, wanted, batch))
        return _summed(errors, batch)

    return loss


def hidden_loss(teacher: Decoder) -> Loss:
    r"""How far the residual stream of the student is from the teacher's, after each block.

    .. math::
        \frac{1}{N} \sum_{l=1}^{N} \frac{\sum \lVert s_l - t_l \rVert^2}
        {\sum \lVert t_l - \bar t_l \rVert^2}

    Each block of the student reads what its blocks before gave, so that all prefixes of the student are
    matched at once. The result is summed over tokens, as losses are.

    Args:
        teacher: The teacher, which is frozen here.
    """
    _freeze(teacher)

    def loss(student: Decoder, batch: Batch) -> mx.array:
        streams = []
        for model in (teacher, student):
            with _recorded(model) as inputs:
                losses.batch_hidden(model, batch)
            # the first input is the embedding
            streams.append(inputs[1:])
        errors = [
            _relative_error(got, mx.stop_gradient(wanted), batch)
            for wanted, got in zip(*streams, strict=True)
        ]
        return _summed(errors, batch)

    return loss


def validation_by(loss: Loss, rows: np.ndarray, batch_size: int) -> Validation:
    """A validation by the loss that a stage minimises, on rows of tokens, a batch at a time."""
    starts = range(0, len(rows), batch_size)
    batches = [Batch.of_rows(rows[n : n + batch_size]) for n in starts]

    def validate(student: Any) -> dict[str, float]:
        total = sum(float(loss(student, batch)) for batch in batches)
        return {"valid_loss": total / sum(batch.tokens for batch in batches)}

    return validate


def _freeze(teacher: Decoder) -> None:
    teacher.freeze()
    teacher.eval()


@contextmanager
def _recorded(model: Decoder) -> Iterator[list[mx.array]]:
    """Collects the inputs of all blocks, and at the end the output of the last."""
    streams: list[mx.array] = []
    run_block = model.run_block

    def run(block: Any, x: mx.array, *arguments: Any, **options: Any) -> Any:
        if not streams:
            streams.append(x)
        if run_block is None:
            y, state = block(x, *arguments, **options)
        else:
            y, state = run_block(block, x, *arguments, **options)
        streams.append(y)
        return y, state

    model.run_block = run
    try:
        yield streams
    finally:
        model.run_block = run_block


def _relative_error(got: mx.array, wanted: mx.array, batch: Batch) -> mx.array:
    """The squared error of the learned tokens over their spread, float32 `()`."""
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    weights = mx.array(batch.weights)[..., None]
    count = mx.maximum(long_sum(weights), 1)
    mean = long_sum((weights * wanted).reshape(-1, wanted.shape[-1]), axis=-2) / count
    spread = long_sum(weights * mx.square(wanted - mean))
    return long_sum(weights * mx.square(got - wanted)) / mx.maximum(spread, 1e-12)


def _summed(errors: list[mx.array], batch: Batch) -> mx.array:
    """Their mean for each learned token."""
    return mx.stack(errors).mean() * long_sum(mx.array(batch.weights))


Metrics = Mapping[str, Mapping[str, float]]


def write_cards(
    card: ModelCard, settings: DistilSettings, mixers: Sequence[MixerChoice], metrics: Metrics
) -> None:
    """Writes the card and the teacher's licence files beside the student, and beside its masters.

    Args:
        card: The sections on the teacher and on the command.
        settings: The run.
        mixers: The mixer of each layer of the student.
        metrics: By stage, the bits per byte of each held-out text.

    Raises:
        CheckpointError: A file cannot be written.
    """
    results.write_cards(
        Path(settings.output),
        replace(card, tags=("distillation",)),
        lambda is_ternary: training_section(settings, mixers, metrics, is_ternary=is_ternary),
    )


def training_section(
    settings: DistilSettings,
    mixers: Sequence[MixerChoice],
    metrics: Metrics,
    *,
    is_ternary: bool,
) -> str:
    """How the student came about, in Markdown."""
    linears = " The linears of its blocks are ternary." if is_ternary else ""
    read = settings.rows * settings.sequence_length
    held_out = f" Held out: {_names(settings.valid)}." if settings.valid else ""
    texts = list(next(iter(metrics.values()), {}))
    lines = [
        (
            words,
            *(_schedule(settings, name) if name in STAGES else ("", "")),
            *(f"{metrics[name][text]:.4f}" for text in texts),
        )
        for name, words in MEASURED.items()
        if name in metrics and (texts or name in STAGES)
    ]
    head = ("after", "steps", "learning rate", *(text.replace("/", ", ") for text in texts))
    return (
        "## Distillation\n\nThis model learned from its base model, stage by stage. The token mixers of "
        f"its layers: {_counted(mixers)}.{linears}\n\nTexts: {_names(settings.data)}.{held_out} A step "
        f"reads {read:,} tokens.\n\n{table(head, lines)}"
    )


def _schedule(settings: DistilSettings, stage: str) -> tuple[str, str]:
    return f"{getattr(settings, f'{stage}_steps')}", f"{getattr(settings, f'{stage}_rate'):g}"


def _names(files: Sequence[str]) -> str:
    """File names alone: a card is public, local folders are not."""
    return ", ".join(f"`{Path(file).name}`" for file in files)


def _counted(mixers: Sequence[MixerChoice]) -> str:
    """The mixers from the first layer to the last, such as `mlgru` x 3, `attention`."""
    runs = ((name, len(list(run))) for name, run in groupby(choice.name for choice in mixers))
    return ", ".join(f"`{name}`" if count == 1 else f"`{name}` x {count}" for name, count in runs)


def _linears(settings: DistilSettings) -> TernaryLinears | None:
    """The linears in a student's description, if they are BitNet's."""
    if not settings.ternary or settings.scheme is not None:
        return None
    return TernaryLinears(NORM_EPS if settings.inner_norms else None)


REPORT_FILE = "distil.json"
NORM_EPS = 1e-6
"""Of the norms in front of linears."""
_WHOLE: tuple[StageName, ...] = ("logits", "text")
"""The stages that train all weights. A ternary student is quantised in these, and dense before."""


class Distillation:
    """A run from a teacher to its student.

    Repeating a run goes on from where it was stopped; the result is the same, bit for bit. Each stage
    begins with the best weights of the one before.

    Args:
        settings: The run.
        only_plans: Whether the run is planned alone. The teacher may then be a folder with a
            `config.json` and no weights, and no weights are downloaded, unless they are packed.

    Attributes:
        teacher: The teacher.
        folder: The folder that holds it.
        mixers: The mixer of each layer of the student.

    Raises:
        TrainingError: The teacher is no transformer of the Llama family, or a setting is wrong.
        CheckpointError, DownloadError, UnsupportedModelError: As for `load`.
    """

    def __init__(self, settings: DistilSettings, *, only_plans: bool = False):
        self.settings = settings
        described = described_checkpoint(find_source(settings.model)) if only_plans else None
        self._checkpoint = described or open_checkpoint(settings.model)
        self._opened = self._open()
        folder = self._opened.checkpoint.folder
        check_apart(Path(settings.output).resolve(), [folder], settings.command)
        check_results(Path(settings.output), folder)
        self.teacher: Decoder = self._opened.model
        base = base_config(self.teacher, settings.command)
        distillation.check_top_k(settings.teacher_top_k, base.vocab_size)
        choices = [MixerChoice.read("to", choice) for choice in settings.to]
        self.mixers = mixers_of(base, choices, settings.keep_layers, settings.command)
        self._check_groups()
        self._config = student_config(base, self.mixers, _linears(settings))
        self._float_config = student_config(base, self.mixers, None)
        self.folder = folder

    def _check_groups(self) -> None:
        scheme = self.settings.scheme
        if scheme is None:
            return
        found = [matrix for block in self.teacher.blocks for matrix in matrices(block).values()]
        for matrix in found:
            dims = matrix.input_dims
            must = f"'scales' must be bitnet for this model but got {scheme.scales!r}"
            if matrix.is_ternary:
                why = "its linears are ternary already, with one scale a matrix"
            elif dims % scheme.group_size:
                why = (
                    f"groups of {scheme.group_size} do not divide the {dims} inputs of its linears"
                )
            elif scheme.block and (dims % scheme.block or "bias" in matrix.layer):
                must = f"'rotation' must be another for this model but got {scheme.block}"
                why = f"it must divide the {dims} inputs of each linear, without a bias"
            else:
                continue
            raise TrainingError(f"[{self.settings.command}] {must}: {why}.")

    def check_files(self) -> None:
        """Refuses a run whose texts are not there. `run` does so before anything else.

        Raises:
            TrainingError: A file cannot be opened, or holds neither texts nor tokens.
        """
        first = self.settings.stage(self.settings.active[0])
        CausalLMTask.check_files(first, self.settings.command, "data")

    def plans(self, dtype: mx.Dtype | None = None) -> dict[StageName, MemoryPlan]:
        """Plans the memory of each stage, before `run`. Nothing is computed or written.

        Args:
            dtype: What steps compute in; `None` is the run's on this device.
        """
        dtype = dtype or compute_dtype(self.settings.dtype)
        student = self._first_student(self._masters().model)
        teacher = self._open(dtype).without_values()
        found = {}
        for name in self._stages(student):
            if name in _WHOLE:
                student.unfreeze()
                student = self._ternary_student(student)
            loss = self._loss(name, student, teacher)
            settings = self.settings.stage(name)
            # writing its logits takes less than the step of a stage that trains all weights
            has_teacher = name not in _WHOLE or not self.settings.cache_logits
            step = partial(
                plan_memory,
                student,
                build_optimizer(settings),
                loss,
                settings=replace(settings.loop({}), dtype=dtype),
                processes=DataParallel(),
                parts=settings.accumulation_steps,
                companions=[teacher] if has_teacher else (),
            )
            logits = settings.sequence_length * student.num_logits
            with self._narrow(student, dtype):
                found[name] = plan_rows(
                    step, partial(self._unread_batch, name), settings.batch_size, logits
                )
        return found

    def efforts(self) -> dict[StageName, Effort]:
        """The work of each stage, before `run`. Nothing is computed or written."""
        student = self._first_student(self._masters().model)
        return {
            name: effort_of(name, self.teacher, student, self.settings)
            for name in self._stages(student)
        }

    def run(
        self, callbacks: Sequence[Callback] = (), card: ModelCard | None = None
    ) -> dict[str, Any]:
        """Runs all stages and writes the student to `model/` and `masters/`.

        Args:
            callbacks: Observers of each stage.
            card: The model card, but for what the run itself says; `None` writes none.

        Returns:
            The report, which is also written: of the teacher, of the student as it begins and after
            each stage, the loss and the bits per byte on the held-out texts.

        Raises:
            TrainingError: A file or setting is wrong, the folder cannot be written or belongs to
                another run at work, or a loss is not finite.
            TrainingStopped: A signal ended the run early. Its state is saved.
        """
        self.check_files()
        with own_run_folder(Path(self.settings.output)):
            return self._run(callbacks, card)

    def _run(self, callbacks: Sequence[Callback], card: ModelCard | None) -> dict[str, Any]:
        path = Path(self.settings.output)
        self.teacher = self._opened.load()
        self._digest = weights_digest(self.teacher)
        student = self._first_student(self._masters().load())
        # graphs that are repeated hold what is frozen as constants
        mx.eval(student.parameters())
        tasks = {name: self._task(name, student) for name in self._stages(student)}
        task = next(iter(tasks.values()))
        metrics = {"teacher": self._measure(task, self.teacher)}
        metrics["begin"] = self._measure(task, student)
        for name, of_stage in tasks.items():
            if name in _WHOLE:
                student = self._ternary_student(student)
            if self._is_cached(name):
                self._write_logits(of_stage)
            self._train(name, student, of_stage, callbacks)
            metrics[name] = self._measure(task, student)
        save_trained(path, student, self.folder)
        if card is not None:
            write_cards(card, self.settings, self.mixers, metrics)
        report = {"settings": self.settings.record(), "metrics": metrics}
        write_json(path / REPORT_FILE, report)
        return report

    def _open(self, dtype: mx.Dtype | None = None) -> OpenedModel:
        """The teacher, packed or in 16 bits where it can be."""
        return OpenedModel(self._checkpoint, dtype=dtype or compute_dtype(self.settings.dtype))

    def _masters(self) -> OpenedModel:
        """The model that a student begins as, with float weights or codes."""
        settings = self.settings
        return open_first(self._checkpoint, settings.init_from, self.teacher, settings.command)

    def _first_student(self, first: Decoder) -> Decoder:
        settings = self.settings
        student = build_student(
            first,
            self._float_config,
            settings.seed,
            random_mixers=settings.random_mixers,
        )
        return self._checkpointed(student)

    def _ternary_student(self, before: Decoder) -> Decoder:
        """A student in its last format, whose master weights are the weights of a dense one."""
        if self.settings.scheme is not None:
            for block in before.blocks:
                make_ternary(block, self.settings.scheme)
        if before.config == self._config:
            return before
        student: Decoder = architecture_of(self._config).build(self._config)
        student.update(before.parameters())
        return self._checkpointed(student)

    def _checkpointed(self, student: Decoder) -> Decoder:
        if self.settings.grad_checkpoint:
            checkpoint_blocks(student)
        return student

    def _stages(self, student: Decoder) -> list[StageName]:
        """The stages of the run: without new mixers, those that train whole models."""
        is_same = not replaced_layers(student)
        stages = [name for name in self.settings.active if name in _WHOLE or not is_same]
        if not stages:
            raise TrainingError(
                f"[{self.settings.command}] '{self.settings.key('logits_steps')}' or 'text_steps' must "
                "be positive where all layers keep their attention but both are 0."
            )
        return stages

    def _task(self, name: StageName, student: Decoder) -> CausalLMTask:
        return CausalLMTask(self.settings.stage(name), student, self.folder, (0, 1))

    def _train(
        self, name: StageName, student: Decoder, task: CausalLMTask, callbacks: Sequence[Callback]
    ) -> None:
        settings = self.settings.stage(name)
        folder = Path(self.settings.output) / "stages" / name
        loss = self._loss(name, student, self.teacher)
        record = {
            "teacher": self._digest,
            "weights": weights_digest(student),
            "texts": dict(task.digests),
            **self.settings.course(name),
        }
        file = folder / "best.safetensors"
        batches: Batches = task.batches
        if self._is_cached(name):
            batches = self._teacher_logits(task).batches(batches)
        first = f"The stage '{name}' takes {settings.steps:,} steps."
        several = [first] if len(self.settings.active) > 1 else []
        for words in (*several, describe_weights(student), task.size()):
            for callback in callbacks:
                callback.on_start(words)
        narrow = self._narrow(student, compute_dtype(settings.dtype))
        with made_run_folder(folder), narrow:
            mx.eval(student.parameters())
            Trainer(
                student,
                replace(settings.loop(record), folder=folder),
                build_optimizer(settings),
                build_schedule(settings, student.dims),
                batches,
                self._validation(name, task, loss),
                loss=loss,
                callbacks=[BestWeights(student, file, bool(settings.valid)), *callbacks],
            ).train()
            load_learned(student, file)
        student.unfreeze()
        mx.eval(student.parameters())

    def _narrow(self, student: Decoder, dtype: mx.Dtype) -> AbstractContextManager[None]:
        """Keeps what is frozen of a student in the dtype of steps, if that is the teacher's.

        Frozen weights are the teacher's, so that nothing is lost, unless they were unpacked.
        """
        stored = {entry.dtype for entry in self._opened.checkpoint.tensors.values()}
        is_lossless = stored == {dtype} and not fixed_dtype_names(self.teacher)
        return frozen_in_dtype(student, dtype) if is_lossless else nullcontext()

    def _loss(self, name: StageName, student: Decoder, teacher: Decoder) -> Loss:
        """The loss that a stage minimises. Only what it trains is left unfrozen."""
        layers = replaced_layers(student)
        if name not in _WHOLE:
            student.freeze()
            for layer in layers:
                student.blocks[layer].token_mixer.unfreeze()
        elif self.settings.keep_embedding:
            for module in (student.embed, *student.head_modules):
                module.freeze()
        if name == "mixers":
            return mixer_loss(teacher, layers)
        if name == "hidden":
            return hidden_loss(teacher)
        if name == "text":
            return losses.next_token_loss
        settings = self.settings
        weight, temperature = settings.teacher_weight, settings.teacher_temperature
        if self._is_cached(name):
            return distillation.known_loss(weight=weight, temperature=temperature)
        return distillation.distillation_loss(
            teacher,
            student,
            weight=weight,
            temperature=temperature,
            top_k=settings.teacher_top_k,
        )

    def _is_cached(self, name: StageName) -> bool:
        """Returns whether the stage reads the teacher's logits from the disk."""
        return name == "logits" and self.settings.cache_logits

    def _unread_batch(self, name: StageName, rows: int) -> Batch:
        """A batch of the shape that a stage reads."""
        settings, length = self.settings, self.settings.sequence_length
        batch = Batch.of_rows(np.zeros((rows, length + 1), np.int32))
        if not self._is_cached(name):
            return batch
        known = np.zeros((rows, length, settings.teacher_top_k or 0), np.int32)
        return KnownBatch(**vars(batch), likeliest=known, logits=known.astype(np.float16))

    def _teacher_logits(self, task: CausalLMTask) -> TeacherLogits:
        settings = self.settings
        rows = settings.logits_steps * sum(len(batch.inputs) for batch in task.batches(0))
        return TeacherLogits(
            Path(settings.output) / "stages" / "logits",
            {
                "teacher": self._digest,
                "texts": dict(task.digests),
                "batch": (settings.batch_size, settings.accumulation_steps, settings.seed),
            },
            (rows, settings.sequence_length, settings.teacher_top_k or 0),
            settings.command,
        )

    def _write_logits(self, task: CausalLMTask) -> None:
        """Writes the teacher's logits. It is not needed any more, and its weights are given up."""
        known = self._teacher_logits(task)
        known.write(self.teacher, task.batches, self.settings.logits_steps)
        self._opened = self._open()
        self.teacher = self._opened.model
        # what held the teacher in the stages before may be part of cycles
        gc.collect()

    def _validation(self, name: StageName, task: CausalLMTask, loss: Loss) -> Validation | None:
        """How the best weights of a stage are picked: by its loss, or by the cross-entropy."""
        settings = self.settings
        if not settings.valid:
            return None
        if name in _WHOLE:
            return task.validate
        rows = task.held_out_rows(settings.valid[0], settings.valid_tokens)
        return validation_by(loss, rows, settings.batch_size)

    def _measure(self, task: CausalLMTask, model: Decoder) -> dict[str, float]:
        """The bits per byte of each held-out text."""
        model.eval()
        metrics = task.held_out(model)
        return {name: value for name, value in metrics.items() if name.endswith("bits_per_byte")}
