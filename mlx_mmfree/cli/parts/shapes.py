"""The flag `--config`, which names models of published shapes, or a `config.json`."""

import argparse
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .command import CommandParser
from .flags import positive


class ShapeParser(CommandParser):
    """Names the shapes in its help alone: to know them, the architectures are imported."""

    def format_help(self) -> str:
        from ...evaluation.benchmark_weights import presets

        config = next(action for action in self._actions if action.dest == "config")
        config.help = str(config.help).format(", ".join(sorted(presets())))
        return super().format_help()


def add_config_flag(group: argparse._ActionsContainer, what: str, **options: Any) -> None:
    """Adds `--config`; `what` says in its help what is done with the models."""
    group.add_argument("--config", help=f"{what}: {{}}, or a config.json", **options)


def matrix_shape(text: str) -> tuple[int, int]:
    """The outputs and inputs of a matrix, written as `1024x2816`."""
    outputs, _, inputs = text.partition("x")
    return positive(outputs), positive(inputs)


def read_config(place: str, name: str) -> dict[str, Any]:
    """The configuration of this name, or in this file.

    Raises:
        UsageError: There is none.
    """
    from ...evaluation.benchmark_weights import presets
    from ...files.reading import read_json_object

    if name.lower() in presets():
        return dict(presets()[name.lower()])
    path = Path(name)
    if not path.exists():
        raise UsageError(
            f"[{place}] 'config' must be one of {', '.join(sorted(presets()))} or a config.json but got "
            f"{name!r}."
        )
    return read_json_object(path / "config.json" if path.is_dir() else path)
