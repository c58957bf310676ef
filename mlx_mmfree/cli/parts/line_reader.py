"""Reads what a user types: edited, with a history over sessions, a pasted text as one."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

QUOTES = '"""'
MOST_LINES = 2000


def history_file() -> Path:
    """Where lines are kept: `chat_history` in the state folder of the XDG specification."""
    default = Path("~/.local/state").expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or default) / "mlx_mmfree" / "chat_history"


class MessageReader:
    '''Reads messages of one line, or of several between `"""`.

    Args:
        prompt: Shown before a line; the lines of one message after the first have dots.
        keeps_history: Whether lines are kept for later sessions.
    '''

    def __init__(self, prompt: str, *, keeps_history: bool = True):
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._prompt = prompt if sys.stdin.isatty() else ""
        self._more = "." * (len(prompt) - 1) + " " if sys.stdin.isatty() else ""
        self._read = _editor(_kept_history() if keeps_history else None) if is_terminal else input

    def __call__(self) -> str:
        """The next message.

        Raises:
            EOFError: There is none.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        text = self._read(self._prompt).strip()
        if not text.startswith(QUOTES):
            return text
        text = text.removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + self._read(self._more)
        return text.rstrip().removesuffix(QUOTES).strip()


def _kept_history() -> Path | None:
    """The file of the history, readable for its owner alone; `None` where it cannot be made."""
    file = history_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        print(f"note: no history is kept: {error}.", file=sys.stderr)
        return None
    return file


def _editor(history: Path | None) -> Callable[[str], str]:
    """What reads a line with editing, by prompt_toolkit where it is there and the terminal can."""
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
    """Gives `input` its line editing, and a history of its own form."""
    import atexit
    import readline

    # without this, each line of a pasted text is a message
    readline.parse_and_bind("set enable-bracketed-paste on")
    if history is None:
        return
    file = history.with_name(history.name + ".readline")
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(MOST_LINES)

    def write() -> None:
        with suppress(OSError):
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(file)

    atexit.register(write)
