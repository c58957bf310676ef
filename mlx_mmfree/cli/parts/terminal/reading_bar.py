"""A progress bar that a terminal shows while a model reads a long prompt."""

import sys
from types import TracebackType

from tqdm import tqdm


class ReadingBar:
    """Shows how much of a prompt has been read, if it is read in more than one piece.

    The end of the `with` block removes the bar.

    Args:
        step_size: Number of tokens read at a time.
        what: Text to show before the bar.
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
        """Shows that `read` of `total` tokens have been read."""
        if self._bar is None:
            if read >= total or total <= self._step_size:
                return
            # disable=None shows no bar where stderr is not a terminal
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
