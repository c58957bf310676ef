"""Calls into compiled tokenizer libraries, whose failures surface as one clean error."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CheckpointError, MMFreeError


@contextmanager
def clean_errors(problem: str) -> Iterator[None]:
    """Turns whatever the block raises into a ``CheckpointError`` that begins with ``problem``.

    A Rust panic reaches Python as an exception beside ``Exception``; it is caught by its name.
    """
    try:
        yield
    except MMFreeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(f"{problem} ({reason}).") from error
