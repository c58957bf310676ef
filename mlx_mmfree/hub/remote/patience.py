"""Repeats requests that the Hub cannot answer for the moment, after the delay that it asks for."""

import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

PASSING = (408, 429, 500, 502, 503, 504)
"""The statuses that may pass: a later request may succeed."""

MAX_TRIES = 6
MAX_DELAY_S = 300.0

Result = TypeVar("Result")

_RESET = re.compile(r"\bt=([0-9]{1,9})\b")


def patiently(call: Callable[[], Result], place: str) -> Result:
    """The result of a call, which is repeated while the Hub is busy or fails.

    Args:
        call: The call. It may be made several times.
        place: What is written or read, for a notice on stderr.

    Raises:
        HfHubHTTPError: The Hub refuses for another reason, or for too long.
    """
    from huggingface_hub.errors import HfHubHTTPError

    for tries in range(1, MAX_TRIES):
        try:
            return call()
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status not in PASSING:
                raise
            wait(status, error.response.headers, tries, place)
    return call()


def wait(status: int, headers: Mapping[str, str], tries: int, place: str) -> None:
    """Waits before the next try for as long as the answer asks."""
    delay = delay_s(headers, tries)
    print(
        f"{place}: the Hub answers with status {status}; trying again in {delay:.0f} s",
        file=sys.stderr,
    )
    time.sleep(delay)


def delay_s(headers: Mapping[str, str], tries: int) -> float:
    """The seconds to wait: as many as the answer says, else 1, 2, 4 and so on."""
    asked = headers.get("retry-after", "").strip()
    if asked.isascii() and asked.isdigit():
        return min(float(asked[:9]), MAX_DELAY_S)
    if asked:
        try:
            until = parsedate_to_datetime(asked)
        except ValueError:
            return float(2 ** (tries - 1))
        left = (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        return min(max(left, 0.0), MAX_DELAY_S)
    reset = _RESET.search(headers.get("ratelimit", ""))
    return min(float(reset[1]), MAX_DELAY_S) if reset else float(2 ** (tries - 1))
