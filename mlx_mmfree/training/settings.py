"""The settings of a training run from files of texts, tokens or images, and the tokens of the run.

Those are its vocabulary, and the token files that are made of its texts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..errors import TrainingError
from ..hub.remote.datasets import names_split, split_files
from . import run_settings
from .corpus.mixture import ORDERS, Stage
from .precision import compute_dtype
from .run_settings import CorpusSettings, LongSettings, LoopSettings, Rule, setting

COSINE, INVERSE_SQRT = SCHEDULES = ("cosine", "inverse_sqrt")
"""The course of the learning rate after the warm-up."""


_PEAK = 4e-3


def _stages(name: str, value: Any) -> tuple[Stage, ...]:
    return tuple(_stage(each) for each in run_settings.listed(value, name))


def _stage(value: Any) -> Stage:
    known = ("until", "weights")
    is_stage = isinstance(value, dict) and set(value) == set(known)
    if not (is_stage and isinstance(value["weights"], dict)):
        raise ValueError(
            "'stages' must hold stages like {until: 1, weights: {my.txt: 1}} but one is "
            f"{value!r:.80}"
        )
    until = run_settings.finite(value["until"], "'until' of a stage")
    weights = {
        str(name): run_settings.finite(weight, f"the weight of {str(name)!r:.60}")
        for name, weight in value["weights"].items()
    }
    if min(weights.values(), default=0) < 0 or not any(weights.values()):
        raise ValueError(
            "the 'weights' of a stage must be at least 0, and one of them above 0, but are "
            f"{weights!r:.80}"
        )
    return Stage(until, weights)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    return tuple(
        run_settings.finite(each, f"each of '{name}'") for each in run_settings.listed(value, name)
    )


def _are_betas(values: tuple[float, ...]) -> bool:
    return len(values) == 2 and all(0 <= beta < 1 for beta in values)


_BETAS = Rule("two numbers of at least 0 and below 1", _are_betas)


_BETWEEN = Rule("above 0 and below 1", lambda value: 0 < value < 1)


@dataclass(frozen=True, kw_only=True)
class Settings(CorpusSettings, LongSettings):
    """One run from a corpus: the keys of the YAML file, most of which are flags of `mmfree train` too.

    Raises:
        TrainingError: A value is out of its bounds, or values do not fit together.

    Example:
        >>> from mlx_mmfree.training.corpus.mixture import Stage
        >>> stage = Stage(until=1, weights={"stories.txt": 1})
        >>> settings = Settings(output="run", init_from="a-model", stages=(stage,), steps=200)
        >>> settings.steps, settings.batch_size
        (200, 16)
    """

    command: ClassVar[str] = "train"

    output: str = setting(
        "Folder of the run, for the log, the loss curve, the checkpoint and the finished model.",
        counts=False,
        holds="path",
    )
    model: dict[str, Any] = setting(
        "The architecture, as in a `config.json` of the Hub. `linear_class` makes its linear "
        "layers ternary or dense. An image model gets its classes from the training files.",
        factory=dict,
        reader=run_settings.named_mapping,
        has_flag=False,
    )
    embedding_std: float | None = setting(
        "Standard deviation of the fresh embedding. Default: 1, or the other weights' if "
        "the head shares the embedding.",
        None,
        run_settings.POSITIVE,
    )
    init_from: str | None = setting(
        "Folder or Hub repository of a model to begin with instead of random weights. Its "
        "architecture and tokenizer are used.",
        None,
        holds="model",
    )
    latent: bool | None = setting(
        "Whether the float weights of that model, if it is a ternary Llama, are master weights, "
        "which are rounded to ternary. Default: as its configuration says.",
        None,
        has_flag=False,
    )
    new_head: bool = setting(
        "Whether an image model that the run begins with gets a fresh head, for the classes of "
        "the training files.",
        False,
    )
    rebuild_masters: bool = setting(
        "Make float master weights from the ternary weights of that model, if it is packed without "
        "them. What had been rounded away stays lost.",
        False,
    )
    stages: tuple[Stage, ...] = setting(
        "Mixtures of training files, one for each stage: texts, or token files that `mmfree "
        "tokenize` wrote; for a classifier or an encoder-decoder JSON lines or tables (`.tsv`); "
        "for an image model folders with a folder of pictures for each class, `.npz` files with "
        "`images` and `labels`, or IDX files of images, such as MNIST's.",
        reader=_stages,
        has_flag=False,
    )
    order: str = setting(
        "How sequences are drawn. `random` cuts each one at a random offset, `epochs` takes every "
        "one of a file once before any of them is repeated.",
        "random",
        Rule.one_of(*ORDERS),
    )
    valid: tuple[str, ...] = setting(
        "Held-out files or splits, measured at the end. Without any, the last weights are kept.",
        (),
        reader=run_settings.names_in,
        has_flag=False,
    )
    tokenizer: str | None = setting(
        "Folder with a tokenizer. Default: the teacher's, the one beside the first token file of "
        "the first stage, or a vocabulary that is trained on its text files.",
        None,
        holds="path",
    )
    steps: int = setting("Number of optimizer steps.", 1000, run_settings.POSITIVE)
    sequence_length: int = setting(
        "Number of tokens of a sequence that a language model predicts or sees masked; the most "
        "tokens "
        "of a text to classify, of a source or of a target.",
        256,
        run_settings.POSITIVE,
    )
    text_column: str = setting(
        "Key of the text to classify in JSON lines. In a table the text is the first column.",
        "text",
    )
    label_column: str = setting("Key of its label. In a table it is the second column.", "label")
    source_column: str = setting(
        "Key of the source in JSON lines. In a table it is the first column.",
        "source",
    )
    target_column: str = setting("Key of the target. In a table it is the second column.", "target")
    mlm_probability: float = setting(
        "Share of the tokens that a masked language model has to fill in.",
        0.15,
        _BETWEEN,
    )
    random_shift: int = setting(
        "Training images are moved at random by up to this many pixels in each direction.",
        0,
        run_settings.NOT_NEGATIVE,
    )
    random_flip: bool = setting(
        "Whether training images are mirrored, each with probability 1/2.", False
    )
    label_smoothing: float = setting(
        "Share of the target's probability that is spread evenly over all classes.",
        0.0,
        run_settings.SHARE,
    )
    dropout: float = setting(
        "Probability with which training drops each element of what a mixer adds, in a model of "
        "sequences.",
        0.0,
        run_settings.SHARE,
    )
    learning_rate: float | None = setting(
        "Learning rate at its peak, after a linear warm-up. Default: 0.004, or with `inverse_sqrt` "
        "the paper's, 1 / sqrt(dims * warmup_steps).",
        None,
        run_settings.POSITIVE,
    )
    schedule: str = setting(
        "How it falls after that: by `cosine` to the final fraction of the peak at the end, or by "
        "`inverse_sqrt`, in proportion to 1 / sqrt(step).",
        COSINE,
        Rule.one_of(*SCHEDULES),
    )
    warmup_steps: int = setting("Number of steps of the warm-up.", 100)
    betas: tuple[float, float] = setting(
        "The coefficients of AdamW's two moving averages.",
        (0.9, 0.95),
        _BETAS,
        reader=_numbers,
        has_flag=False,
    )
    root: Path = field(
        default=Path(),
        compare=False,
        metadata={"words": "The folder that relative paths begin at."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"at least 0 and below 'steps' ({self.steps})"
        self.check("warmup_steps", 0 <= self.warmup_steps < self.steps, rule)
        is_plain = self.schedule == COSINE or self.warmup_steps > 0
        self.check("warmup_steps", is_plain, f"positive with {INVERSE_SQRT}")
        is_sound = self.teacher is None or not self.label_smoothing
        self.check("label_smoothing", is_sound, "0 with 'teacher'")
        is_sound = self.teacher is not None or self.teacher_top_k is None
        self.check("teacher_top_k", is_sound, "left out without 'teacher'")
        ends = [stage.until for stage in self.stages]
        if not ends or ends != sorted(ends) or ends[-1] != 1:
            raise TrainingError(
                "[train] 'stages' must have rising values of 'until', the last of them 1, but got "
                f"{ends}."
            )
        if self.init_from is None and not self.model:
            raise TrainingError(
                "[train] 'model' must describe the architecture, or 'init_from' must name a model "
                "to begin with, but neither is given."
            )
        if self.init_from is not None and (self.model or self.tokenizer is not None):
            raise TrainingError(
                "[train] 'init_from' must come without 'model' and 'tokenizer', which that model "
                "brings, but one of them is given. Leave it out."
            )
        is_sound = not self.new_head or self.init_from is not None
        self.check("new_head", is_sound, "left out without 'init_from', whose model has a head,")
        if self.embedding_std is not None:
            is_fresh = self.init_from is None
            self.check("embedding_std", is_fresh, "left out with 'init_from', which has weights,")

    def peak_learning_rate(self, dims: int) -> float:
        """The learning rate after the warm-up, of a model of so many dims."""
        if self.learning_rate is not None:
            return self.learning_rate
        if self.schedule == COSINE:
            return _PEAK
        # Vaswani et al., arXiv 1706.03762, equation 3 at the end of the warm-up
        return (dims * self.warmup_steps) ** -0.5

    def path(self, name: str) -> Path:
        """A path of the settings. It is relative to the file that they were read from."""
        return self.root / name

    def corpus(self, name: str) -> list[Path]:
        """The files of texts under a name of the settings: one, or a split of a dataset.

        Raises:
            DownloadError: The Hub does not hand them out.
        """
        path = self.path(name)
        if path.exists() or not names_split(name):
            return [path]
        return [file.fetch() for file in split_files(name)]

    @property
    def files(self) -> list[str]:
        """The names of all training and held-out files."""
        return sorted({*self.valid, *(name for stage in self.stages for name in stage.weights)})

    def loop(self, record: Mapping[str, Any], unit: str = "tokens") -> LoopSettings:
        """The settings of the loop.

        Args:
            record: Describes the weights and files of the run.
            unit: As of `LoopSettings`.
        """
        return self.loop_settings(
            self.path(self.output),
            self.steps,
            dtype=compute_dtype(self.dtype),
            unit=unit,
            record={**self.record(), **record},
        )

    def record(self) -> dict[str, Any]:
        record = super().record()
        if self.learning_rate is None and self.schedule == COSINE:
            record["learning_rate"] = _PEAK
        return record


def read_settings(
    path: Path, overrides: dict[str, Any] | None = None, *, linear_class: str | None = None
) -> Settings:
    r"""Reads the settings of a run from a YAML file.

    Args:
        path: The file.
        overrides: Values that win over the file's, unless they are `None`.
        linear_class: Replaces the `linear_class` of the architecture.

    Returns:
        The settings; relative paths in them begin at the folder of the file.

    Raises:
        TrainingError: The file cannot be read, or a value is unknown, missing or wrong.

    Example:
        >>> from pathlib import Path
        >>> keys = ["output: run", "init_from: a-model"]
        >>> keys.append("stages: [{until: 1, weights: {stories.txt: 1}}]")
        >>> written = Path("run.yaml").write_text("\n".join(keys))
        >>> read_settings(Path("run.yaml"), {"steps": 200}).steps
        200
    """
    values = run_settings.read_mapping(path, "train")
    named = values.get("plugins", ())
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    if linear_class is not None:
        if values.get("init_from") is not None:
            raise TrainingError(
                "[train] 'linear_class' must be left out with 'init_from', whose model decides it, "
                f"but got {linear_class!r}."
            )
        model = values.get("model", {})
        if isinstance(model, dict):
            values["model"] = {**model, "linear_class": linear_class}
    settings = Settings.made(values, f"'{path}'", root=path.parent)
    run_settings.load_named(named, path)
    return settings
