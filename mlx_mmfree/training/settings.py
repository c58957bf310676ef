"""What a training run is made of."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import TrainingError
from .corpus import Stage
from .data_parallel import DEFAULT_TIMEOUT_S
from .loop import LoopSettings
from .yaml_values import check_keys, checked_numbers, finite, read_mapping

_WITHOUT_INFLUENCE = (
    "root output steps_per_report save_every patience clear_cache_threshold process_timeout_s"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run; the keys of the YAML file and the flags of the command.

    Attributes:
        output: Folder of the run: log, curve, checkpoint and the finished model.
        model: The architecture, as in a Hub `config.json`; `linear_class` makes its linears ternary
            or dense.
        init_from: Folder or Hub repository of a model to begin with instead of random weights; it
            brings architecture and tokenizer.
        latent: Whether float weights of that model, if it is a ternary Llama, are masters to be
            ternarised; left out, its configuration says it.
        rebuild_masters: Make up float masters from the trits where that model is packed without
            them; what was rounded away is lost.
        stages: Mixture of training files, stage by stage.
        valid: Held-out text files, measured at the end. Without any the last weights are kept.
        valid_tokens: Tokens of the first one on which the loss is taken along the way; it picks the
            best weights.
        tokenizer: Folder with a tokenizer. Default: a vocabulary is trained on the first stage's
            files.
        steps: Optimizer steps.
        batch_size: Sequences of one forward pass.
        accumulation_steps: Forward passes of one optimizer step.
        sequence_length: Predictions a sequence.
        learning_rate: Peak of the schedule: linear warm-up, then cosine decay.
        final_learning_rate: Fraction of the peak that is left at the end.
        warmup_steps: Steps of the warm-up.
        weight_decay: AdamW's decay of the matrices; norms and bounds have none.
        betas: AdamW's averaging factors.
        clip_norm: Largest norm of the gradient; 0 means no clipping.
        quantization_warmup: Steps over which ternary layers pass from float to quantised.
        grad_checkpoint: Recomputes each block in the backward pass, which saves memory.
        steps_per_report: Steps between two log lines.
        steps_per_eval: Steps between two validations.
        save_every: Steps between two checkpoints.
        patience: Validations in a row without a better loss that end the run; 0: never.
        clear_cache_threshold: Clear MLX's cache after a step that leaves it larger, in bytes.
        process_timeout_s: Seconds that one of several processes waits for another before it ends.
        seed: Seed of weights and batches.
    """

    output: str
    model: dict[str, Any] = field(default_factory=dict)
    init_from: str | None = None
    latent: bool | None = None
    rebuild_masters: bool = False
    stages: tuple[Stage, ...]
    valid: tuple[str, ...] = ()
    valid_tokens: int = 32768
    tokenizer: str | None = None
    steps: int = 1000
    batch_size: int = 16
    accumulation_steps: int = 1
    sequence_length: int = 256
    learning_rate: float = 4e-3
    final_learning_rate: float = 0.1
    warmup_steps: int = 100
    weight_decay: float = 0.1
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
    seed: int = 0
    root: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        positive = (
            "steps batch_size accumulation_steps sequence_length learning_rate "
            "steps_per_report steps_per_eval save_every valid_tokens process_timeout_s"
        )
        for name in positive.split():
            if not 0 < getattr(self, name) < math.inf:
                raise TrainingError(
                    f"[train] '{name}' must be positive but got {getattr(self, name)}."
                )
        if not 0 <= self.warmup_steps < self.steps:
            raise TrainingError(
                f"[train] 'warmup_steps' must be from 0 to below 'steps' ({self.steps}) but got "
                f"{self.warmup_steps}."
            )
        not_negative = (
            "quantization_warmup patience seed clip_norm weight_decay final_learning_rate"
        )
        for name in not_negative.split():
            if not 0 <= getattr(self, name) < 2**63:
                raise TrainingError(
                    f"[train] '{name}' must be at least 0 but got {getattr(self, name)}."
                )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise TrainingError(
                f"[train] 'betas' must be two numbers from 0 to below 1 but got {list(self.betas)}."
            )
        if self.init_from is None and not self.model:
            raise TrainingError(
                "[train] 'model' must describe the architecture, or 'init_from' name a model to begin "
                "with, but neither is given."
            )
        if self.init_from is not None and (self.model or self.tokenizer is not None):
            raise TrainingError(
                "[train] 'init_from' must come without 'model' and 'tokenizer', which it brings, but "
                "one of them is given."
            )
        ends = [stage.until for stage in self.stages]
        if not ends or ends != sorted(ends) or ends[-1] != 1:
            raise TrainingError(
                f"[train] 'stages' must end in rising order, the last at 1, but got {ends}."
            )

    def path(self, name: str) -> Path:
        """A path of the settings, relative to the file they were read from."""
        return self.root / name

    def loop(self, record: Mapping[str, Any]) -> LoopSettings:
        """What the loop is told; `record` describes weights and texts."""
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
            clear_cache_bytes=self.clear_cache_threshold,
            record={**self.record(), **record},
        )

    def record(self) -> dict[str, Any]:
        """Everything that decides the course of the run, as plain values."""
        record = asdict(self)
        for name in _WITHOUT_INFLUENCE.split():
            del record[name]
        return record


def read_settings(
    path: Path, overrides: dict[str, Any] | None = None, *, linear_class: str | None = None
) -> Settings:
    """Reads a YAML file; `overrides` win over it, and `linear_class` over that of the model.

    Raises:
        TrainingError: The file cannot be read, or a key is unknown, missing or of the wrong type.
    """
    values = read_mapping(path, "train")
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    if linear_class is not None:
        if values.get("init_from") is not None:
            raise TrainingError(
                "[train] 'linear_class' must be left out with 'init_from', whose model has its linears, "
                f"but got {linear_class!r}."
            )
        values["model"] = {**_mapping(values, "model"), "linear_class": linear_class}
    return _settings(values, path)


def _mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name, {})
    if not isinstance(value, dict):
        raise TrainingError(f"[train] '{name}' must be a mapping but got {value!r:.80}.")
    return value


def _list(values: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = values[name]
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"'{name}' must be a list but got {value!r:.80}")
    return value


def _stage(value: Any) -> Stage:
    if not (isinstance(value, dict) and isinstance(value.get("weights", {}), dict)):
        raise TypeError(
            f"a stage must be like {{until: 1, weights: {{my.txt: 1}}}} but one is {value!r:.80}"
        )
    until = finite(value["until"])
    weights = {str(name): finite(weight) for name, weight in value["weights"].items()}
    if min(weights.values(), default=0) < 0 or not any(weights.values()):
        raise ValueError(
            f"the weights of a stage must be 0 or more, one of them above 0, but are {weights!r:.80}"
        )
    return Stage(until, weights)


def _settings(values: dict[str, Any], path: Path) -> Settings:
    check_keys(values, Settings, f"'{path}'", "train")
    _mapping(values, "model")
    try:
        values = checked_numbers(values, Settings)
        values["stages"] = tuple(_stage(value) for value in _list(values, "stages"))
        values["valid"] = tuple(str(name) for name in _list({"valid": [], **values}, "valid"))
        if "betas" in values:
            values["betas"] = tuple(float(beta) for beta in values["betas"])
        return Settings(root=path.parent, **values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainingError(f"[train] '{path}' holds a wrong or missing value: {error}.") from error
