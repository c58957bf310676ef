"""The runs that compare students with their twins: what there is to train, and what each came to."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_mmfree import load
from mlx_mmfree.errors import TrainingError
from mlx_mmfree.evaluation import measure_perplexity
from mlx_mmfree.files.json_file import write_json
from mlx_mmfree.models.parts.mixer_choice import MixerChoice
from mlx_mmfree.training import Settings, train_model
from mlx_mmfree.training.callbacks import Callback
from mlx_mmfree.training.corpus.documents import read_documents
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.distil.distil import Distillation
from mlx_mmfree.training.distil.settings import DistilSettings
from mlx_mmfree.training.distil.student import base_config, mixers_of, student_config

from .recall_text import recall_accuracy, with_recall
from .runs import Figures

CORPUS = Path(__file__).parents[1] / "demo_corpus"
TEACHER, TRAIN, VALID = "teacher", "train.txt", "stories.txt"

DISTILLED, TWIN, LONGER_TWIN = "distilled", "twin", "twin, same time"
WAYS = (DISTILLED, TWIN, LONGER_TWIN)
TEXT_ALONE = "teacher's weights, text alone"
ABLATIONS: dict[str, dict[str, Any]] = {
    "without the stage of single mixers": {"mixers_steps": 0},
    "without the stage of the residual stream": {"hidden_steps": 0},
    "without both": {"mixers_steps": 0, "hidden_steps": 0},
    "mixers begin with random weights": {"random_mixers": True},
}
"""Ways that leave something out. The steps of a stage that is left out go to the logits."""


@dataclass(frozen=True)
class Kind:
    """A kind of student: its mixers, the layers that keep attention, and its linears."""

    to: tuple[str, ...]
    keep_layers: tuple[int, ...] = ()
    ternary: bool = False


KINDS = {
    "MLGRU": Kind(("mlgru",)),
    "MLGRU, ternary": Kind(("mlgru",), ternary=True),
    "GLA": Kind(("gla",)),
    "HGRN2": Kind(("hgrn2",)),
    "MLGRU 3 : attention 1": Kind(("mlgru",), keep_layers=(3,)),
    "attention, ternary": Kind(("same",), ternary=True),
}
MAIN = "MLGRU"
"""The kind whose stages are left out one by one."""


@dataclass(frozen=True)
class Plan:
    """The size of the comparison.

    Attributes:
        train: Documents to learn from.
        valid: Held-out documents.
        documents: The most documents of each.
        every: A line of recall follows so many stories.
        dims: Model dims.
        teacher_steps: Steps of the teacher.
        steps: Steps of a student in each of its stages, and those of a twin together.
        rates: Learning rates of the last stage of a student, and of its twin.
        seeds: Students of each kind.
        kinds: The kinds.
        ways: What is left out of the first kind.
        rows: Sequences in a batch.
        length: Tokens of a sequence.
        valid_tokens: Tokens by which the best weights are picked.
    """

    train: Path = CORPUS / "train-tinystories.txt.xz"
    valid: Path = CORPUS / "valid-tinystories.txt.xz"
    documents: int = 2**20
    every: int = 1
    dims: int = 96
    teacher_steps: int = 4000
    steps: tuple[int, int, int] = (60, 60, 280)
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    seeds: int = 3
    kinds: tuple[str, ...] = tuple(KINDS)
    ways: tuple[str, ...] = (TEXT_ALONE, *ABLATIONS)
    rows: int = 16
    length: int = 96
    valid_tokens: int = 16384


QUICK = Plan(
    train=CORPUS / "valid-storybooks.txt",
    valid=CORPUS / "valid-storybooks.txt",
    documents=40,
    dims=32,
    teacher_steps=3,
    steps=(1, 1, 2),
    rates=(1e-3,),
    seeds=1,
    kinds=(MAIN,),
    ways=("without both",),
    rows=2,
    length=32,
    valid_tokens=128,
)


_OF_TEACHER = (
    *("train", "valid", "documents", "every", "dims", "teacher_steps", "rows", "length"),
    "valid_tokens",
)


@dataclass(frozen=True)
class Run:
    """A student or a twin: its kind, the way it learns, its rate and its seed."""

    kind: str
    way: str
    rate: float
    seed: int = 0

    @property
    def name(self) -> str:
        words = (self.kind, self.way, f"{self.rate:g}", str(self.seed))
        return "-".join("".join(c if c.isalnum() else "_" for c in word) for word in words).lower()


def known_teacher(plan: Plan, folder: Path) -> Figures | None:
    """The figures of a teacher that is trained, unless it was another plan's."""
    file = folder / f"{TEACHER}.json"
    if not file.exists():
        return None
    figures: Figures = json.loads(file.read_text())
    return figures if figures.pop("settings") == _described(plan, _OF_TEACHER) else None


def prepare(plan: Plan, folder: Path) -> Figures:
    """Writes the texts and trains the teacher. Returns its figures."""
    _write_texts(plan, folder)
    output = folder / TEACHER
    model = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": plan.dims,
        "num_hidden_layers": 4,
        "intermediate_size": 3 * plan.dims,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    figures = _trained(plan, folder, output, plan.teacher_steps, 2e-3, 0, {"model": model})
    settings = _described(plan, _OF_TEACHER)
    write_json(folder / f"{TEACHER}.json", {"settings": settings, **figures})
    return figures


def learn(run: Run, plan: Plan, folder: Path, longer: Mapping[Run, int]) -> Figures:
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
            figures = _twin(run, plan, folder, output, steps)
        else:
            figures = _student(run, plan, folder, output)
    except TrainingError as error:
        figures = {"value": None, "failure": str(error)}
    shutil.rmtree(output, ignore_errors=True)
    write_json(folder / f"{run.name}.json", {"settings": settings_of(run, plan, longer), **figures})
    return figures


def finished(run: Run, plan: Plan, folder: Path, longer: Mapping[Run, int]) -> Figures | None:
    """What a finished run came to, unless it was another plan's."""
    file = folder / f"{run.name}.json"
    if not file.exists():
        return None
    figures: Figures = json.loads(file.read_text())
    return figures if figures.pop("settings") == settings_of(run, plan, longer) else None


def settings_of(run: Run, plan: Plan, longer: Mapping[Run, int]) -> dict[str, Any]:
    """What a result depends on, as JSON gives it back."""
    names = (*_OF_TEACHER, "steps")
    described = {**asdict(run), "plan": _described(plan, names), "longer": longer.get(run)}
    found: dict[str, Any] = json.loads(json.dumps(described))
    return found


def searches(plan: Plan) -> list[Run]:
    """The runs that find the rate of each kind, of students and of twins, with the first seed."""
    return [
        Run(kind, way, rate)
        for rate in plan.rates
        for kind in plan.kinds
        for way in (DISTILLED, TWIN)
    ]


def best_rates(tried: Mapping[Run, Figures]) -> dict[tuple[str, str], float]:
    """The rate with the lowest bits per byte of each kind and way."""
    best: dict[tuple[str, str], Run] = {}
    for run, figures in tried.items():
        if figures["value"] is not None:
            other = best.setdefault((run.kind, run.way), run)
            if figures["value"] < tried[other]["value"]:
                best[run.kind, run.way] = run
    return {pair: run.rate for pair, run in best.items()}


def final_runs(plan: Plan, rates: Mapping[tuple[str, str], float]) -> list[Run]:
    """All runs at their rates but twins that take longer: students, twins, and what is left out."""
    found = []
    for seed in range(plan.seeds):
        for (kind, way), rate in rates.items():
            found.append(Run(kind, way, rate, seed))
            if way == DISTILLED:
                found += [Run(kind, other, rate, seed) for other in left_out(plan, kind)]
    return found


def left_out(plan: Plan, kind: str) -> tuple[str, ...]:
    """The ways in which a kind learns with something left out."""
    return tuple(way for way in plan.ways if kind == MAIN or way == TEXT_ALONE)


def longer_twins(plan: Plan, results: Mapping[Run, Figures]) -> dict[Run, int]:
    """Twins that may learn for as long as their student took, and their steps."""
    found = {}
    for run, figures in results.items():
        students = [
            other
            for run_, other in results.items()
            if (run_.kind, run_.way, run_.seed) == (run.kind, DISTILLED, run.seed)
            and other["value"] is not None
        ]
        if run.way == TWIN and figures["value"] is not None and students:
            factor = min(each["seconds"] for each in students) / figures["seconds"]
            steps = round(sum(plan.steps) * max(1.0, factor))
            found[replace(run, way=LONGER_TWIN)] = steps
    return found


def _twin(run: Run, plan: Plan, folder: Path, output: Path, steps: int) -> Figures:
    """A model of the student's shape that learns from the text alone, from random weights."""
    kind, teacher = KINDS[run.kind], load(folder / TEACHER / "model")[0]
    base = base_config(teacher)
    mixers = mixers_of(base, [MixerChoice(name) for name in kind.to], kind.keep_layers)
    config = student_config(base, mixers, is_ternary=kind.ternary)
    model = {"model": config.to_hub()}
    return _trained(plan, folder, output, steps, run.rate, run.seed, model)


def _trained(
    plan: Plan,
    folder: Path,
    output: Path,
    steps: int,
    rate: float,
    seed: int,
    model: Mapping[str, Any],
) -> Figures:
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
    timer = _Timer()
    train_model(settings, callbacks=[timer])
    return _measured(output, folder, plan.length, timer.seconds)


def _student(run: Run, plan: Plan, folder: Path, output: Path) -> Figures:
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
        path=str(output.resolve()),
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
    timer = _Timer()
    report = Distillation(settings).run([timer])
    return {**_measured(output, folder, plan.length, timer.seconds), "stages": report["figures"]}


class _Timer(Callback):
    """Adds up the processor time of training."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_begin(self, step: int) -> None:
        self._start = time.process_time()

    def on_end(self) -> None:
        self.seconds += time.process_time() - self._start


def _measured(output: Path, folder: Path, length: int, seconds: float) -> Figures:
    """Bits per byte of held-out stories in pieces of a length, and the share of recalled answers."""
    model, tokenizer = load(output / "model")
    text = "\n".join(read_documents(folder / VALID))
    ids = tokenizer.encode(text)
    measured = measure_perplexity(model, ids, len(text.encode()), length=length)
    return {
        "value": measured.bits_per_byte,
        "recall": recall_accuracy(model, tokenizer),
        "seconds": seconds,
    }


def _write_texts(plan: Plan, folder: Path) -> None:
    mark = "\n<|endoftext|>\n"
    documents = with_recall(_documents(plan.train, plan.documents), 0, plan.every)
    (folder / TRAIN).write_text(mark.join(documents), encoding="utf-8")
    stories = _documents(plan.valid, plan.documents)
    (folder / VALID).write_text(mark.join(stories), encoding="utf-8")


def _documents(file: Path, most: int) -> list[str]:
    return list(islice(read_documents(file), most))


def _described(plan: Plan, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(plan, name) for name in names}
    plain = {name: v.name if isinstance(v, Path) else v for name, v in values.items()}
    found: dict[str, Any] = json.loads(json.dumps(plain))
    return found
