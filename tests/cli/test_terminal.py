"""Nothing that strangers wrote steers the terminal; pipes get every character."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mmfree.errors import shown

ROOT = Path(__file__).parents[2]
HOSTILE = "\x1b[31m\x1b]0;title\x07\x9b2J\u202eabc\u2066\r\x08\x7f"

PROGRAM = """
import sys, warnings
from tqdm import tqdm
from mlx_mmfree.cli.parts.command import command
from mlx_mmfree.errors import CheckpointError

@command
def main(argv=None):
    print("a\\x1b", end="", flush=True)
    print("[31mb\\tc")
    warnings.warn(HOSTILE)
    for _ in tqdm(range(2), desc="bar", ncols=40, nrows=9, position=1):
        pass
    raise CheckpointError("[load] key " + HOSTILE)

HOSTILE = sys.argv[1]
status = main()
sys.stdout.write("after\\x1b[0m\\n")
sys.exit(status)
"""


def on_terminal(*command: str) -> tuple[int, str]:
    """A command's status and what it shows on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:
        # the system's word for the end
        pass
    os.close(ours)
    return process.wait(), b"".join(parts).decode()


def test_nothing_steers_a_terminal() -> None:
    status, text = on_terminal("-c", PROGRAM, HOSTILE)
    assert status == 2
    assert "a\ufffd[31mb\tc\r\n" in text
    # the bar goes to its line and back, and begins it again
    assert "\r\n\rbar" in text and "\x1b[A" in text
    rest = text.replace("\x1b[A", "").replace("\r", "").replace("after\x1b[0m\n", "")
    assert rest != text and "after" not in rest
    assert shown(rest) == rest
    assert "error: [load] key \ufffd[31m\ufffd]0;title\ufffd\ufffd2J\ufffdabc\ufffd" in rest


def test_a_crash_steers_nothing() -> None:
    program = PROGRAM.replace("CheckpointError(", "RuntimeError(")
    status, text = on_terminal("-c", program, HOSTILE)
    assert status == 1
    assert "RuntimeError: [load] key \ufffd[31m" in text
    assert "\x1b" not in text.replace("\x1b[A", "")


def test_pipes_get_every_character() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, HOSTILE],
        cwd=ROOT,
        capture_output=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )
    assert ended.stdout == b"a\x1b[31mb\tc\nafter\x1b[0m\n"
    assert "UserWarning: \x1b[31m\x1b]0;title\x07" in ended.stderr.decode()
    # a file of errors is shown on a terminal later
    assert "error: [load] key \ufffd[31m\ufffd]0;title\ufffd" in ended.stderr.decode()


def test_other_text_is_left_alone() -> None:
    text = "a\n\tb \u00e9 \u65e5\u672c \U0001f600 \u05d0\u200f \u0627 \ufffd"
    assert shown(text) == text


@pytest.mark.parametrize("code", [0, 8, 13, 27, 127, 128, 0x9B, 0x202A, 0x202E, 0x2066, 0x2069])
def test_each_sign_is_shown_for_itself(code: int) -> None:
    assert shown(f"a{chr(code)}b") == "a\ufffdb"
