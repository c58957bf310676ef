"""Reads what a user types, with line editing and a history that outlasts the session."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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
        self._read = _editor(_kept_history() if keeps_history else None) if is_terminal else input

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


def _kept_history() -> Path | None:
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
