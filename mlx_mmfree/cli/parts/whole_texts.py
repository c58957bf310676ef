"""What commands share that read whole texts, and write something about each."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from .command import argument_errors
from .prompts import given_prompt, read_prompts

if TYPE_CHECKING:
    from ...hub.checkpoint.load import OpenedModel


def add_texts(parser: argparse.ArgumentParser, purpose: str, *, is_required: bool = True) -> None:
    """Adds the flags for one text or a file of several; `purpose` such as "to translate"."""
    source = parser.add_mutually_exclusive_group(required=is_required)
    source.add_argument("--text", help=f"text {purpose}; '-' reads standard input")
    source.add_argument(
        "--texts-file", type=Path, help="text file with a text on each line, or a .jsonl file"
    )


def given_texts(args: argparse.Namespace) -> list[str]:
    """The texts that the flags give."""
    if args.texts_file is None:
        return [given_prompt(args.text)]
    return read_prompts(args.texts_file)


def opened_as(
    kind: type[Any] | tuple[type[Any], ...], args: argparse.Namespace, place: str, task: str
) -> "OpenedModel":
    """Opens a model of one kind, without its weights.

    Args:
        kind: The class of the model, or several.
        args: Has `model` and `revision`.
        place: The command.
        task: What its models must do.

    Raises:
        UsageError: It is a model of another kind.
    """
    from ...hub.checkpoint.load import open_model

    opened = open_model(args.model, args.revision)
    planned: Any = opened.model
    if not isinstance(planned, kind):
        raise UsageError(
            f"[{place}] 'model' must {task} but '{args.model}' is a model for {planned.purpose}. Use "
            f"'mmfree {planned.command}' for it."
        )
    return opened


@contextmanager
def texts_bar(count: int, unit: str = "text") -> Iterator[Callable[[int], object]]:
    """A progress bar of texts, told how many are done, with errors of arguments in a line each."""
    from tqdm import tqdm

    with (
        argument_errors(),
        tqdm(total=count, unit=unit, leave=False, disable=None, file=sys.stderr) as bar,
    ):
        yield lambda done: bar.update(done - bar.n)
