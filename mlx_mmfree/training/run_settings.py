"""The settings of all training runs: how they are declared, read, checked and compared."""

import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Self, get_args

import mlx.core as mx

from ..arguments import meant_name
from ..errors import TrainingError
from ..files.declared import Declared, declare
from ..files.plugins import load_listed
from ..files.reading import expanded, read_file, real_path
from ..files.yaml_text import MAX_BYTES, parse_yaml
from .data_parallel import DEFAULT_TIMEOUT_S
from .precision import COMPUTE_DTYPES

ADAMW = ("adamw", "adamw8bit")
"""The optimizers of a run from a corpus."""

_SHOWN_KEYS = 8


@dataclass(frozen=True)
class LoopSettings:
    """How long the loop runs and how often it reports, validates and saves.

    Attributes:
        folder: Folder for the log, the loss curve and the checkpoint.
        steps: Number of optimizer steps.
        seed: Seed of dropout, together with the step.
        clip_norm: Largest norm of the gradient; 0 turns clipping off.
        steps_per_report: Steps between two lines of the log.
        steps_per_eval: Steps between two validations.
        save_every: Steps between two checkpoints.
        patience: Number of validations in a row without a better loss after which the run ends; 0
            turns this off.
        validates_first: Whether to validate before the first step too.
        quantization_warmup: Steps over which weights and activations of ternary layers change from
            float to quantised; 0 quantises them from the start. Validations always quantise them.
        dtype: The float dtype that steps compute in, whatever the trained parameters have; `None`
            computes in their own. Validations always do.
        clear_cache_bytes: MLX's cache is cleared after a step that leaves it larger than this; `None`
            never clears it.
        unit: What the log counts as tokens, in the words of the progress bar.
        record: Plain values that must be the same when the run is resumed. Its `steps`, if it has
            them, may grow once the run is finished.
    """

    folder: Path
    steps: int
    seed: int = 0
    clip_norm: float = 0.0
    steps_per_report: int = 10
    steps_per_eval: int = 200
    save_every: int = 100
    patience: int = 0
    validates_first: bool = False
    quantization_warmup: int = 0
    dtype: mx.Dtype | None = None
    clear_cache_bytes: int | None = None
    unit: str = "tokens"
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """The rule for the value of a setting.

    Attributes:
        words: The rule, as messages have it.
        holds: Whether a value keeps it.
        choices: All values, where there are few.
    """

    words: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()

    @classmethod
    def one_of(cls, *choices: str) -> "Rule":
        """The value is one of a few words."""
        return cls(f"one of {', '.join(choices)}", choices.__contains__, choices)


# MLX's steps and dimensions have 32 bits
_MAX_WHOLE, _MAX_LONG = 2**31 - 1, 2**63 - 1
_LONG = ("seed", "clear_cache_threshold")
"""Settings that have 64 bits."""
_MOST_ROWS, _MOST_TOKENS = 2**20, 2**25
"""The most rows of an optimizer step, and the most tokens."""
POSITIVE = Rule("positive", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Rule("at least 0", lambda value: 0 <= value < 2**63)
SHARE = Rule("at least 0 and below 1", lambda value: 0 <= value < 1)


def setting(
    words: str,
    default: Any = MISSING,
    rule: Rule | None = None,
    *,
    reader: Callable[[str, Any], Any] | None = None,
    has_flag: bool = True,
    counts: bool = True,
    also: tuple[str, ...] = (),
    called: str = "",
    holds: str = "",
    **more: Any,
) -> Any:
    """Declares a field of a `RunSettings`.

    Args:
        words: What the field is, from which the help of its flag is made.
        default: Its value where none is given; left out: one must be.
        rule: What a value must be that is not `None`.
        reader: Makes the field of its name and a value of a YAML file. Default: it is one of its type.
        has_flag: Whether it is a flag of the command too.
        counts: Whether a run can be resumed with the same value alone.
        also: Other names of the flag and of the key.
        called: The name of the flag and of the key; without one, the field's.
        holds: "path" for paths, "model" for what may also name something of the Hub.
        more: What else its class asks of it.
    """
    more |= {"rule": rule, "reader": reader, "has_flag": has_flag, "counts": counts}
    more |= {"also": also, "called": called, "holds": holds}
    return declare(words, default, **more)


@dataclass(frozen=True, kw_only=True)
class RunSettings(Declared):
    """The settings of a run, from flags and the keys of a YAML file."""

    command: ClassVar[str]
    """Messages name it."""

    further_keys: ClassVar[Collection[str]] = ()
    """The keys of its file that are no settings."""

    batch_size: int = setting("Number of sequences in a forward pass.", 16, POSITIVE)
    optimizer: str = setting(
        "`adamw`, or `adamw8bit`, which keeps the moments of large arrays in 8 bits.",
        "adamw",
        Rule.one_of(*ADAMW),
    )
    clip_norm: float = setting(
        "Largest norm of the gradient. 0 turns clipping off.", 1.0, NOT_NEGATIVE
    )
    grad_checkpoint: bool = setting(
        "Recompute each block in the backward pass, which saves memory.", False
    )
    steps_per_report: int = setting(
        "Steps between two lines of the log.", 10, POSITIVE, counts=False
    )
    steps_per_eval: int = setting("Steps between two validations.", 250, POSITIVE)
    save_every: int = setting("Steps between two checkpoints.", 100, POSITIVE, counts=False)
    seed: int = setting("Seed of weights and batches.", 0, NOT_NEGATIVE)

    def __post_init__(self) -> None:
        for each in self.declared():
            self._check_kind(each)
        for each in fields(self):
            rule = each.metadata.get("rule")
            value = getattr(self, each.name)
            if rule is not None and value is not None:
                self.check(each.name, rule.holds(value), rule.words)
        given = vars(self)
        rows = self.batch_size * given.get("accumulation_steps", 1)
        tokens = rows * given.get("sequence_length", 1)
        self.check(
            "batch_size",
            rows <= _MOST_ROWS and tokens <= _MOST_TOKENS,
            f"so small that a step has at most {_MOST_ROWS:,} rows and {_MOST_TOKENS:,} tokens",
        )

    def _check_kind(self, declared: Field[Any]) -> None:
        """Refuses a value of another type. A path, or a whole number written as 2.0, is taken as it is
        meant.

        Raises:
            TrainingError: It is one.
        """
        name, value = declared.name, getattr(self, declared.name)
        is_read = isinstance(value, (Sequence, Mapping)) and not isinstance(value, str)
        # what a reader makes of a list or a mapping; names can be read again
        if declared.metadata["reader"] not in (None, names_in) and is_read:
            return
        if declared.metadata["holds"] and isinstance(value, os.PathLike):
            value = os.fspath(value)
        try:
            object.__setattr__(self, name, _read(declared, value))
        except ValueError as error:
            raise TrainingError(f"[{self.command}] {error}.") from error

    def check(self, name: str, is_sound: bool, rule: str) -> None:
        """Refuses a value that does not keep a rule.

        Raises:
            TrainingError: It does not.
        """
        if not is_sound:
            value = getattr(self, name)
            shown = list(value) if isinstance(value, tuple) else value
            raise TrainingError(
                f"[{self.command}] '{self.key(name)}' must be {rule} but got {shown!r}."
            )

    @classmethod
    def key(cls, name: str) -> str:
        """The name of a field's flag and key."""
        called = {each.name: each.metadata["called"] for each in cls.declared()}
        return called.get(name) or name

    def record(self) -> dict[str, Any]:
        """All plain values that decide the course of the run."""
        counted = {each.name for each in fields(self) if each.metadata.get("counts")}
        return {name: value for name, value in asdict(self).items() if name in counted}

    @classmethod
    def declared(cls) -> list[Field[Any]]:
        """The fields that are settings, the class's own first."""
        known = {each.name: each for each in fields(cls) if "reader" in each.metadata}
        own = [name for name in cls.__annotations__ if name in known]
        return [known[name] for name in dict.fromkeys((*own, *known))]

    @classmethod
    def own_names(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by the names of the fields, in place of other names of theirs.

        Raises:
            TrainingError: A field is given under two of its names.
        """
        own = {
            other: each.name
            for each in cls.declared()
            for other in (*each.metadata["also"], each.metadata["called"])
        }
        for name in values:
            if own.get(name, name) != name and own[name] in values:
                raise TrainingError(
                    f"[{cls.command}] '{name}' must come without '{own[name]}', which means the "
                    "same, but both are given. Leave one out."
                )
        return {own.get(name, name): value for name, value in values.items()}

    @classmethod
    def beside(cls, values: Mapping[str, Any], file: Path, **more: str) -> dict[str, Any]:
        """The values of a YAML file, with its paths as they are seen from the current folder.

        Args:
            values: The values.
            file: The file.
            more: What further keys hold, as of `setting`.

        Raises:
            TrainingError: A key is a name that the command does not use.
        """
        for each in cls.declared():
            if each.metadata["called"] and each.name in values:
                raise TrainingError(
                    f"[{cls.command}] '{file}' has the unknown key {each.name}. It is called "
                    f"{each.metadata['called']}."
                )
        holds = {each.name: each.metadata["holds"] for each in cls.declared()} | more
        return seen_from_here(cls.own_names(values), holds, file)

    @classmethod
    def made(cls, values: Mapping[str, Any], source: str, **others: Any) -> Self:
        """The settings that plain values stand for.

        Args:
            values: The values by their keys.
            source: Where they come from, as messages name it.
            others: Fields that are no settings.

        Raises:
            TrainingError: A key is unknown or missing, or a value is wrong.
        """
        known = {each.name: each for each in cls.declared()}
        values = cls.own_names(values)
        if unknown := sorted(map(str, values.keys() - known)):
            shown = ", ".join(f"{name:.60}" for name in unknown[:_SHOWN_KEYS])
            more = f" and {len(unknown) - _SHOWN_KEYS} more" if unknown[_SHOWN_KEYS:] else ""
            names = [*map(cls.key, known), *cls.further_keys]
            also = [name for each in known.values() for name in each.metadata["also"]]
            meant = meant_name(unknown[0], [*names, *also])
            meant = meant or f" The known keys are {', '.join(names)}."
            raise TrainingError(f"[{cls.command}] {source} has unknown keys {shown}{more}.{meant}")
        for name, each in known.items():
            if each.default is MISSING and each.default_factory is MISSING and name not in values:
                raise TrainingError(
                    f"[{cls.command}] '{name}' must be given, as a flag or in the file, but is missing. "
                    f"It is: {each.metadata['words']}"
                )
        try:
            made = {name: _read(known[name], value) for name, value in values.items()}
            return cls(**made, **others)
        except ValueError as error:
            raise TrainingError(
                f"[{cls.command}] a value of {source} is wrong: {error}."
            ) from error


def _read(declared: Field[Any], value: Any) -> Any:
    reader = declared.metadata["reader"]
    may_be_none = NoneType in get_args(declared.type)
    if reader is None or (value is None and may_be_none):
        return checked(declared.name, value, declared.type)
    return reader(declared.name, value)


def listed(value: Any, name: str) -> Sequence[Any]:
    """The entries of a list of a YAML file.

    Raises:
        ValueError: The value is not a list.
    """
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"'{name}' must be a list but got {value!r:.80}")
    return value


def names_in(name: str, value: Any) -> tuple[str, ...]:
    """The names in a list of a YAML file.

    Raises:
        ValueError: The value is not a list of texts.
    """
    for entry in listed(value, name):
        if not isinstance(entry, str):
            raise ValueError(f"'{name}' must be a list of names but holds {entry!r:.80}")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class PluginSettings(RunSettings):
    """The settings of a run whose YAML file may name plug-ins."""

    plugins: tuple[str, ...] = setting(
        "Python files, relative to this one, or modules with mixers or architectures of your own.",
        (),
        reader=names_in,
        has_flag=False,
        counts=False,
    )


@dataclass(frozen=True, kw_only=True)
class CorpusSettings(PluginSettings):
    """The settings of a run that learns from texts or token files."""

    accumulation_steps: int = setting("Number of forward passes in an optimizer step.", 1, POSITIVE)
    sequence_length: int = setting("Number of tokens of a sequence.", 256, POSITIVE)
    valid_tokens: int = setting(
        "Number of tokens of the first held-out file on which validations measure the loss that picks "
        "the best weights; in an image model, of images.",
        32768,
        POSITIVE,
    )
    final_learning_rate: float = setting(
        "Fraction of the peak of the learning rate that is left at the end.", 0.1, NOT_NEGATIVE
    )
    dtype: str = setting(
        "Float type to compute in, where the device is fast at it. Master weights, moments and the "
        "saved models are always float32.",
        "float32",
        Rule.one_of(*COMPUTE_DTYPES),
    )
    weight_decay: float = setting(
        "Weight decay of matrices. Norms and bounds have none.", 0.1, NOT_NEGATIVE
    )


@dataclass(frozen=True, kw_only=True)
class TeacherSettings(RunSettings):
    """The settings of a run that can learn from another model."""

    teacher_weight: float = setting(
        "Weight of the divergence from the teacher, beside the cross-entropy of the data.",
        1.0,
        POSITIVE,
    )
    teacher_temperature: float = setting(
        "Divisor of both models' logits in the divergence.", 1.0, POSITIVE
    )
    teacher_top_k: int | None = setting(
        "Compare only so many of the teacher's likeliest tokens. Default: all.",
        None,
    )

    @property
    def divergence(self) -> dict[str, Any]:
        """The options of `distillation_loss`."""
        return {
            "weight": self.teacher_weight,
            "temperature": self.teacher_temperature,
            "top_k": self.teacher_top_k,
        }


@dataclass(frozen=True, kw_only=True)
class LongSettings(TeacherSettings):
    """The settings of a run of one stage, which may take days on many machines."""

    teacher: str | None = setting(
        "Folder or Hub repository of a language model with the same tokens, of any size. The loss "
        "also "
        "compares the model's distribution of the next token with the teacher's.",
        None,
        # the digest of its weights counts, not where they lie
        counts=False,
        holds="model",
    )
    quantization_warmup: int = setting(
        "Steps over which ternary layers change from float to quantised.", 0, NOT_NEGATIVE
    )
    patience: int = setting(
        "End the run after this many validations in a row without a better loss. 0 turns this off.",
        0,
        NOT_NEGATIVE,
        counts=False,
    )
    clear_cache_threshold: int | None = setting(
        "Clear MLX's cache after a step that leaves it larger than this.", None, counts=False
    )
    process_timeout_s: float = setting(
        "Seconds that a process waits for the others before it gives up.",
        DEFAULT_TIMEOUT_S,
        POSITIVE,
        counts=False,
    )

    def loop_settings(self, folder: Path, steps: int, **others: Any) -> LoopSettings:
        """The settings of the loop; `others` are the fields that have other names here."""
        shared = {each.name for each in fields(self)} & {each.name for each in fields(LoopSettings)}
        given: dict[str, Any] = {name: getattr(self, name) for name in shared}
        given |= {"folder": folder, "steps": steps, "clear_cache_bytes": self.clear_cache_threshold}
        return LoopSettings(**given | others)


def read_mapping(path: Path, command: str) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Args:
        path: The file.
        command: The command that messages name.

    Raises:
        TrainingError: The file cannot be read or does not hold a mapping.
    """
    try:
        values = parse_yaml(read_file(path, MAX_BYTES))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"[{command}] '{path}' must be a readable YAML file: {error}."
        ) from error
    if not isinstance(values, dict):
        raise TrainingError(
            f"[{command}] '{path}' must hold a mapping but got {type(values).__name__}. Write 'name: "
            "value' on each line."
        )
    return values


def seen_from_here(
    values: Mapping[str, Any], holds: Mapping[str, str], file: Path
) -> dict[str, Any]:
    """The values of a YAML file, whose paths begin at its folder, with those as seen from here.

    Args:
        values: The values by their keys.
        holds: What the keys hold, as of `setting`. A name that may be one of the Hub is a path if there
            is such a file.
        file: The YAML file.
    """
    named = {name: value for name, value in values.items() if holds.get(name)}

    def seen(text: Any, kind: str) -> Any:
        if isinstance(text, list):
            return [seen(each, kind) for each in text]
        if not isinstance(text, str):
            return text
        beside = file.parent / expanded(text)
        return str(beside) if kind == "path" or beside.exists() else text

    return {**values, **{name: seen(value, holds[name]) for name, value in named.items()}}


def seen_from_file(setting: Field[Any], value: str, file: Path) -> str:
    """A path of the command line, which begins at the current folder, as seen from a YAML file.

    Args:
        setting: What it is a value of. A name that may be one of the Hub is a path if there is such a
            file.
        value: The path.
        file: The YAML file.
    """
    path = expanded(value)
    if not path.exists() and setting.metadata["holds"] != "path":
        return value
    # what a resumed run is compared by is the same wherever both lie
    if setting.metadata["counts"]:
        return os.path.relpath(real_path(path), real_path(file.parent))
    return str(path.absolute())


def load_named(named: Any, path: Path) -> None:
    """Loads the plug-ins that a checked YAML file names under `plugins`, relative to it.

    A file that came from somebody else must not run code by itself, so that the user names each of them
    with `--plugin` too, or agrees at the terminal.

    Raises:
        TrainingError: They are no list of names.
        UsageError: One cannot be loaded, or the user has not agreed.
    """
    try:
        sources = names_in("plugins", named)
    except ValueError as error:
        raise TrainingError(f"[plugin] a value of '{path}' is wrong: {error}.") from error
    load_listed(sources, path.parent, _agrees)


def _agrees(source: str) -> bool:
    """Returns whether the user at the terminal lets a plug-in run."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    question = f"The file names the plug-in {source!r}, whose code would run. Run it? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def finite(value: Any, name: str = "a number") -> float:
    """The finite number that a value of a YAML file stands for.

    Raises:
        ValueError: The value is not a number, or it is infinite or NaN.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    rule = "finite" if is_number or math.isinf(number) else "a number"
    raise ValueError(f"{name} must be {rule} but got {value!r:.80}")


def named_mapping(name: str, value: Any) -> dict[str, Any]:
    """The mapping under a key.

    Raises:
        ValueError: The value is none.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"'{name}' must be a mapping but got {value!r:.80}")
    return dict(value)


def checked(name: str, value: Any, kind: Any) -> Any:
    """A value of a kind: a number, a boolean or a text, or perhaps `None`; others stay as they are.

    Raises:
        ValueError: The value has another type.
    """
    if NoneType in get_args(kind):
        if value is None:
            return None
        [kind] = [part for part in get_args(kind) if part is not NoneType]
    if kind is float:
        return finite(value, f"'{name}'")
    if kind is int:
        is_whole = value.is_integer() if isinstance(value, float) else isinstance(value, int)
        if isinstance(value, bool) or not is_whole:
            raise ValueError(f"'{name}' must be a whole number but got {value!r:.80}")
        most = _MAX_LONG if name in _LONG else _MAX_WHOLE
        if not -most <= value <= most:
            raise ValueError(
                f"'{name}' must be a whole number of at most {most:,} but got {value!r:.80}"
            )
        return int(value)
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"'{name}' must be true or false but got {value!r:.80}")
    if kind is str and not isinstance(value, str):
        raise ValueError(f"'{name}' must be text but got {value!r:.80}")
    return value
