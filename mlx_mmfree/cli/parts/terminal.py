"""Reading from a terminal and showing on it: tables, bars, lines of words, messages."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self
from unicodedata import category, east_asian_width

from ...platform.resident_memory import BYTES_PER_GB

_BAR = 30


def aligned(rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """The lines of a table whose columns are as wide as their widest cell.

    Args:
        rows: The cells of each row, the heading first.
        left: Number of first columns that are aligned to the left. The others are to the right.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if n < left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, the heading first; numbers stand to the right."""
    heading, *rest = [f"| {' | '.join(row)} |" for row in rows]
    columns = heading.count(" | ")
    return [heading, f"| --- |{' ---: |' * columns}", *rest]


def share_bar(share: float) -> str:
    """A bar as long as a share from 0 to 1."""
    return "█" * round(_BAR * share)


def size_text(nbytes: int) -> str:
    """A number of bytes in kB, MB or GB."""
    if nbytes >= BYTES_PER_GB:
        return f"{nbytes / BYTES_PER_GB:.2f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"


class Interruption:
    """Notes the first Ctrl-C inside the `with` block, so that no decoding step is cut short.

    Before the first token has come, and at the second press, Ctrl-C raises `KeyboardInterrupt`.

    Attributes:
        is_noted: Whether Ctrl-C was pressed after the first token.
        has_tokens: Whether the first token has come. The user of this class sets it.
    """

    def __init__(self) -> None:
        self.is_noted = self.has_tokens = False

    def __enter__(self) -> "Interruption":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_noted or not self.has_tokens:
            raise KeyboardInterrupt
        self.is_noted = True


class _Bar:
    """A progress bar that the end of the `with` block removes."""

    _bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _open(self, what: str, total: int, **options: Any) -> None:
        from ...platform.progress import Progress

        self._bar = Progress(what, total, leave=False, **options)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class ReadingBar(_Bar):
    """Shows how much of a prompt has been read, if it is read in more than one chunk.

    Args:
        step_size: Number of tokens read at a time.
        what: Text to show before the bar.
    """

    def __init__(self, step_size: int, what: str = "Reading the prompt"):
        self._step_size = step_size
        self._what = what

    def __call__(self, read: int, total: int) -> None:
        """Shows that `read` of `total` tokens have been read."""
        if self._bar is None:
            if read >= total or total <= self._step_size:
                return
            self._open(self._what, total, unit="tok", unit_scale=True)
        self._bar.update(read - self._bar.n)
        if read >= total:
            self._close()


class TaskBars(_Bar):
    """Shows a bar for the task at hand, one task after the other."""

    _task = ""

    def __call__(self, task: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of the task are done."""
        if self._bar is None or task != self._task:
            self._close()
            self._task = task
            self._open(task, total)
        self._bar.update(done - self._bar.n)


# Scripts that are written without spaces: their lines may break anywhere.
_WIDE = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60"
    "\U00020000-\U0003fffd"
)
_PARTS = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")


def columns(text: str) -> int:
    """The number of terminal columns that a text takes."""
    return sum(
        0 if category(sign) in ("Mn", "Me", "Cf") else 1 + (east_asian_width(sign) in "WF")
        for sign in text
    )


class WordWrap:
    """Lays out a growing text so that the terminal breaks no word in two.

    A word is held back until the character after it is known, unless it is wider than a line.

    Args:
        width: Number of columns of a line.
    """

    def __init__(self, width: int):
        self._width = max(width, 1)
        self._column = 0
        self._space = self._word = ""

    def add(self, text: str) -> str:
        """Adds a chunk of the text and returns what can be shown now."""
        shown = []
        for part in _PARTS.findall(text):
            if part == "\n":
                shown += [self.finish(), part]
                self._column, self._space = 0, ""
            elif part.isspace():
                shown.append(self.finish())
                self._space += part
            elif re.match(f"[{_WIDE}]", part):
                shown.append(self.finish())
                shown.append(self._placed(part, may_break=True))
            else:
                self._word += part
                if columns(self._word) >= self._width:
                    shown.append(self.finish())
        return "".join(shown)

    def finish(self) -> str:
        """Returns the word that was held back."""
        word, self._word = self._word, ""
        return word and self._placed(word, may_break=bool(self._space))

    def _placed(self, word: str, *, may_break: bool) -> str:
        space, self._space = self._space, ""
        width = columns(word)
        column = self._column + len(space.expandtabs())
        if self._column and may_break and column + width > self._width:
            self._column = width
            return "\n" + word
        column += width
        self._column = column if column <= self._width else (column - 1) % self._width + 1
        return space + word


QUOTES = '"""'
MAX_HISTORY_LINES = 2000


def history_file() -> Path:
    """The file that keeps the lines: `chat_history` in the state folder of the XDG specification."""
    default = Path("~/.local/state").expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or default) / "mlx_mmfree" / "chat_history"


class MessageReader:
    '''Reads messages of one line, or of several between `"""`.

    Args:
        prompt: Shown before each message. The further lines of a message show dots instead.
        keeps_history: Whether the lines are kept for later sessions.

    Attributes:
        is_quoted: Whether the last message stood between quotes, so that it cannot be a command.
    '''

    def __init__(self, prompt: str, *, keeps_history: bool = True):
        self.is_quoted = False
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._prompt = prompt if sys.stdin.isatty() else ""
        self._more = "." * (len(prompt) - 1) + " " if sys.stdin.isatty() else ""
        self._read = _editor(_history_path() if keeps_history else None) if is_terminal else input

    def __call__(self) -> str:
        """The next message.

        Raises:
            EOFError: The input has ended.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        text = self._read(self._prompt).strip()
        self.is_quoted = text.startswith(QUOTES)
        if not self.is_quoted:
            return text
        text = text.removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + self._read(self._more)
        return text.rstrip().removesuffix(QUOTES).strip()


def _history_path() -> Path | None:
    """The history file, which only its owner may read, or `None` if it cannot be made."""
    file = history_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        print(
            f"note: the lines of this session are not kept for later ones: {error}.",
            file=sys.stderr,
        )
        return None
    return file


def _editor(history: Path | None) -> Callable[[str], str]:
    """A function that reads a line: with prompt_toolkit where it works, else with readline."""
    if os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        with suppress(ImportError):
            return _toolkit_editor(history)
    with suppress(ImportError):
        _set_up_readline(history)
    return input


def _toolkit_editor(history: Path | None) -> Callable[[str], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory() if history is None else FileHistory(str(history)),
        key_bindings=keys,
        prompt_continuation=lambda width, number, is_soft: "." * (width - 1) + " ",
    )
    return session.prompt


def _set_up_readline(history: Path | None) -> None:
    """Gives `input` line editing and, in a file of its own format, a history."""
    import atexit
    import readline

    # without bracketed paste, each line of a pasted text would be sent as a message
    readline.parse_and_bind("set enable-bracketed-paste on")
    if history is None:
        return
    file = history.with_name(history.name + ".readline")
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(MAX_HISTORY_LINES)

    def write() -> None:
        with suppress(OSError):
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(file)

    atexit.register(write)
