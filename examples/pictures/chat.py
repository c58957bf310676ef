"""Draws a session of `mmfree chat` as a terminal shows it: `chat.svg`, in the folder of this file.

It is a real session, in a pseudo-terminal, with the model in the package. The seed makes its texts the
same in each run, and the speeds are the machine's. `--quick` prints a shorter session.
"""

import argparse
import os
import pty
import re
import sys
import termios
from html import escape
from pathlib import Path

FILE = Path(__file__).with_name("chat.svg")
COLUMNS, ROWS = 88, 40
PROMPT = ">> "
MESSAGES = (
    "Once upon a time there was a little frog",
    "/set max-tokens 40",
    "The queen smiled and",
    "/stats",
)
FLAGS = ("--seed", "1")

TEXT, TYPED, DIM, GROUND = "#d8dee9", "#8fd3a8", "#8a94a6", "#1f2430"
CELL, LINE, MARGIN, BAR = 8.4, 20, 20, 36


def session(*flags: str) -> list[str]:
    """The lines that a terminal shows of a chat in which all messages are sent in turn."""
    process, terminal = pty.fork()
    if process == 0:
        size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.environ |= {"TERM": "dumb", "HF_HUB_OFFLINE": "1", **size}
        os.execv(
            sys.executable, [sys.executable, "-m", "mlx_mmfree", "chat", "--no-history", *flags]
        )
    termios.tcsetwinsize(terminal, (ROWS, COLUMNS))
    shown = ""
    for message in (*MESSAGES, "/exit"):
        shown += _until_prompt(terminal)
        os.write(terminal, f"{message}\n".encode())
    shown += _until_prompt(terminal)
    _, status = os.waitpid(process, 0)
    if status:
        raise SystemExit(f"[chat_picture] the chat must end with status 0 but did not: {shown}")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "")
    return plain.removesuffix(f"{PROMPT}/exit\n").rstrip("\n").split("\n")


def _until_prompt(terminal: int) -> str:
    """The output until a prompt stands at the end, or the other side closes the terminal."""
    shown = b""
    while not shown.endswith(PROMPT.encode()):
        try:
            shown += os.read(terminal, 4096)
        except OSError:
            break
    return shown.decode(errors="replace")


def svg(lines: list[str]) -> str:
    """The lines in a window. What was typed and the notes after answers have colours of their own."""
    width, height = 2 * MARGIN + COLUMNS * CELL, BAR + 2 * MARGIN + len(lines) * LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">',
        "<title>A chat in the terminal</title>",
        f'<rect width="{width:.0f}" height="{height}" rx="10" fill="{GROUND}"/>',
    ]
    for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        parts.append(f'<circle cx="{MARGIN + 4 + 20 * n}" cy="20" r="6" fill="{colour}"/>')
    parts.append('<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">')
    for n, line in enumerate(lines):
        is_note = re.fullmatch(r"\[.*\]", line)
        colour = TYPED if line.startswith((PROMPT, "$ ")) else DIM if is_note else TEXT
        parts.append(
            f'<text x="{MARGIN}" y="{BAR + MARGIN + n * LINE}" fill="{colour}" xml:space="preserve" '
            f'textLength="{len(line) * CELL:.1f}" lengthAdjust="spacing">{escape(line)}</text>'
            if line
            else ""
        )
    return "\n".join([*filter(None, parts), "</g>", "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FILE, help="picture to write (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="print a session with short answers")
    args = parser.parse_args()
    if args.quick:
        print(*session(*FLAGS, "--max-tokens", "8"), sep="\n")
        return
    lines = [f"$ mmfree chat {' '.join(FLAGS)}", *session(*FLAGS)]
    args.output.write_text(svg(lines), encoding="utf-8")
    print(f"Wrote {args.output}.")


if __name__ == "__main__":
    main()
