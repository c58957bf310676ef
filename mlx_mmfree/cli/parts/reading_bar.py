"""A progress bar on a terminal while a model reads a long prompt."""

import sys
from types import TracebackType

from tqdm import tqdm


class ReadingBar:
    """Shows how much of a prompt is read, if that takes more than one piece; `with` removes it.

    Args:
        step_size: Positions of the prompt read at a time.
        what: What is read, shown before the bar.
    """

    def __init__(self, step_size: int, what: str = "Reading the prompt"):
        self._step_size = step_size
        self._what = what
        self._bar: tqdm | None = None

    def __enter__(self) -> "ReadingBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, read: int, total: int) -> None:
        """Takes how many tokens are read, of how many."""
        if self._bar is None:
            if read >= total or total <= self._step_size:
                return
            # left out where stderr is no terminal
            self._bar = tqdm(
                total=total,
                desc=self._what,
                unit="tok",
                unit_scale=True,
                leave=False,
                disable=None,
                file=sys.stderr,
            )
        self._bar.update(read - self._bar.n)
        if read >= total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
