"""A run from a dense model to its ternary one: its folder, its log and the model that it writes."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import TrainingError
from ...files.reading import open_file, read_json_object, write_json
from ...files.tensors import TensorEntry
from ...files.writing import check_space, new_file
from ...hub.checkpoint.checkpoint import RUN_MODEL, described_checkpoint, open_checkpoint
from ...hub.checkpoint.parameter_reader import ParameterReader
from ...hub.checkpoint.save import check_apart, check_target
from ...hub.conversion.convert import convert
from ...hub.conversion.to_folder import FloatFormats, GivenCodes
from ...hub.publish.model_card import ModelCard
from ...hub.remote.source import find_source
from ...platform.progress import Progress
from ..results import read_log
from ..run_folder import LOG_FILE, check_record, own_run_folder, writing
from ..tasks.corpus import CausalLMTask
from .course import Course
from .modulation import BITS
from .picture import draw_errors
from .plan import LOW_RANK, CalibrationPlan, plan_calibration, plan_window
from .settings import CalibrateSettings
from .walk import Walk

REPORT_FILE, PICTURE_FILE = "calibrate.json", "errors.png"
_FOLDER, _RECORD = "windows", "run.json"
_DIGESTED = 4096
"""Bytes of a tensor that tell it from another one."""


class Calibration:
    """A run from a dense model to its ternary one.

    The files of the run tell how far it is: a window is finished once its file is there. Repeating the
    run goes on from there, and the result is the same, bit for bit.

    Args:
        settings: The run.
        only_plans: Whether the run is planned alone. The model may then be a folder with a `config.json`
            and no weights.

    Attributes:
        folder: The folder that holds the dense model.
        course: Its windows.

    Raises:
        TrainingError: The model cannot be made ternary in this way, or a setting is wrong.
        CheckpointError, DownloadError, UnsupportedModelError: As for `load`.
    """

    def __init__(self, settings: CalibrateSettings, *, only_plans: bool = False):
        self.settings = settings
        described = described_checkpoint(find_source(settings.model)) if only_plans else None
        checkpoint = described or open_checkpoint(settings.model)
        checkpoint.refuse_adapter("calibrate", "to be made ternary")
        self.folder = checkpoint.folder
        self.output = Path(settings.output)
        check_apart(self.output.resolve(), [self.folder], "calibrate")
        check_target((self.output / RUN_MODEL).resolve(), True, "calibrate", [self.folder])
        self._reader = ParameterReader(checkpoint)
        self.course = _fitting(Course(settings, self._reader, settings.rank), self._reader)

    def check_files(self) -> None:
        """Refuses a run whose texts are not there.

        Raises:
            TrainingError: A file cannot be opened, or holds neither texts nor tokens.
        """
        CausalLMTask.check_files(self.settings.corpus(), "calibrate", "data")

    @cached_property
    def plan(self) -> CalibrationPlan:
        """The memory, the disk and the work of the run. Nothing is computed or written."""
        return plan_calibration(self.course)

    def run(self, card: ModelCard | None = None) -> dict[str, Any]:
        """Trains the windows that are left and writes the ternary model to `model/`.

        Args:
            card: What the model card says of the source; `None` writes none.

        Returns:
            The report, which is also written: the errors of each window and, of the held-out samples,
            the cross-entropy of both models in nats.

        Raises:
            TrainingError: A file or setting is wrong, the folder cannot be written or belongs to
                another run at work, or a loss is not finite.
            TrainingStopped: A signal ended the run early. The windows before are kept.
        """
        self.check_files()
        with own_run_folder(self.output), writing(self.output):
            return self._run(card)

    def _run(self, card: ModelCard | None) -> dict[str, Any]:
        home = self.output / _FOLDER
        task = CausalLMTask(self.settings.corpus(), self.course.layers.model, self.folder, (0, 1))
        self._begin(home, task)
        self.course.layers.load_rest()
        walk = Walk(self.course, home, _rows(self.settings, task))
        log = read_log(self.output / LOG_FILE)
        for number in range(len(self.course.windows)):
            if not walk.is_done(number):
                record = walk.train(number)
                log = [*log[:number], record]
                with new_file(self.output / LOG_FILE) as new:
                    new.write_text("".join(json.dumps(each) + "\n" for each in log))
                Progress.write(_line(record, len(self.course.windows)))
        metrics = walk.measure()
        draw_errors(log, self.output / PICTURE_FILE)
        self._write(walk, card)
        report = {"settings": self.settings.record(), "windows": log, "metrics": metrics}
        write_json(self.output / REPORT_FILE, report)
        shutil.rmtree(home)
        return report

    def _begin(self, home: Path, task: CausalLMTask) -> None:
        """Begins a run, or refuses to go on with one that has other settings."""
        record = {
            **self.settings.record(),
            "rank": self.course.modulation.rank,
            "texts": dict(task.digests),
            "weights": _digest(self._reader.checkpoint.tensors),
        }
        if (home / _RECORD).exists():
            before = read_json_object(home / _RECORD)
            check_record(self.output, {"settings": before}, record)
            return
        check_space(self.output, self.plan.disk_bytes)
        home.mkdir(exist_ok=True)
        write_json(home / _RECORD, record)

    def _write(self, walk: Walk, card: ModelCard | None) -> None:
        """Writes the model, tensor by tensor."""
        settings, modulation = self.settings, self.course.modulation
        given = {
            path: GivenCodes(
                settings.group_size, BITS, modulation.scale_dtype, partial(walk.codes, path)
            )
            for path in self.course.paths
        }
        formats = FloatFormats(
            embed_bits=settings.embed_bits, head_bits=settings.head_bits, given_codes=given
        )
        target = self.output / RUN_MODEL
        convert(
            self._reader.checkpoint, target, formats=formats, check=False, overwrite=True, card=card
        )


def _fitting(course: Course, reader: ParameterReader) -> Course:
    """The course, or one with changes of a low rank where whole weights do not fit into memory."""
    if course.settings.rank is not None:
        return course
    memory = plan_window(course, course.largest)
    if memory.total <= memory.device.memory_bytes:
        return course
    return Course(course.settings, reader, LOW_RANK)


def _rows(settings: CalibrateSettings, task: CausalLMTask) -> np.ndarray:
    """The tokens of all samples, int32 `(samples, length + 1)`; the last ones are held out."""
    if task.repeats_at_once:
        held_out = 0 if settings.valid else settings.valid_samples
        raise TrainingError(
            f"[calibrate] 'data' must hold more than {settings.samples + held_out:,} samples of "
            f"'{settings.key('sequence_length')}' {settings.sequence_length:,} but holds fewer. Give "
            "more text, or lower 'samples'."
        )
    batch = task.batches(0)[0]
    rows = np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)
    if settings.valid:
        count = settings.valid_samples * settings.sequence_length + 1
        rows = np.concatenate([rows, task.held_out_rows(settings.valid[0], count)])
    return rows


def _digest(entries: Mapping[str, TensorEntry]) -> str:
    """The digest of the names, shapes and dtypes of tensors and of the first numbers of each."""
    digest = hashlib.sha256()
    for name, entry in sorted(entries.items()):
        digest.update(f"{name} {entry.shape} {entry.dtype} ".encode())
        first = entry.parts[0] if entry.parts else entry
        with open_file(first.file) as stream:
            stream.seek(first.start)
            digest.update(stream.read(min(_DIGESTED, first.nbytes)))
    return digest.hexdigest()


def _line(record: Mapping[str, Any], windows: int) -> str:
    first, last = record["layers"]
    shown = f"layer {first}" if first == last else f"layers {first} to {last}"
    return (
        f"Window {record['window']} of {windows}, {shown}: held-out error {record['before']:.4f} -> "
        f"{record['after']:.4f}, on samples learned from {record['learned']:.4f}, "
        f"{record['seconds']:,.0f} s."
    )
