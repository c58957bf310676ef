"""The flags for the key-value cache, and a model with the cache that they ask for."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from .command import argument_errors
from .flags import non_negative, positive

if TYPE_CHECKING:
    from ...models import Decoder

_NAMES = ("max_kv_size", "kv_bits", "kv_group_size")


def add_key_value_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("key-value cache")
    group.add_argument(
        "--max-kv-size",
        type=positive,
        help="largest number of tokens kept: the first 4 and the latest; default: no limit",
    )
    group.add_argument(
        "--kv-bits",
        type=positive,
        help="bits of each key and value, 2 to 8; default: not quantised",
    )
    group.add_argument(
        "--kv-group-size",
        type=positive,
        help="numbers that share a scale: 32, 64 or 128; default: 64, or 32 for heads that need it",
    )
    group.add_argument(
        "--quantized-kv-start",
        type=non_negative,
        default=5000,
        help="number of tokens after which --kv-bits takes effect (%(default)s)",
    )


def key_value_settings(args: argparse.Namespace) -> dict[str, int | None]:
    """The values of the key-value cache flags, or an empty dict if the command has none."""
    names = (*_NAMES, "quantized_kv_start")
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def adopt_key_value_settings(args: argparse.Namespace, settings: dict[str, int | None]) -> None:
    """Sets the key-value cache flags to the settings with which a prompt was cached.

    Raises:
        UsageError: A flag was given another value, or a setting is unknown.
    """
    is_known = settings.keys() <= key_value_settings(args).keys()
    if not is_known or settings.get("quantized_kv_start", 0) is None:
        raise UsageError(
            "[prompt cache] the settings must be those of this version but are "
            f"{list(settings)!r:.200}. Cache the prompt again."
        )
    for name, value in settings.items():
        given = getattr(args, name)
        if name in _NAMES and given is not None and given != value:
            raise UsageError(
                f"[prompt cache] '{name}' must be as when the prompt was cached, {value}, but got "
                f"{given}. Leave it out, or cache the prompt again."
            )
        setattr(args, name, value)


def with_key_value_cache(args: argparse.Namespace, model: "Decoder") -> "Decoder":
    """The model with the key-value cache that the flags ask for, if the command has them."""
    from ...generation import with_key_values

    settings: dict[str, Any] = key_value_settings(args)
    with argument_errors():
        return with_key_values(model, **settings) if settings else model


def note_flags_without_effect(args: argparse.Namespace, model: "Decoder") -> None:
    """Says on stderr which of the flags have no effect, because the model has no attention."""
    from ...generation import keeps_key_values

    unused = [name for name in _NAMES if getattr(args, name, None) is not None]
    if unused and not keeps_key_values(model):
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        print(
            "note: the model has no attention, and its state has a constant size. These flags have no "
            f"effect: {flags}.",
            file=sys.stderr,
        )
