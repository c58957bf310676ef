"""Progress of long work on stderr: a bar on a terminal, and elsewhere a line every half minute."""

import math
import sys
from time import monotonic
from typing import Any

from tqdm import tqdm

INTERVAL_S = 30
"""Seconds between two lines, and before the first one."""

_LINE = (
    "{desc}: {percentage:.0f} % ({n_fmt} of {total_fmt}), {rate_noinv_fmt}, {elapsed} elapsed, "
    "{remaining} left{postfix}"
)


class Progress(tqdm):
    """A bar of tqdm where stderr is a terminal, and whole lines where it is a file or a pipe.

    Args:
        what: The work, as it is named before the numbers.
        total: The number of units to do.
        unit: The unit. Bytes, `"B"`, are shown in kB, MB and GB.
        is_shown: Whether anything is shown.
        options: Further options of tqdm for the bar.
    """

    def __init__(
        self, what: str, total: int, unit: str = "it", *, is_shown: bool = True, **options: Any
    ):
        self._is_bar = sys.stderr is not None and sys.stderr.isatty()
        self._shown_at = monotonic()
        is_bytes = unit == "B"
        shape: dict[str, Any] = {"unit": unit, "unit_scale": is_bytes, "dynamic_ncols": True}
        shape |= options
        if not self._is_bar:
            shape |= {
                "unit": unit if is_bytes else f" {unit}",
                "bar_format": _LINE if total else None,
                "delay": 0,
                "mininterval": min(1, INTERVAL_S),
            }
        is_shown = is_shown and sys.stderr is not None
        super().__init__(desc=what, total=total, disable=not is_shown, file=sys.stderr, **shape)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Shows the bar, or prints a line if the last one is old enough."""
        if self._is_bar:
            super().display(msg, pos)
        elif monotonic() - self._shown_at >= INTERVAL_S:
            self._shown_at = monotonic()
            print(self, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the bar. Lines stay as they are."""
        if not self._is_bar:
            # as if nothing had been shown, so that nothing is cleared
            self.delay = math.inf
        super().close()
