"""How the teacher, a student and a twin are trained and measured."""

import shutil
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mmfree import generate, load, make_sampler
from mlx_mmfree.errors import TrainingError
from mlx_mmfree.evaluation import measure_perplexity
from mlx_mmfree.files.reading import write_json
from mlx_mmfree.models import Decoder
from mlx_mmfree.models.parts.mixers import MixerChoice
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from mlx_mmfree.training import Settings, train_model
from mlx_mmfree.training.corpus.documents import read_documents
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.distil.distil import Distillation
from mlx_mmfree.training.distil.settings import DistilSettings
from mlx_mmfree.training.distil.student import (
    base_config,
    build_student,
    mixers_of,
    student_config,
)
from mlx_mmfree.training.results import Callback

from .recall_text import recall_accuracy, with_recall
from .runs import Metrics
from .student_runs import (
    ABLATIONS,
    KINDS,
    LONGER_TWIN,
    OF_TEACHER,
    TEACHER,
    TEXT_ALONE,
    TWIN,
    Plan,
    Run,
    described,
    settings_of,
)

TRAIN, VALID = "train.txt", "stories.txt"
PROMPTS = (
    "Once upon a time, there was a little",
    "Tom and Lily went to the",
    "The dog was sad. He",
)
"""Prefixes that each model continues with the seeds 0, 1 and 2."""
_SAMPLE_TOKENS, _TEMPERATURE = 80, 0.7


def prepare(plan: Plan, folder: Path) -> Metrics:
    """Writes the texts and trains the teacher. Returns its metrics."""
    write_texts(plan, folder)
    model = {
        "model_type": plan.model_type,
        "vocab_size": 512,
        "hidden_size": plan.dims,
        "num_hidden_layers": plan.layers,
        "intermediate_size": 3 * plan.dims,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": plan.dims // 4,
        "tie_word_embeddings": False,
        "initializer_range": plan.initializer_range,
    }
    steps, rate = plan.teacher_steps, plan.teacher_rate
    metrics = trained(plan, folder, folder / TEACHER, steps, rate, 0, {"model": model})
    settings = described(plan, OF_TEACHER)
    write_json(folder / f"{TEACHER}.json", {"settings": settings, **metrics})
    return metrics


def learn(run: Run, plan: Plan, folder: Path, longer: Mapping[Run, int]) -> Metrics:
    """Trains a run, measures it and writes down what it came to.

    Args:
        run: The run.
        plan: The comparison.
        folder: Folder of the runs, with the teacher.
        longer: Steps of twins that have the time of their student.
    """
    output = folder / f"{run.name}.run"
    try:
        if run.way in (TWIN, LONGER_TWIN):
            steps = longer.get(run, sum(plan.steps))
            metrics = _twin(run, plan, folder, output, steps)
        else:
            metrics = _student(run, plan, folder, output)
    except TrainingError as error:
        metrics = {"value": None, "failure": str(error)}
    shutil.rmtree(output, ignore_errors=True)
    write_json(folder / f"{run.name}.json", {"settings": settings_of(run, plan, longer), **metrics})
    return metrics


def recall_before(kind: str, seed: int, folder: Path) -> float:
    """The share of answers that a student recalls before it learns.

    A ternary student begins as a dense one.
    """
    teacher, tokenizer = load(folder / TEACHER / "model")
    config = _config(kind, teacher, is_ternary=False)
    return recall_accuracy(build_student(teacher, config, seed), tokenizer)


def _config(name: str, teacher: Decoder, *, is_ternary: bool) -> Any:
    kind, base = KINDS[name], base_config(teacher)
    mixers = mixers_of(base, [MixerChoice(each) for each in kind.to], kind.keep_layers)
    return student_config(base, mixers, TernaryLinears() if is_ternary else None)


def _twin(run: Run, plan: Plan, folder: Path, output: Path, steps: int) -> Metrics:
    """A model of the student's shape that learns from the text alone, from random weights."""
    teacher = load(folder / TEACHER / "model")[0]
    config = _config(run.kind, teacher, is_ternary=KINDS[run.kind].ternary)
    model = {"model": config.to_hub()}
    return trained(plan, folder, output, steps, run.rate, run.seed, model)


def trained(
    plan: Plan,
    folder: Path,
    output: Path,
    steps: int,
    rate: float,
    seed: int,
    model: Mapping[str, Any],
) -> Metrics:
    """Trains a model from random weights, and measures it."""
    own = folder / TEACHER / "tokenizer"
    settings = Settings(
        output=str(output.resolve()),
        tokenizer=str(own.resolve()) if own.exists() else None,
        stages=(Stage(1, {TRAIN: 1}),),
        valid=(VALID,),
        steps=steps,
        batch_size=plan.rows,
        sequence_length=plan.length,
        valid_tokens=plan.valid_tokens,
        learning_rate=rate,
        warmup_steps=steps // 20,
        steps_per_eval=max(1, steps // 4),
        seed=seed,
        root=folder.resolve(),
        **model,
    )
    timer = Timer()
    train_model(settings, callbacks=[timer])
    return measured(plan, output, folder, timer.seconds)


def _student(run: Run, plan: Plan, folder: Path, output: Path) -> Metrics:
    kind = KINDS[run.kind]
    mixers, hidden, logits = plan.steps
    given: dict[str, Any] = {"mixers_steps": mixers, "hidden_steps": hidden}
    if run.way == TEXT_ALONE or kind.to == ("same",):
        given = dict.fromkeys(given, 0)
    given |= ABLATIONS.get(run.way, {})
    last = "text_steps" if run.way == TEXT_ALONE else "logits_steps"
    given["logits_steps"] = 0
    given[last] = mixers + hidden + logits - given["mixers_steps"] - given["hidden_steps"]
    settings = DistilSettings(
        model=str((folder / TEACHER / "model").resolve()),
        output=str(output.resolve()),
        to=kind.to,
        keep_layers=kind.keep_layers,
        ternary=kind.ternary,
        data=(str((folder / TRAIN).resolve()),),
        valid=(str((folder / VALID).resolve()),),
        logits_rate=run.rate,
        text_rate=run.rate,
        batch_size=plan.rows,
        sequence_length=plan.length,
        valid_tokens=plan.valid_tokens,
        seed=run.seed,
        **given,
    )
    timer = Timer()
    report = Distillation(settings).run([timer])
    return {**measured(plan, output, folder, timer.seconds), "stages": report["metrics"]}


class Timer(Callback):
    """Adds up the processor time of training."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_begin(self, step: int) -> None:
        self._start = time.process_time()

    def on_end(self) -> None:
        self.seconds += time.process_time() - self._start


def measured(plan: Plan, output: Path, folder: Path, seconds: float) -> Metrics:
    """Bits per byte of held-out stories in chunks of a length, recalled answers, and samples."""
    model, tokenizer = load(output / "model")
    text = "\n".join(read_documents(folder / VALID))
    ids = tokenizer.encode(text)
    measured = measure_perplexity(model, ids, len(text.encode()), length=plan.length)
    return {
        "value": measured.bits_per_byte,
        "recall": recall_accuracy(model, tokenizer, plan.questions),
        "seconds": seconds,
        "samples": [_sample(model, tokenizer, seed) for seed in range(len(PROMPTS))],
    }


def _sample(model: Decoder, tokenizer: Any, seed: int) -> str:
    mx.random.seed(seed)
    sampler = make_sampler(temp=_TEMPERATURE)
    new = generate(model, tokenizer, PROMPTS[seed], max_tokens=_SAMPLE_TOKENS, sampler=sampler)
    return PROMPTS[seed] + new


def write_texts(plan: Plan, folder: Path) -> None:
    """Writes the documents of a plan with their lines of recall, and held-out stories."""
    mark = "\n<|endoftext|>\n"
    documents = with_recall(
        _documents(plan.train, plan.documents), 0, plan.every, plan.lines, plan.questions
    )
    (folder / TRAIN).write_text(mark.join(documents), encoding="utf-8")
    stories = _documents(plan.valid, plan.documents)
    (folder / VALID).write_text(mark.join(stories), encoding="utf-8")


def _documents(file: Path, most: int) -> list[str]:
    return list(islice(read_documents(file), most))
