"""Progress bars that a terminal shows for one task after the other."""

import sys
from types import TracebackType

from tqdm import tqdm


class TaskBars:
    """Shows a bar for the task at hand. The end of the `with` block removes it."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._task = ""

    def __enter__(self) -> "TaskBars":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, task: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of the task are done."""
        if self._bar is None or task != self._task:
            self._close()
            self._task = task
            # disable=None shows no bar where stderr is not a terminal
            self._bar = tqdm(total=total, desc=task, leave=False, disable=None, file=sys.stderr)
        self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
