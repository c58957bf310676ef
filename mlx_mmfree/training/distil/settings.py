"""The settings of a run that turns a transformer into a model with other token mixers."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ...errors import TrainingError
from ..corpus.mixture import Stage as Mixture
from ..settings import Settings
from ..yaml_values import check_keys, checked_values, read_mapping

StageName = Literal["mixers", "hidden", "logits", "text"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""The stages in their order."""

MEASURED = {
    "teacher": "teacher",
    "begin": "student before it learns",
    "mixers": "each mixer by itself",
    "hidden": "mixers together",
    "logits": "all weights, by the teacher",
    "text": "all weights, by the texts",
}
"""What the figures of a run are measured on, in words: the teacher, and the student after each stage."""

_SHARED = (
    "batch_size",
    "accumulation_steps",
    "sequence_length",
    "valid_tokens",
    "final_learning_rate",
    "weight_decay",
    "optimizer",
    "clip_norm",
    "grad_checkpoint",
    "steps_per_report",
    "steps_per_eval",
    "save_every",
    "dtype",
    "seed",
)
_LISTS: dict[str, tuple[type, ...]] = {
    "to": (str, Mapping),
    "keep_layers": (int,),
    "data": (str,),
    "valid": (str,),
}
_KINDS = {str: "texts", Mapping: "mappings", int: "whole numbers"}
_NOT_NEGATIVE = tuple(f"{stage}_steps" for stage in STAGES)
_POSITIVE = (*(f"{stage}_rate" for stage in STAGES), "teacher_weight", "teacher_temperature")


@dataclass(frozen=True, kw_only=True)
class DistilSettings:
    """One run from a teacher to its student.

    Attributes:
        model: Folder or Hub repository of the teacher, a transformer of the Llama family.
        path: Folder of the run, for the stages, the student and the figures.
        to: What takes the place of attention: names of token mixers, which repeat from layer to layer,
            or JSON objects with `name` and options; `same` keeps attention.
        ternary: Whether the student's linears are ternary.
        keep_layers: Numbers of layers, from 0, that keep their attention.
        keep_embedding: The embedding and the head stay as they are in all stages.
        random_mixers: New mixers begin with random weights alone, not as the attention where they can.
        data: Texts or token files to learn from.
        valid: Held-out texts or token files. The first one picks the best weights of each stage.
        mixers_steps: Steps of the first stage, in which each new mixer learns to give what attention
            gives, all layers side by side. 0 leaves the stage out, as of every stage.
        mixers_rate: Learning rate of that stage at its peak.
        hidden_steps: Steps of the second stage, in which the new mixers learn together to keep the
            residual stream that of the teacher.
        hidden_rate: Learning rate of that stage.
        logits_steps: Steps of the third stage, in which all weights learn the teacher's distribution of
            the next token.
        logits_rate: Learning rate of that stage.
        text_steps: Steps of a last stage on the texts alone.
        text_rate: Learning rate of that stage.
        quantization_warmup: Steps of the third stage over which a ternary student changes from float
            to quantised. Default: half of them.
        teacher_weight: Weight of the divergence from the teacher, beside the cross-entropy of the data.
        teacher_temperature: Divisor of both models' logits.
        teacher_top_k: Compare only so many of the teacher's likeliest tokens. Default: all.
        cache_logits: Write the teacher's likeliest tokens and their logits to disk before the third
            stage, from which on no teacher is kept in memory. It needs `teacher_top_k`.
        batch_size: Number of sequences in a forward pass.
        accumulation_steps: Number of forward passes in an optimizer step.
        sequence_length: Number of tokens of a sequence.
        valid_tokens: Number of tokens of the first held-out file on which validations measure the loss
            that picks the best weights.
        final_learning_rate: Fraction of each stage's rate that is left at its end.
        weight_decay: Weight decay of matrices.
        optimizer: `adamw`, or `adamw8bit`, which keeps the moments of large arrays in 8 bits.
        clip_norm: Largest norm of the gradient. 0 turns clipping off.
        grad_checkpoint: Recompute each block in the backward pass, which saves memory.
        steps_per_report: Steps between two lines of the log.
        steps_per_eval: Steps between two validations.
        save_every: Steps between two checkpoints.
        dtype: Float type to compute in, where the device is fast at it.
        seed: Seed of new weights and of the order of the data.
    """

    model: str
    path: str
    to: tuple[str | Mapping[str, Any], ...]
    ternary: bool = False
    keep_layers: tuple[int, ...] = ()
    keep_embedding: bool = False
    random_mixers: bool = False
    data: tuple[str, ...]
    valid: tuple[str, ...] = ()
    mixers_steps: int = 300
    mixers_rate: float = 1e-2
    hidden_steps: int = 300
    hidden_rate: float = 3e-3
    logits_steps: int = 1000
    logits_rate: float = 1e-3
    text_steps: int = 0
    text_rate: float = 3e-4
    quantization_warmup: int | None = None
    teacher_weight: float = 1.0
    teacher_temperature: float = 1.0
    teacher_top_k: int | None = None
    cache_logits: bool = False
    batch_size: int = 16
    accumulation_steps: int = 1
    sequence_length: int = 256
    valid_tokens: int = 32768
    final_learning_rate: float = 0.1
    weight_decay: float = 0.0
    optimizer: str = "adamw"
    clip_norm: float = 1.0
    grad_checkpoint: bool = False
    steps_per_report: int = 10
    steps_per_eval: int = 100
    save_every: int = 100
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _NOT_NEGATIVE:
            self._check(name, 0 <= getattr(self, name) < 2**31, "at least 0")
        for name in _POSITIVE:
            self._check(name, 0 < getattr(self, name) < math.inf, "positive and finite")
        for name in ("to", "data"):
            self._check(name, bool(getattr(self, name)), "at least one name")
        if not self.active:
            raise TrainingError(
                f"[distil] one of {', '.join(map(repr, _NOT_NEGATIVE))} must be positive but all are 0."
            )
        rule = "left out without 'teacher_top_k' and 'logits_steps'"
        has_logits = self.teacher_top_k is not None and self.logits_steps > 0
        self._check("cache_logits", has_logits or not self.cache_logits, rule)
        warmup = self.quantization_warmup
        if warmup is not None:
            rule = "left out for a student without --ternary"
            self._check("quantization_warmup", self.ternary or not warmup, rule)
            rule = f"from 0 to 'logits_steps' ({self.logits_steps})"
            self._check("quantization_warmup", 0 <= warmup <= self.logits_steps, rule)

    def _check(self, name: str, is_sound: bool, rule: str) -> None:
        if not is_sound:
            value = getattr(self, name)
            shown = list(value) if isinstance(value, tuple) else value
            raise TrainingError(f"[distil] '{name}' must be {rule} but got {shown!r}.")

    @property
    def active(self) -> tuple[StageName, ...]:
        """The stages that have steps."""
        return tuple(stage for stage in STAGES if getattr(self, f"{stage}_steps"))

    @property
    def rows(self) -> int:
        """The sequences of a step."""
        return self.batch_size * self.accumulation_steps

    @property
    def logits_bytes(self) -> int:
        """What the teacher's logits take on the disk, 6 bytes with their tokens; 0 if none are kept."""
        if not self.cache_logits or self.teacher_top_k is None:
            return 0
        return 6 * self.teacher_top_k * self.logits_steps * self.rows * self.sequence_length

    def stage(self, name: StageName) -> Settings:
        """The settings of one stage, as those of a training run."""
        steps: int = getattr(self, f"{name}_steps")
        warmup = 0
        if name == "logits" and self.ternary:
            given = self.quantization_warmup
            warmup = steps // 2 if given is None else given
        return Settings(
            output=self.path,
            init_from=self.model,
            stages=(Mixture(1, dict.fromkeys(self.data, 1.0)),),
            valid=self.valid,
            steps=steps,
            learning_rate=getattr(self, f"{name}_rate"),
            warmup_steps=steps // 20,
            quantization_warmup=warmup,
            **{key: getattr(self, key) for key in _SHARED},
        )

    def record(self) -> dict[str, Any]:
        """All plain values of the run, as a report names them."""
        return {key: value for key, value in asdict(self).items() if key != "path"}


def read_settings(path: Path | None, given: Mapping[str, Any]) -> DistilSettings:
    """The settings of a run from a YAML file, or without one.

    Args:
        path: The file; its paths are relative to where the command runs.
        given: Values that win over those of the file, unless they are `None`.

    Raises:
        TrainingError: The file cannot be read, or a value is unknown, missing or wrong.
    """
    values = {} if path is None else read_mapping(path, "distil")
    values |= {name: value for name, value in given.items() if value is not None}
    check_keys(values, DistilSettings, "the settings" if path is None else f"'{path}'", "distil")
    for field in fields(DistilSettings):
        if field.default is MISSING and field.name not in values:
            raise TrainingError(
                f"[distil] '{field.name}' must be given, as a flag or in the file, but is missing."
            )
    try:
        lists = {name: _tuple(name, values[name]) for name in _LISTS if name in values}
        return DistilSettings(**(checked_values(values, DistilSettings) | lists))
    except ValueError as error:
        raise TrainingError(f"[distil] a value is wrong: {error}.") from error


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    """One value, or several."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    kinds = _LISTS[name]
    for each in values:
        if not isinstance(each, kinds) or isinstance(each, bool):
            wanted = " or ".join(_KINDS[kind] for kind in kinds)
            raise ValueError(f"'{name}' must hold {wanted} but holds {each!r:.80}")
    return values
