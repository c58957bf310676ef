"""The settings of a run that turns a transformer into a model with other token mixers."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

from ...errors import TrainingError
from ...layers.ternary.groups import Scales, TernaryScheme
from ...ops.hadamard import MAX_BLOCK
from ..corpus.mixture import Stage as Mixture
from ..precision import COMPUTE_DTYPES
from ..run_settings import (
    CorpusSettings,
    PluginSettings,
    Rule,
    RunSettings,
    TeacherSettings,
    load_named,
    read_mapping,
    setting,
)
from ..settings import Settings

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
"""The models whose metrics a run gives, as text: the teacher, and the student after each stage."""

_FORMAT = ("keep_embedding", "scales", "threshold", "scale_of_kept", "rotation")
_COURSE: Mapping[StageName, tuple[str, ...]] = {
    "logits": (*_FORMAT, "teacher_weight", "teacher_temperature", "teacher_top_k", "cache_logits"),
    "text": _FORMAT,
}

_SOME = Rule("at least one name", bool)
_STEPS = Rule("at least 0", lambda value: 0 <= value < 2**31)
_RATE = Rule("positive and finite", lambda value: 0 < value < math.inf)


def _mixers(name: str, value: Any) -> tuple[str | Mapping[str, Any], ...]:
    return _several(name, value, {str: "texts", Mapping: "mappings"})


def _layers(name: str, value: Any) -> tuple[int, ...]:
    return _several(name, value, {int: "whole numbers"})


def _texts(name: str, value: Any) -> tuple[str, ...]:
    return _several(name, value, {str: "texts"})


def _several(name: str, value: Any, kinds: Mapping[type, str]) -> tuple[Any, ...]:
    """One value, or several."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for each in values:
        if not isinstance(each, tuple(kinds)) or isinstance(each, bool):
            wanted = " or ".join(kinds.values())
            raise ValueError(f"'{name}' must hold {wanted} but holds {each!r:.80}")
    return values


Kind = TypeVar("Kind", bound=RunSettings)


@dataclass(frozen=True, kw_only=True)
class DerivedModelSettings(PluginSettings):
    """The settings of a run that makes a model of another one, which it learns from on texts."""

    model: str = setting("Folder or Hub repository of the model to learn from.", holds="model")
    output: str = setting(
        "Folder of the run and of the model that it makes.", counts=False, holds="path"
    )
    data: tuple[str, ...] = setting(
        "Texts or token files to learn from.", rule=_SOME, reader=_texts, holds="path"
    )
    valid: tuple[str, ...] = setting(
        "Held-out texts or token files, of which the first one picks the best weights.",
        (),
        reader=_texts,
        holds="path",
    )
    dtype: str = setting(
        "Float type to compute in, where the device is fast at it. What is learned is float32.",
        "float32",
        Rule.one_of(*COMPUTE_DTYPES),
    )


@dataclass(frozen=True, kw_only=True)
class DistilSettings(CorpusSettings, TeacherSettings, DerivedModelSettings):
    """One run from a teacher to its student."""

    command: ClassVar[str] = "distil"

    init_from: str | None = setting(
        "Folder or Hub repository of a model of the same shape whose weights the student begins with, "
        "such as one of `mmfree calibrate`. Default: the teacher's.",
        None,
        holds="model",
    )
    to: tuple[str | Mapping[str, Any], ...] = setting(
        "What replaces attention: names of token mixers, which repeat from layer to "
        "layer, or JSON objects with `name` and options; `same` keeps attention.",
        rule=_SOME,
        reader=_mixers,
        has_flag=False,
    )
    ternary: bool = setting("Make the student's linears ternary.", False)
    scales: str = setting(
        "What shares a scale in ternary linears: group (64 inputs), row or tensor, with float "
        "activations and nothing added to the model, where all layers keep their attention; bitnet has "
        "one scale a matrix and 8-bit activations, and opens in fewer programs.",
        "bitnet",
        Rule.one_of(*get_args(Scales), "bitnet"),
    )
    threshold: float = setting(
        "With other scales than bitnet: the smallest weight that is kept, as a multiple of the mean "
        "magnitude of what shares its scale.",
        0.5,
        Rule("from 0 to 4", lambda value: 0 <= value <= 4),
    )
    scale_of_kept: bool = setting(
        "With other scales than bitnet: a scale is the mean magnitude of the weights that are kept, "
        "not of all.",
        False,
    )
    rotation: int = setting(
        "With other scales than bitnet: inputs of a linear that are rotated together (Hadamard) before "
        "its weights become ternary, a power of two; 0 rotates none. This library alone opens the "
        "result, and others after `mmfree convert --unrotate`.",
        0,
        Rule(
            f"0, or a power of two from 2 to {MAX_BLOCK}",
            lambda value: value == 0 or (2 <= value <= MAX_BLOCK and value & (value - 1) == 0),
        ),
    )
    inner_norms: bool = setting(
        "With the scales of bitnet: an RMSNorm in front of each linear, as MatMul-free "
        "models have it. It adds tensors.",
        False,
    )
    keep_layers: tuple[int, ...] = setting(
        "Numbers of layers, from 0, that keep their attention.", (), reader=_layers, has_flag=False
    )
    keep_embedding: bool = setting(
        "The embedding and the head stay as they are in all stages.", False
    )
    random_mixers: bool = setting(
        "New mixers begin with random weights alone, not as the attention where they can.", False
    )
    mixers_steps: int = setting(
        "Steps of the first stage, in which each new mixer learns to give what attention gives, "
        "all layers side by side. 0 leaves the stage out, here and in all stages.",
        300,
        _STEPS,
    )
    mixers_rate: float = setting("Learning rate of that stage at its peak.", 1e-2, _RATE)
    hidden_steps: int = setting(
        "Steps of the second stage, in which the new mixers learn together to keep the teacher's "
        "residual stream.",
        300,
        _STEPS,
    )
    hidden_rate: float = setting("Learning rate of that stage.", 3e-3, _RATE)
    logits_steps: int = setting(
        "Steps of the third stage, in which all weights learn the teacher's distribution of the "
        "next token.",
        1000,
        _STEPS,
    )
    logits_rate: float = setting("Learning rate of that stage.", 1e-3, _RATE)
    text_steps: int = setting("Steps of a last stage on the texts alone.", 0, _STEPS)
    text_rate: float = setting("Learning rate of that stage.", 3e-4, _RATE)
    quantization_warmup: int | None = setting(
        "Steps of the third stage over which a ternary student changes from float to quantised. "
        "Default: half of them.",
        None,
    )
    cache_logits: bool = setting(
        "Write the teacher's likeliest tokens and their logits to disk before the third stage, "
        "from which on no teacher is kept in memory. It needs `teacher_top_k`.",
        False,
    )
    weight_decay: float = 0.0
    steps_per_eval: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.active:
            names = [self.key(f"{stage}_steps") for stage in STAGES]
            raise TrainingError(
                f"[{self.command}] one of {', '.join(map(repr, names))} must be positive but all are 0."
            )
        steps = self.key("logits_steps")
        rule = f"left out without 'teacher_top_k' and '{steps}'"
        has_logits = self.teacher_top_k is not None and self.logits_steps > 0
        self.check("cache_logits", has_logits or not self.cache_logits, rule)
        is_bitnet = self.scales == "bitnet"
        rule = "bitnet unless the student is ternary and 'to' is `same` alone"
        self.check("scales", is_bitnet or (self.ternary and self.to == ("same",)), rule)
        rule = "left out where 'scales' is bitnet"
        for name in ("threshold", "scale_of_kept", "rotation"):
            is_usual = getattr(self, name) == getattr(type(self), name)
            self.check(name, is_usual or not is_bitnet, rule)
        rule = "left out unless the student is ternary and 'scales' is bitnet"
        self.check("inner_norms", (self.ternary and is_bitnet) or not self.inner_norms, rule)
        warmup = self.quantization_warmup
        if warmup is not None:
            rule = "left out for a student without --ternary"
            self.check("quantization_warmup", self.ternary or not warmup, rule)
            rule = f"from 0 to '{steps}' ({self.logits_steps})"
            self.check("quantization_warmup", 0 <= warmup <= self.logits_steps, rule)

    @property
    def active(self) -> tuple[StageName, ...]:
        """The stages that have steps."""
        return tuple(stage for stage in STAGES if getattr(self, f"{stage}_steps"))

    @property
    def scheme(self) -> TernaryScheme | None:
        """How linears with float activations are made ternary; `None` for dense ones and BitNet's."""
        if self.scales == "bitnet":
            return None
        scales: Any = self.scales
        return TernaryScheme(
            scales, self.threshold, keeps_mean=not self.scale_of_kept, block=self.rotation
        )

    @property
    def rows(self) -> int:
        """The sequences of a step."""
        return self.batch_size * self.accumulation_steps

    @property
    def logits_bytes(self) -> int:
        """The size of the teacher's logits on the disk, 6 bytes with their tokens; 0 if none are "
        "kept."""
        if not self.cache_logits or self.teacher_top_k is None:
            return 0
        return 6 * self.teacher_top_k * self.logits_steps * self.rows * self.sequence_length

    def stage(self, name: StageName) -> Settings:
        """The settings of one stage, as settings of a training run."""
        steps: int = getattr(self, f"{name}_steps")
        warmup = 0
        if name == "logits" and self.ternary:
            given = self.quantization_warmup
            warmup = steps // 2 if given is None else given
        return Settings(
            output=self.output,
            init_from=self.model,
            stages=(Mixture(1, dict.fromkeys(self.data, 1.0)),),
            valid=self.valid,
            steps=steps,
            learning_rate=getattr(self, f"{name}_rate"),
            warmup_steps=steps // 20,
            quantization_warmup=warmup,
            **{each.name: getattr(self, each.name) for each in fields(CorpusSettings)},
        )

    def course(self, name: StageName) -> dict[str, Any]:
        """The values that decide the course of a stage, beside the settings of a training run."""
        names = _COURSE.get(name, ())
        return {each: getattr(self, each) for each in names}

    def record(self) -> dict[str, Any]:
        """All plain values of the run, as a report names them."""
        return {key: value for key, value in asdict(self).items() if key != "output"}


@dataclass(frozen=True, kw_only=True)
class TernarizeSettings(DistilSettings):
    """One run from a dense model to the same one with ternary linears."""

    command: ClassVar[str] = "ternarize"

    to: tuple[str | Mapping[str, Any], ...] = ("same",)
    ternary: bool = True
    scales: str = "group"
    threshold: float = 0.7
    scale_of_kept: bool = True
    logits_steps: int = setting("Number of optimizer steps.", 1000, _STEPS, called="steps")
    logits_rate: float = setting("Learning rate at its peak.", 1e-3, _RATE, called="learning_rate")
    quantization_warmup: int | None = setting(
        "Steps over which the weights change from float to ternary.", 0
    )
    cache_logits: bool = setting(
        "Write the dense model's likeliest tokens and their logits to disk first, so that it is not "
        "kept in memory. It needs `teacher_top_k`.",
        False,
    )
    teacher_weight: float = 4.0
    final_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("to", ("same",)), ("ternary", True)):
            rule = "left out, as attention stays and linears become ternary,"
            self.check(name, getattr(self, name) == value, rule)


def read_settings(path: Path | None, given: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """The settings of a run from a YAML file, or without one.

    Args:
        path: The file; its paths are relative to it.
        given: Values that win over the file's, unless they are `None`.
        kind: The class of the settings.

    Raises:
        TrainingError: The file cannot be read, or a value is unknown, missing or wrong.
    """
    values = {} if path is None else read_mapping(path, kind.command)
    named = values.get("plugins", ())
    if path is not None:
        values = kind.beside(values, path)
    values |= {name: value for name, value in given.items() if value is not None}
    settings = kind.made(values, "the settings" if path is None else f"'{path}'")
    if path is not None:
        load_named(named, path)
    return settings
