"""Pillow, which is imported only where a picture is read."""

from importlib.util import find_spec

from ..errors import ImageError, install_extra


def require_pillow() -> None:
    """Says how to install Pillow where it is missing.

    Raises:
        ImageError: It is not installed.
    """
    if find_spec("PIL") is None:
        raise ImageError(
            "[image] pictures need the package Pillow, which is not installed. "
            + install_extra("vision")
        )
