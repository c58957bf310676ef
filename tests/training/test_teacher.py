"""Runs from files that learn from a teacher too: the loss, the tokens, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training import Settings, train_model, trainer
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.first_model import FirstModel
from mlx_mmfree.training.loop import plan_training
from mlx_mmfree.training.losses.loss import batch_logits
from mlx_mmfree.training.results import Callback, read_log
from mlx_mmfree.training.tasks.corpus import CausalLMTask
from tests.training.conftest import write_corpus
from tests.training.tasks.conftest import MODEL
from tests.training.test_distillation import wanted_divergence

HGRN = {
    "model_type": "hgrn_bit",
    "vocab_size": 280,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
}
LARGER = {"hidden_size": 24, "linear_class": "dense"}
Make = Callable[..., Settings]


@pytest.fixture
def settings_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes the settings of a run whose teacher, a larger dense model, lies in `tmp_path`."""
    monkeypatch.setattr(trainer, "plot_run", lambda *_: True)
    write_corpus(tmp_path / "train.txt", 0, documents=12)

    def make(**values: Any) -> Settings:
        given = {"output": "run", "model": HGRN, "stages": (Stage(1, {"train.txt": 1}),)}
        given |= {"steps": 4, "batch_size": 2, "sequence_length": 12, "warmup_steps": 1}
        given |= {"steps_per_report": 1, "save_every": 2, "root": tmp_path}
        return Settings(**(given | values))

    train_model(make(output="teacher", model=HGRN | LARGER, steps=60, learning_rate=0.02))
    return make


@pytest.mark.exhaustive
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (2.0, 6)])
def test_the_loss_has_the_divergence_too(
    settings_of: Make, temperature: float, top_k: int | None
) -> None:
    asked: dict[str, Any] = {"teacher_temperature": temperature, "teacher_top_k": top_k}
    settings = settings_of(teacher="teacher/model", teacher_weight=0.7, **asked)
    first = FirstModel(settings)
    tokenizer = first.tokenizer_folder
    assert tokenizer == settings.root / "teacher/model"
    student, teacher = first.load(), first.load_teacher(tokenizer)
    task = CausalLMTask(settings, student, tokenizer, (0, 1))
    [batch] = task.batches(0)
    wanted = _loss(student, teacher, batch, temperature, top_k)
    train_model(settings)
    log = read_log(settings.root / "run/log.jsonl")
    assert log[1]["loss"] == pytest.approx(wanted, rel=1e-4)
    assert (settings.root / "run/model/tokenizer.json").exists()


def _loss(student: Any, teacher: Any, batch: Batch, temperature: float, top_k: int | None) -> float:
    """The loss of a token in float64: the cross-entropy, and 0.7 times the divergence."""
    student.train()
    logits, known = (np.array(batch_logits(m, batch), np.float64) for m in (student, teacher))
    chosen = np.take_along_axis(logits, batch.targets[..., None].astype(np.int64), -1)[..., 0]
    entropy = np.log(np.exp(logits).sum(-1)) - chosen
    apart = wanted_divergence(logits, known, temperature, top_k)
    assert apart.mean() > 0.1
    return float((entropy + 0.7 * apart).mean())


class _Kill(Exception):
    pass


class _Killer(Callback):
    def on_train(self, record: Any) -> None:
        if record["step"] == 3:
            raise _Kill


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_with_its_teacher_alone(settings_of: Make) -> None:
    whole = settings_of(output="whole", teacher="teacher/model", tokenizer="teacher/model")
    train_model(whole)
    killed = replace(whole, output="killed")
    with pytest.raises(_Kill):
        train_model(killed, callbacks=[_Killer()])
    train_model(settings_of(output="other", model=HGRN | LARGER, tokenizer="teacher/model"))
    for teacher in ("other/model", None):
        with pytest.raises(TrainingError, match="holds a run with other values of teacher"):
            train_model(replace(killed, teacher=teacher))
    train_model(killed)
    weights = (settings_of().root / run / "best.safetensors" for run in ("whole", "killed"))
    assert len({file.read_bytes() for file in weights}) == 1


def test_the_plan_counts_the_teacher(settings_of: Make) -> None:
    first = FirstModel(settings_of(teacher="teacher/model"))
    alone = FirstModel(settings_of())
    assert first.teacher is not None
    teacher = first.teacher.without_values()
    plans = [
        plan_training(settings_of(), first.model, DataParallel(), teacher=each)
        for each in (None, teacher)
    ]
    assert plans[1].weights - plans[0].weights == first.nbytes - alone.nbytes > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": HGRN | {"vocab_size": 300}}, "'teacher' must have the student's 300 tokens"),
        ({"teacher_top_k": 281}, "'top_k' must be from 2 to the size of the vocabulary, 280,"),
        ({"teacher_weight": 0.0}, "'teacher_weight' must be positive but got 0.0"),
        ({"label_smoothing": 0.1}, "'label_smoothing' must be 0 with 'teacher' but got 0.1"),
        ({"teacher": None, "teacher_top_k": 5}, "'teacher_top_k' must be left out without"),
        (
            {"model": MODEL | {"task": "masked_lm"}},
            "'teacher' must be left out for a model for filling in masked tokens",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    settings_of: Make, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(TrainingError, match=words):
        train_model(settings_of(**({"teacher": "teacher/model"} | values)))


def test_a_teacher_with_other_tokens_is_refused(settings_of: Make, tmp_path: Path) -> None:
    write_corpus(tmp_path / "other.txt", 9, documents=12)
    text = (tmp_path / "other.txt").read_text().replace("hill", "valley").replace("moon", "star")
    (tmp_path / "other.txt").write_text(text)
    stages = (Stage(1, {"other.txt": 1}),)
    train_model(settings_of(output="other", stages=stages))
    with pytest.raises(TrainingError, match="must have the tokens of the model that is trained"):
        train_model(settings_of(teacher="teacher/model", tokenizer="other/model"))
