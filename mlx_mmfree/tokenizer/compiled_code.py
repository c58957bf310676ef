"""Turns failures of compiled tokenizer libraries into one clean error."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CheckpointError, MMFreeError

CHANGE_THE_TEXT = "Encode another text, or use another tokenizer."
"""The way out where a sound file cannot encode a text."""


@contextmanager
def clean_errors(problem: str, way_out: str = "Download it again.") -> Iterator[None]:
    """Turns whatever the block raises into a `CheckpointError`.

    A Rust panic is no `Exception` in Python, so it is recognised by its name.

    Args:
        problem: What the error says first, without a full stop.
        way_out: What it says last.
    """
    try:
        yield
    except MMFreeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(f"[tokenizer] {problem} ({reason}). {way_out}") from error
