"""The flag for a picture, and the check that it can be drawn."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from ...errors import UsageError, install_extra
from .command import check_writable


def add_picture_flag(
    group: argparse._ActionsContainer,
    *,
    default: Path | None = None,
    what: str = "draw it",
) -> None:
    """Adds the flag for a picture; `what` is drawn."""
    shown = "" if default is None else " (%(default)s)"
    words = f"{what} into a PNG file; needs matplotlib{shown}"
    group.add_argument("--picture", type=Path, metavar="FILE", default=default, help=words)


def check_picture(caller: str, file: Path | None) -> None:
    """Refuses a picture that cannot be drawn, before any work; `None` asks for none.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written.
    """
    if file is None:
        return
    if find_spec("matplotlib") is None:
        raise UsageError(
            f"[{caller}] 'picture' needs the package matplotlib, which is not installed. "
            + install_extra("plot")
        )
    check_writable(f"[{caller}] 'picture'", file)
