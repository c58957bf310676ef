"""Reads the bodies of requests: small ones here, large ones in a process of their own.

To parse and check a large body takes the interpreter for as long as that takes, and nobody would be
answered meanwhile.
"""

from typing import TypeVar

from ...platform.confinement.policy import BODY
from ...platform.confinement.process import LimitError
from ..errors import RequestError
from ..schemas import Body, checked_body, checked_object
from ..settings import LARGE_BODY_BYTES

B = TypeVar("B", bound=Body)


class BodyReader:
    """Reads bodies. The process starts with the first large one.

    Args:
        max_bytes: The most bytes of one.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._process = BODY.process(max_bytes)

    def read(self, kind: type[B], text: bytes) -> B:
        """The request that a body makes.

        Raises:
            RequestError: As `checked_body` does, or the body takes too much to be checked.
        """
        if len(text) <= LARGE_BODY_BYTES:
            return checked_body(kind, text, self._max_bytes)
        question = kind.__name__, text, self._max_bytes
        try:
            answer = self._process.ask(question, BODY.seconds_for(len(text)))
        except LimitError as error:
            raise RequestError(
                f"[request] the body must be simpler: while it is checked, {error}.",
                413,
                code="body_too_large",
            ) from error
        if "refused" in answer:
            message, status, param, code = answer["refused"]
            raise RequestError(message, status, param=param, code=code)
        return checked_object(kind, answer["value"])

    def close(self) -> None:
        """Ends the process."""
        self._process.close()
