"""The progress bar of work on files, in bytes."""

from typing import NoReturn

from tqdm import tqdm


def byte_bar(size_bytes: int, name: str) -> "tqdm[NoReturn]":
    """A bar that appears after a second, and only on a terminal."""
    # disable=None shows no bar where stderr is not a terminal
    return tqdm(total=size_bytes, unit="B", unit_scale=True, desc=name, disable=None, delay=1)
