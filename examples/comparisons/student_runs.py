"""The runs that compare students with their twins: what there is to train, and what each came to."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .runs import Metrics

CORPUS = Path(__file__).parents[1] / "demo_corpus"
TEACHER = "teacher"

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


MAIN = "MLGRU"
"""The kind whose stages are left out one by one, unless the plan names another."""
HYBRID = "MLGRU 3 : attention 1"
"""The kind that keeps some attention."""

KINDS = {
    "MLGRU": Kind(("mlgru",)),
    "MLGRU, ternary": Kind(("mlgru",), ternary=True),
    "GLA": Kind(("gla",)),
    "HGRN2": Kind(("hgrn2",)),
    HYBRID: Kind(("mlgru",), keep_layers=(3,)),
}
_WITH_TWINS = tuple(KINDS)
KINDS |= {
    "Gated DeltaNet": Kind(("gated_delta_net",)),
    "Gated DeltaNet, ternary": Kind(("gated_delta_net",), ternary=True),
    "KDA": Kind(("kda",)),
    "MLGRU 3 : Gated DeltaNet 1": Kind(("mlgru", "mlgru", "mlgru", "gated_delta_net")),
}


@dataclass(frozen=True)
class Plan:
    """The size of the comparison.

    Attributes:
        train: Documents to learn from.
        valid: Held-out documents.
        documents: The most documents of each.
        every: Lines of recall follow so many stories.
        lines: So many of them.
        questions: Questions of each, whose words may repeat; 0 asks for each word once.
        model_type: The teacher's architecture.
        initializer_range: Deviation of its first weights.
        dims: Model dims.
        layers: Layers of the teacher.
        teacher_steps: Steps of the teacher.
        teacher_rate: Its learning rate.
        steps: Steps of a student in each of its stages; a twin has their sum.
        rates: Learning rates of the last stage of a student, and of its twin.
        seeds: Students of each kind.
        kinds: The kinds.
        main: The kind whose stages are left out one by one.
        ways: What is left out of it.
        rows: Sequences in a batch.
        length: Tokens of a sequence.
        valid_tokens: Tokens by which the best weights are picked.
        has_twins: Whether each kind learns from random weights too.
    """

    train: Path = CORPUS / "train-tinystories.txt.xz"
    valid: Path = CORPUS / "valid-tinystories.txt.xz"
    documents: int = 2**20
    every: int = 1
    lines: int = 1
    questions: int = 0
    model_type: str = "llama"
    initializer_range: float = 0.02
    dims: int = 96
    layers: int = 4
    teacher_steps: int = 4000
    teacher_rate: float = 2e-3
    steps: tuple[int, int, int] = (30, 30, 140)
    rates: tuple[float, ...] = (1e-3, 4e-3, 1.6e-2)
    seeds: int = 3
    kinds: tuple[str, ...] = _WITH_TWINS
    main: str = MAIN
    ways: tuple[str, ...] = (TEXT_ALONE, *ABLATIONS)
    rows: int = 16
    length: int = 96
    valid_tokens: int = 16384
    has_twins: bool = True


MEMORY = Plan(
    lines=4,
    questions=24,
    model_type="qwen3",
    initializer_range=0.1,
    dims=128,
    teacher_rate=4e-3,
    rates=(1e-3, 4e-3),
    kinds=(
        *("Gated DeltaNet", "GLA", "Gated DeltaNet, ternary", "MLGRU 3 : Gated DeltaNet 1"),
        *("KDA", "HGRN2"),
    ),
    main="Gated DeltaNet",
    has_twins=False,
)
"""Students of a teacher that recalls, since most of its texts ask for it."""

QUICK = Plan(
    train=CORPUS / "valid-storybooks.txt",
    valid=CORPUS / "valid-storybooks.txt",
    documents=4,
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

OF_TEACHER = (
    *("train", "valid", "documents", "every", "lines", "questions", "model_type"),
    *("initializer_range", "dims", "layers", "teacher_steps", "teacher_rate", "rows", "length"),
    "valid_tokens",
)
"""The settings that the teacher depends on."""


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


def known_teacher(plan: Plan, folder: Path) -> Metrics | None:
    """The metrics of a teacher that is trained, unless it was another plan's."""
    file = folder / f"{TEACHER}.json"
    if not file.exists():
        return None
    metrics: Metrics = json.loads(file.read_text())
    return metrics if metrics.pop("settings") == described(plan, OF_TEACHER) else None


def finished(run: Run, plan: Plan, folder: Path, longer: Mapping[Run, int]) -> Metrics | None:
    """The result of a finished run, unless it was another plan's."""
    file = folder / f"{run.name}.json"
    if not file.exists():
        return None
    metrics: Metrics = json.loads(file.read_text())
    return metrics if metrics.pop("settings") == settings_of(run, plan, longer) else None


def settings_of(run: Run, plan: Plan, longer: Mapping[Run, int]) -> dict[str, Any]:
    """The settings that a result depends on, as JSON gives them back."""
    names = (*OF_TEACHER, "steps")
    values = {**asdict(run), "plan": described(plan, names), "longer": longer.get(run)}
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def searches(plan: Plan) -> list[Run]:
    """The runs that find the rate of each kind, of students and of twins, with the first seed."""
    return [
        Run(kind, way, rate)
        for rate in plan.rates
        for kind in plan.kinds
        for way in ((DISTILLED, TWIN) if plan.has_twins else (DISTILLED,))
    ]


def number_of_runs(plan: Plan) -> int:
    """How many runs there are once all have ended well."""
    # a student, a twin, and one that takes longer
    kinds = len(plan.kinds)
    tried, rows = (2 * kinds, 3 * kinds) if plan.has_twins else (kinds, kinds)
    others = sum(len(left_out(plan, kind)) for kind in plan.kinds)
    # the runs of the first seed at the best rates are among the searches
    final = plan.seeds * (rows + others) - tried
    return len(searches(plan)) + final


def best_rates(tried: Mapping[Run, Metrics]) -> dict[tuple[str, str], float]:
    """The rate with the lowest bits per byte of each kind and way."""
    best: dict[tuple[str, str], Run] = {}
    for run, metrics in tried.items():
        if metrics["value"] is not None:
            other = best.setdefault((run.kind, run.way), run)
            if metrics["value"] < tried[other]["value"]:
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
    return plan.ways if kind == plan.main else ()


def longer_twins(plan: Plan, results: Mapping[Run, Metrics]) -> dict[Run, int]:
    """Twins that may learn for as long as their student took, and their steps."""
    found = {}
    for run, metrics in results.items():
        students = [
            other
            for run_, other in results.items()
            if (run_.kind, run_.way, run_.seed) == (run.kind, DISTILLED, run.seed)
            and other["value"] is not None
        ]
        if run.way == TWIN and metrics["value"] is not None and students:
            factor = min(each["seconds"] for each in students) / metrics["seconds"]
            steps = round(sum(plan.steps) * max(1.0, factor))
            found[replace(run, way=LONGER_TWIN)] = steps
    return found


def described(plan: Plan, names: tuple[str, ...]) -> dict[str, Any]:
    """The values of a plan by these names, as JSON gives them back."""
    values = {name: getattr(plan, name) for name in names}
    plain = {name: v.name if isinstance(v, Path) else v for name, v in values.items()}
    found: dict[str, Any] = json.loads(json.dumps(plain))
    return found
