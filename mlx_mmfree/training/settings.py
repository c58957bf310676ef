"""The settings of a training run from files of texts, tokens or images."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import TrainingError
from .corpus.mixture import ORDERS, Stage
from .data_parallel import DEFAULT_TIMEOUT_S
from .loop_settings import LoopSettings
from .precision import COMPUTE_DTYPES, compute_dtype
from .yaml_values import check_keys, checked_values, finite, listed, names_in, read_mapping

ADAMW = ("adamw", "adamw8bit")
"""The optimizers of a run from a corpus."""

COSINE, INVERSE_SQRT = SCHEDULES = ("cosine", "inverse_sqrt")
"""What the learning rate does after the warm-up."""

_PEAK = 4e-3

_WITHOUT_INFLUENCE = (
    "root",
    "output",
    # the digest of its weights counts, not where they lie
    "teacher",
    "steps_per_report",
    "save_every",
    "patience",
    "clear_cache_threshold",
    "process_timeout_s",
)
_LATER = (
    "dtype",
    "optimizer",
    "embedding_std",
    "text_column",
    "label_column",
    "source_column",
    "target_column",
    "mlm_probability",
    "label_smoothing",
    "dropout",
    "teacher_weight",
    "teacher_temperature",
    "teacher_top_k",
    "schedule",
    "new_head",
    "random_shift",
    "random_flip",
)
_POSITIVE = (
    "steps",
    "batch_size",
    "accumulation_steps",
    "sequence_length",
    "steps_per_report",
    "steps_per_eval",
    "save_every",
    "valid_tokens",
    "teacher_weight",
    "teacher_temperature",
    "process_timeout_s",
)
_NOT_NEGATIVE = (
    "quantization_warmup",
    "patience",
    "random_shift",
    "seed",
    "clip_norm",
    "weight_decay",
    "final_learning_rate",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run from a corpus: the keys of the YAML file, most of which are flags of `mmfree train` too.

    Attributes:
        output: Folder of the run, for the log, the loss curve, the checkpoint and the finished model.
        model: The architecture, as in a `config.json` of the Hub. `linear_class` makes its linear
            layers ternary or dense. A model of images gets its classes from the training files.
        embedding_std: Standard deviation of the fresh embedding. Default: 1, or that of the other
            weights if the head shares the embedding.
        init_from: Folder or Hub repository of a model to begin with instead of random weights. Its
            architecture and tokenizer are used.
        latent: Whether the float weights of that model, if it is a ternary Llama, are master weights,
            which are rounded to ternary. Default: as its configuration says.
        new_head: Whether a model of images that the run begins with gets a fresh head, for the classes
            of the training files.
        rebuild_masters: Make float master weights from the ternary weights of that model, if it is
            packed without them. What had been rounded away stays lost.
        stages: Mixtures of training files, one for each stage: texts, or token files that `mmfree
            tokenize` wrote; for a classifier or an encoder-decoder JSON lines or tables (`.tsv`); for a
            model of images folders with a folder of pictures for each class, `.npz` files with `images`
            and `labels`, or IDX files of images, as those of MNIST.
        order: How sequences are drawn. `random` cuts each one at a random place, `epochs` takes every
            one of a file once before any of them comes again.
        valid: Held-out files, measured at the end. Without any, the last weights are kept.
        valid_tokens: Number of tokens, or of images, of the first held-out file on which validations
            measure the loss that picks the best weights.
        tokenizer: Folder with a tokenizer. Default: the teacher's, the one beside the first token file
            of the first stage, or a vocabulary that is trained on its text files.
        steps: Number of optimizer steps.
        batch_size: Number of sequences in a forward pass.
        accumulation_steps: Number of forward passes in an optimizer step.
        sequence_length: Number of tokens of a sequence that a language model predicts or sees masked;
            the most tokens of a text to classify, of a source or of a target.
        text_column: Key of the text to classify in JSON lines. In a table the text is the first column.
        label_column: Key of its label. In a table it is the second column.
        source_column: Key of the source in JSON lines. In a table it is the first column.
        target_column: Key of the target. In a table it is the second column.
        mlm_probability: Share of the tokens that a masked language model has to fill in.
        random_shift: Training images are moved by up to so many pixels in each direction, as drawn.
        random_flip: Whether training images are mirrored, each with probability 1/2.
        label_smoothing: Share of the target's probability that is spread evenly over all classes.
        dropout: Probability with which training drops each element of what a mixer adds, in a model of
            sequences.
        teacher: Folder or Hub repository of a language model with the same tokens, of any size. The loss
            also compares the model's distribution of the next token with the teacher's.
        teacher_weight: Weight of the divergence from the teacher, beside the cross-entropy of the data.
        teacher_temperature: Divisor of both models' logits in the divergence.
        teacher_top_k: Compare only so many of the teacher's likeliest tokens. Default: all.
        learning_rate: Learning rate at its peak, after a linear warm-up. Default: 0.004, or with
            `inverse_sqrt` that of the paper, 1 / sqrt(dims * warmup_steps).
        schedule: How it falls after that: by `cosine` to a fraction of the peak at the end, or by
            `inverse_sqrt`, in proportion to 1 / sqrt(step).
        final_learning_rate: Fraction of the peak that is left at the end of `cosine`.
        warmup_steps: Number of steps of the warm-up.
        weight_decay: Weight decay of matrices. Norms and bounds have none.
        optimizer: `adamw`, or `adamw8bit`, which keeps the moments of large arrays in 8 bits.
        betas: The coefficients of AdamW's two moving averages.
        clip_norm: Largest norm of the gradient. 0 turns clipping off.
        quantization_warmup: Steps over which ternary layers change from float to quantised.
        grad_checkpoint: Recompute each block in the backward pass, which saves memory.
        steps_per_report: Steps between two lines of the log.
        steps_per_eval: Steps between two validations.
        save_every: Steps between two checkpoints.
        patience: End the run after this many validations in a row without a better loss. 0 turns this
            off.
        clear_cache_threshold: Clear MLX's cache after a step that leaves it larger than this.
        process_timeout_s: Seconds that a process waits for the others before it gives up.
        dtype: Float type to compute in, where the device is fast at it. Master weights, moments and the
            saved models are always float32.
        seed: Seed of weights and batches.
        root: The folder that relative paths begin at.

    Raises:
        TrainingError: A value is out of its bounds, or values do not fit together.

    Example:
        >>> from mlx_mmfree.training.corpus.mixture import Stage
        >>> stage = Stage(until=1, weights={"stories.txt": 1})
        >>> settings = Settings(output="run", init_from="a-model", stages=(stage,), steps=200)
        >>> settings.steps, settings.batch_size
        (200, 16)
    """

    output: str
    model: dict[str, Any] = field(default_factory=dict)
    embedding_std: float | None = None
    init_from: str | None = None
    latent: bool | None = None
    new_head: bool = False
    rebuild_masters: bool = False
    stages: tuple[Stage, ...]
    order: str = "random"
    valid: tuple[str, ...] = ()
    valid_tokens: int = 32768
    tokenizer: str | None = None
    steps: int = 1000
    batch_size: int = 16
    accumulation_steps: int = 1
    sequence_length: int = 256
    text_column: str = "text"
    label_column: str = "label"
    source_column: str = "source"
    target_column: str = "target"
    mlm_probability: float = 0.15
    random_shift: int = 0
    random_flip: bool = False
    label_smoothing: float = 0.0
    dropout: float = 0.0
    teacher: str | None = None
    teacher_weight: float = 1.0
    teacher_temperature: float = 1.0
    teacher_top_k: int | None = None
    learning_rate: float | None = None
    schedule: str = COSINE
    final_learning_rate: float = 0.1
    warmup_steps: int = 100
    weight_decay: float = 0.1
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    quantization_warmup: int = 0
    grad_checkpoint: bool = False
    steps_per_report: int = 10
    steps_per_eval: int = 250
    save_every: int = 100
    patience: int = 0
    clear_cache_threshold: int | None = None
    process_timeout_s: float = DEFAULT_TIMEOUT_S
    dtype: str = "float32"
    seed: int = 0
    root: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            self._check(name, 0 < getattr(self, name) < math.inf, "positive")
        for name in _NOT_NEGATIVE:
            self._check(name, 0 <= getattr(self, name) < 2**63, "at least 0")
        rule = f"at least 0 and below 'steps' ({self.steps})"
        self._check("warmup_steps", 0 <= self.warmup_steps < self.steps, rule)
        is_plain = self.schedule == COSINE or self.warmup_steps > 0
        self._check("warmup_steps", is_plain, f"positive with {INVERSE_SQRT}")
        is_sound = self.learning_rate is None or 0 < self.learning_rate < math.inf
        self._check("learning_rate", is_sound, "positive")
        self._check("mlm_probability", 0 < self.mlm_probability < 1, "above 0 and below 1")
        for name in ("label_smoothing", "dropout"):
            self._check(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        is_sound = self.teacher is None or not self.label_smoothing
        self._check("label_smoothing", is_sound, "0 with 'teacher'")
        is_sound = self.teacher is not None or self.teacher_top_k is None
        self._check("teacher_top_k", is_sound, "left out without 'teacher'")
        is_sound = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self._check("betas", is_sound, "two numbers of at least 0 and below 1")
        self._check("order", self.order in ORDERS, f"one of {', '.join(ORDERS)}")
        self._check("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._check("optimizer", self.optimizer in ADAMW, f"one of {', '.join(ADAMW)}")
        self._check("dtype", self.dtype in COMPUTE_DTYPES, f"one of {', '.join(COMPUTE_DTYPES)}")
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
        self._check("new_head", is_sound, "left out without 'init_from', whose model has a head,")
        if self.embedding_std is not None:
            self._check("embedding_std", 0 < self.embedding_std < math.inf, "positive")
            is_fresh = self.init_from is None
            self._check("embedding_std", is_fresh, "left out with 'init_from', which has weights,")

    def _check(self, name: str, is_sound: bool, rule: str) -> None:
        if not is_sound:
            value = getattr(self, name)
            shown = list(value) if isinstance(value, tuple) else value
            raise TrainingError(f"[train] '{name}' must be {rule} but got {shown!r}.")

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
        return LoopSettings(
            folder=self.path(self.output),
            steps=self.steps,
            seed=self.seed,
            clip_norm=self.clip_norm,
            steps_per_report=self.steps_per_report,
            steps_per_eval=self.steps_per_eval,
            save_every=self.save_every,
            patience=self.patience,
            quantization_warmup=self.quantization_warmup,
            dtype=compute_dtype(self.dtype),
            clear_cache_bytes=self.clear_cache_threshold,
            unit=unit,
            record={**self.record(), **record},
        )

    def record(self) -> dict[str, Any]:
        """All plain values that decide the course of the run."""
        record = asdict(self)
        for name in _WITHOUT_INFLUENCE:
            del record[name]
        # runs that were begun before there was a choice have no such key
        for name in _LATER:
            if record[name] == Settings.__dataclass_fields__[name].default:
                del record[name]
        if self.learning_rate is None and self.schedule == COSINE:
            record["learning_rate"] = _PEAK
        return record


def read_settings(
    path: Path, overrides: dict[str, Any] | None = None, *, linear_class: str | None = None
) -> Settings:
    r"""Reads the settings of a run from a YAML file.

    Args:
        path: The file.
        overrides: Values that win over those of the file, unless they are `None`.
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
    values = read_mapping(path, "train")
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    if linear_class is not None:
        if values.get("init_from") is not None:
            raise TrainingError(
                "[train] 'linear_class' must be left out with 'init_from', whose model decides it, "
                f"but got {linear_class!r}."
            )
        values["model"] = {**_mapping(values, "model"), "linear_class": linear_class}
    return _settings(values, path)


def _mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name, {})
    if not isinstance(value, dict):
        raise TrainingError(f"[train] '{name}' must be a mapping but got {value!r:.80}.")
    return value


def _stage(value: Any) -> Stage:
    known = ("until", "weights")
    is_stage = isinstance(value, dict) and set(value) == set(known)
    if not (is_stage and isinstance(value["weights"], dict)):
        raise ValueError(
            "'stages' must hold stages like {until: 1, weights: {my.txt: 1}} but one is "
            f"{value!r:.80}"
        )
    until = finite(value["until"], "'until' of a stage")
    weights = {
        str(name): finite(weight, f"the weight of {str(name)!r:.60}")
        for name, weight in value["weights"].items()
    }
    if min(weights.values(), default=0) < 0 or not any(weights.values()):
        raise ValueError(
            "the 'weights' of a stage must be at least 0, and one of them above 0, but are "
            f"{weights!r:.80}"
        )
    return Stage(until, weights)


def _settings(values: dict[str, Any], path: Path) -> Settings:
    check_keys(values, Settings, f"'{path}'", "train")
    _mapping(values, "model")
    for name in ("output", "stages"):
        if name not in values:
            raise TrainingError(f"[train] '{path}' must have the key '{name}' but does not.")
    try:
        values = checked_values(values, Settings)
        values["stages"] = tuple(_stage(value) for value in listed(values["stages"], "stages"))
        if "valid" in values:
            values["valid"] = names_in(values["valid"], "valid")
        if "betas" in values:
            betas = listed(values["betas"], "betas")
            values["betas"] = tuple(finite(beta, "each of 'betas'") for beta in betas)
        return Settings(root=path.parent, **values)
    except ValueError as error:
        raise TrainingError(f"[train] '{path}' holds a wrong value: {error}.") from error
