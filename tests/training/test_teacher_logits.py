"""The teacher's likeliest tokens on disk, which a stage reads instead of the teacher."""

import os
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.hub import load_model
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.distil import distil
from mlx_mmfree.training.distil.distil import Distillation, TeacherLogits
from mlx_mmfree.training.distil.settings import DistilSettings
from mlx_mmfree.training.losses.distillation_loss import distillation_loss, known_loss
from tests.tolerances import TOLERANCE, relative_error
from tests.training.test_distil import (
    MLGRU,
    ROWS,
    settings_of,
    student_of,
    teacher_folder,
    teacher_of,
    without_curve,
)

__all__ = ["teacher_folder", "without_curve"]


def batches(step: int) -> list[Batch]:
    rows = np.roll(ROWS, step, axis=1)
    return [Batch.of_rows(rows[:2]), Batch.of_rows(rows[2:])]


def test_loss_and_gradient_are_those_of_the_teacher(tmp_path: Path) -> None:
    teacher = teacher_of()
    student = student_of(teacher, MLGRU)
    known = TeacherLogits(tmp_path, {}, (6, 12, 5))
    known.write(teacher, batches, 2)
    options: dict[str, Any] = {"weight": 0.7, "temperature": 2.0}
    whole = nn.value_and_grad(student, distillation_loss(teacher, student, top_k=5, **options))
    stored = nn.value_and_grad(student, known_loss(**options))
    read = known.batches(batches)
    for step in (1, 0):
        for batch, with_known in zip(batches(step), read(step), strict=True):
            assert np.array_equal(batch.inputs, with_known.inputs)
            want, got = whole(student, batch), stored(student, with_known)
            assert relative_error(got[0], want[0]) <= TOLERANCE[mx.float16]
            gradients = [dict(tree_flatten(each[1])) for each in (got, want)]
            for name, gradient in gradients[1].items():
                assert relative_error(gradients[0][name], gradient) <= TOLERANCE[mx.float16], name


def test_what_is_stored(tmp_path: Path) -> None:
    teacher = teacher_of()
    known = TeacherLogits(tmp_path, {}, (3, 12, 5))
    known.write(teacher, batches, 1)
    logits = np.array(teacher(mx.array(ROWS[:, :-1]))[0])
    table = np.load(known.file)
    order = np.argsort(-table["logits"], axis=-1)
    tokens = np.take_along_axis(table["tokens"], order, axis=-1)
    assert np.array_equal(tokens, np.argsort(-logits, axis=-1)[..., :5])
    largest = np.sort(logits, axis=-1)[..., ::-1][..., :5]
    got = mx.array(np.take_along_axis(table["logits"], order, axis=-1))
    assert relative_error(got, mx.array(largest - largest[..., :1])) <= TOLERANCE[mx.float16]


def test_a_file_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of()
    known = TeacherLogits(tmp_path, {"seed": 0}, (6, 12, 5))
    calls = 0

    def stopped(*arguments: Any) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return teacher_of().logits(mx.zeros((1, 12, 32)))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(distil, "batch_logits", stopped)
        known.write(teacher, batches, 2)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TrainingError, match="must be what this run wrote"):
        known.batches(batches)
    known.write(teacher, batches, 2)
    assert TeacherLogits(tmp_path, {"seed": 1}, (6, 12, 5)).file != known.file
    known.file.write_bytes(known.file.read_bytes()[:-8])
    with pytest.raises(TrainingError, match="Remove it, and the run writes it again"):
        known.batches(batches)


def cached(folder: Path, name: str, **changes: Any) -> DistilSettings:
    few = {"mixers_steps": 1, "hidden_steps": 0, "logits_steps": 3, "text_steps": 1}
    return settings_of(folder, name, **{**few, "teacher_top_k": 8, **changes})


@pytest.mark.exhaustive
def test_a_run_gives_the_same_and_keeps_no_teacher(
    teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Distillation._train
    teachers: list[Any] = []
    alive: list[bool] = []

    def watched(self: Distillation, name: Any, *arguments: Any) -> None:
        if name == "mixers":
            teachers.append(weakref.ref(self.teacher))
        alive.append(teachers[-1]() is not None)
        train(self, name, *arguments)

    monkeypatch.setattr(Distillation, "_train", watched)
    plain = Distillation(cached(teacher_folder, "plain"))
    run = Distillation(cached(teacher_folder, "cached", cache_logits=True))
    plans = [each.plans() for each in (plain, run)]
    of_teacher = sum(p.nbytes for _, p in tree_flatten(load_model(teacher_folder).parameters()))
    assert plans[0]["mixers"].total == plans[1]["mixers"].total
    assert plans[0]["text"].total - plans[1]["text"].total == of_teacher
    assert plans[0]["logits"].total - plans[1]["logits"].total >= of_teacher
    want, got = plain.run(), run.run()
    assert alive == [True, True, True, True, False, False]
    for name, metrics in want["metrics"].items():
        assert got["metrics"][name] == pytest.approx(metrics, rel=TOLERANCE[mx.float16])
    students = (load_model(teacher_folder.parent / n / "model") for n in ("cached", "plain"))
    logits = [student(mx.array(ROWS))[0] for student in students]
    assert relative_error(*logits) <= TOLERANCE[mx.float16]
    # a run that goes on reads the file that is there
    monkeypatch.setattr(TeacherLogits, "_row", None)
    again = Distillation(run.settings).run()
    assert again["metrics"] == got["metrics"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_top_k": None}, "'cache_logits' must be left out without 'teacher_top_k'"),
        ({"logits_steps": 0}, "'cache_logits' must be left out without 'teacher_top_k'"),
        ({"teacher_top_k": 1}, "'top_k' must be from 2 to the size of the vocabulary, 520"),
    ],
)
def test_settings_that_do_not_fit(
    teacher_folder: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(TrainingError, match=message):
        Distillation(cached(teacher_folder, "run", **{"cache_logits": True, **changes}))


@pytest.mark.parametrize("size", [0, 100, 200])
def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path, size: int) -> None:
    known = TeacherLogits(tmp_path, {}, (6, 12, 5))
    known.write(teacher_of(), batches, 2)
    read = known.batches(batches)
    os.truncate(known.file, size)
    with pytest.raises(TrainingError, match="must be what this run wrote but it was changed while"):
        read(0)
