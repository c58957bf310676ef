"""Flags that commands share, and the values that their texts stand for."""

import argparse
import math
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Collection, Sequence
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, get_args, get_origin

from ...files.plugins import load_plugin
from ...files.reading import parse_json
from ...platform.resident_memory import BYTES_PER_GB
from ...tokenizer.sampling_defaults import USUAL

if TYPE_CHECKING:
    from ...generation import Sampler
    from ...generation.sampling import LogitsProcessor
    from ...training.run_settings import RunSettings


_MAX_SHOWN = 80


# MLX holds lengths and counts in 32 bits, seeds and sizes in 64.
_MAX_INT32, _MAX_SEED, _MAX_GB = 2**31 - 1, 2**63 - 1, 9_000_000_000


def positive(text: str) -> int:
    """A whole number of at least 1 that fits in 32 bits."""
    return _between(1, _MAX_INT32, text)


def non_negative(text: str) -> int:
    """A whole number of at least 0 that fits in 32 bits."""
    return _between(0, _MAX_INT32, text)


def integer(text: str) -> int:
    """A positive or negative whole number that fits in 32 bits."""
    return _between(-_MAX_INT32, _MAX_INT32, text)


def seed(text: str) -> int:
    """A seed for MLX's random numbers: a whole number of at least 0 that fits in 64 bits."""
    return _between(0, _MAX_SEED, text)


def _between(low: int, high: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ArgumentTypeError(
            f"must be a whole number from {low} to {high} but got {text[:_MAX_SHOWN]!r}"
        )
    return value


def gigabytes(text: str) -> int:
    """A size in GB, returned in bytes."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MAX_GB:
        raise ArgumentTypeError(
            f"must be a size in GB from 0 to {_MAX_GB} but got {text[:_MAX_SHOWN]!r}"
        )
    return int(value * BYTES_PER_GB)


def size_bytes(text: str) -> int:
    """A size such as 500MB, 2GB or a number of bytes, returned in bytes."""
    units = {"": 1, "M": 10**6, "MB": 10**6, "G": BYTES_PER_GB, "GB": BYTES_PER_GB}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper(), re.ASCII)
    size = float(match[1]) * units.get(match[2], math.inf) if match else math.inf
    if size > _MAX_GB * BYTES_PER_GB:
        raise ArgumentTypeError(
            f"must be a size such as 500MB or 2GB, of at most {_MAX_GB}GB, but got "
            f"{text[:_MAX_SHOWN]!r}"
        )
    return int(size)


def boolean(text: str) -> bool:
    """`T` or `F`, or `true` or `false`, in any case."""
    values = {"t": True, "true": True, "f": False, "false": False}
    if text.lower() not in values:
        raise ArgumentTypeError(f"must be T or F but got {text[:_MAX_SHOWN]!r}")
    return values[text.lower()]


def number_list(text: str) -> set[int]:
    """Numbers from 0 on and ranges of them, such as `0,4-6`."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ArgumentTypeError(
                f"must be numbers and ranges such as 0,4-6 but got {text[:_MAX_SHOWN]!r}"
            )
        numbers |= set(range(first, last + 1))
    return numbers


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = parse_json(text.encode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise ArgumentTypeError(f"must be a JSON object but {text!r:.80} {error}") from error
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"must be a JSON object but got {text!r:.80}")
    return value


def escaped(text: str) -> str:
    r"""Text in which the two characters `\n` and `\t` mean a line break and a tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


_VALUES: dict[Any, Any] = {
    int: integer,
    int | None: integer,
    float | None: float,
    str | None: str,
}


class _LoadPlugin(argparse.Action):
    """Loads a plug-in as soon as its flag is read, so that other flags can name what it holds."""

    def __call__(
        self, parser: ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        load_plugin(values)


def add_plugin_flag(parser: "argparse._ActionsContainer") -> None:
    """Adds the flag that loads code of the user's own, for all commands that load or make a model."""
    parser.add_argument(
        "--plugin",
        action=_LoadPlugin,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="Python file or module with mixers, architectures or weight formats of your own; may be "
        "given several times",
    )


def add_output_flag(group: "argparse._ActionsContainer", *more: str, default: str | None) -> None:
    """Adds the flag for the folder that a command writes, under the names of mlx-lm too."""
    group.add_argument(
        "--output", *more, default=default, metavar="DIR", help="new folder to write (%(default)s)"
    )


def add_overwrite_flag(group: "argparse._ActionsContainer") -> None:
    group.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def add_upload_flag(group: "argparse._ActionsContainer") -> None:
    """Adds the flags for what becomes of the folder."""
    add_overwrite_flag(group)
    group.add_argument("--upload-repo", help="Hub repository to upload the result to")


def add_json_flag(group: "argparse._ActionsContainer") -> None:
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_report_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--report-to",
        help="where the log also goes: wandb (Weights & Biases), tensorboard, or both with a comma",
    )
    parser.add_argument("--project-name", help="name of the project at Weights & Biases")


_LISTED = {"keys": "KEY", "reward_functions": "NAME", "reward_weights": "WEIGHT"}
"""Names for one value of settings with several."""


def add_settings_flags(
    parser: ArgumentParser, settings: "type[RunSettings]", without: Collection[str] = ()
) -> None:
    """Adds a flag for each field of a settings class that is one, with its words as the help text.

    Those without which there is no run come first.

    Args:
        parser: Gets the flags. A flag that is not given has the value `None`.
        settings: The class.
        without: Names of fields that get none.
    """
    for field in sorted(settings.declared(), key=lambda each: each.default is not MISSING):
        if not field.metadata["has_flag"] or field.name in without:
            continue
        rule = field.metadata["rule"]
        options: dict[str, Any] = {"help": _help(field.metadata["words"])}
        if field.type is bool:
            is_on = field.default is True
            action = argparse.BooleanOptionalAction if is_on else "store_true"
            options |= {"action": action, "default": None}
            options["help"] += " (on)" if is_on else ""
        elif kinds := [k for k in (field.type, *get_args(field.type)) if get_origin(k) is tuple]:
            metavar, kind = _LISTED.get(field.name), get_args(kinds[0])[0]
            options |= {"nargs": "+", "metavar": metavar, "type": kind}
        elif field.name == "clear_cache_threshold":
            options |= {"type": size_bytes, "metavar": "SIZE"}
        elif field.name == "seed":
            options |= {"type": seed}
        else:
            options |= {"type": _VALUES.get(field.type, field.type)}
            if rule is not None and rule.choices:
                options |= {"choices": rule.choices}
        if field.type is not bool and field.default not in (None, MISSING, ()):
            options["help"] += f" ({field.default})"
        key = settings.key(field.name)
        names = (*field.metadata["also"], key)
        flags = ["--" + name.replace("_", "-") for name in names]
        parser.add_argument(*flags, dest=key, **options)


def _help(sentences: str) -> str:
    """Sentences in the style of help texts: phrases in lower case, without a full stop."""
    phrases = sentences.rstrip(".").replace("%", "%%").split(". ")
    # names such as MLX keep their capitals
    return "; ".join(p[:1].lower() + p[1:] if p[1:2].islower() else p for p in phrases)


def add_sampling_flags(group: Any, *, temp: float = 0.0, top_p: float = 1.0) -> None:
    """Adds the flags for sampling and penalties.

    A flag that is not given is `None` until `settle_sampling`.

    Args:
        group: The parser or a group of it.
        temp, top_p: What these flags are where neither the user nor the model says.
    """
    usual = {**USUAL, "temp": temp, "top_p": top_p}
    flags: dict[str, tuple[Any, str]] = {
        "temp": (float, "sampling temperature; 0 always takes the likeliest token"),
        "top_p": (float, "keep the likeliest tokens that have this probability together; 1 = all"),
        "min_p": (float, "drop tokens below this fraction of the largest probability; 0 = none"),
        "top_k": (non_negative, "keep this many of the likeliest tokens; 0 = all"),
        "min_tokens_to_keep": (positive, "number of tokens that --min-p always keeps"),
        "xtc_probability": (
            float,
            "how often XTC drops all likely tokens except the least likely one; 0 = never",
        ),
        "xtc_threshold": (float, "probability above which XTC counts a token as likely"),
        "repetition_penalty": (float, "factor that makes recent tokens less likely; 1 = none"),
        "repetition_context_size": (
            non_negative,
            "number of latest tokens that count as recent for --repetition-penalty",
        ),
        "presence_penalty": (
            float,
            "subtracted from the logits of tokens that were written before; 0 = none",
        ),
        "frequency_penalty": (
            float,
            "subtracted from the logit of a token for each time it was written; 0 = none",
        ),
    }
    for name, (kind, words) in flags.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            help=f"{words}; default: as the model's files or makers say, else {usual[name]:g}",
        )
    group.set_defaults(usual_sampling=usual)
    group.add_argument(
        "--seed", type=seed, help="seed of the random choices; default: a new one in each run"
    )


def settle_sampling(
    args: argparse.Namespace, model: Any, tokenizer: Any, *, thinks: bool = True
) -> str:
    """Sets the flags for sampling that were not given as the model's files or makers say.

    Args:
        args: The values of the flags, which change.
        model, tokenizer: The model with its tokenizer.
        thinks: Whether answers begin with reasoning, where the model was taught that.

    Returns:
        A line that says so, empty if nothing was taken.

    Raises:
        CheckpointError: A value of the files has the wrong type or range.
    """
    from ...generation.suggested import suggested_sampling

    suggestion = suggested_sampling(model, tokenizer.folder, thinks=thinks)
    given = {name for name in args.usual_sampling if getattr(args, name) is not None}
    taken = suggestion.without(given)
    for name, value in {**args.usual_sampling, **taken}.items():
        if name not in given:
            setattr(args, name, value)
    return suggestion.line(given)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags for sampling and penalties, without those that were not given."""
    given = {name: getattr(args, name) for name in args.usual_sampling}
    return {name: value for name, value in given.items() if value is not None}


def sampler_from(args: argparse.Namespace, special_tokens: Sequence[int]) -> "Sampler":
    """The sampler that the flags ask for; XTC never drops `special_tokens`."""
    from ...generation.sampling import PENALTIES, make_sampler

    given = given_sampling(args)
    values = {name: value for name, value in given.items() if name not in PENALTIES}
    return make_sampler(**values, xtc_special_tokens=special_tokens)


def processors_from(args: argparse.Namespace) -> "list[LogitsProcessor]":
    """The penalties that the flags ask for."""
    from ...generation.sampling import PENALTIES, make_processors

    given = given_sampling(args)
    return make_processors(**{name: given[name] for name in PENALTIES if name in given})
