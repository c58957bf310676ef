"""Reads the prompts of a command from a flag, a file or standard input."""

import sys
from pathlib import Path

from ...errors import UsageError
from ...files.reading import parse_json, read_text

_MAX_BYTES = 100_000_000
# about two million tokens, for which a tokenizer needs a gigabyte of memory
_MAX_PROMPT_BYTES = 8_000_000


def given_prompt(text: str) -> str:
    """The prompt that a flag gives. `-` stands for all of standard input.

    Raises:
        UsageError: As for `read_standard_input`.
    """
    return read_standard_input() if text == "-" else text


def read_standard_input() -> str:
    """Reads all of standard input as text.

    Raises:
        UsageError: Standard input is empty, is not UTF-8, or is too long for a prompt.
    """
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    _check_size(len(data), "standard input")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"[prompt] standard input must be UTF-8 text but byte {error.start} is "
            f"0x{error.object[error.start]:02x}. Convert the text to UTF-8."
        ) from error
    if not text:
        raise UsageError(
            "[prompt] standard input must hold the prompt of '--prompt -' but is empty or closed. "
            "Send a text to the command."
        )
    return text


def read_prompts(file: Path) -> list[str]:
    """Reads the prompts of a file, one on each line. Empty lines are left out.

    A line of a `.jsonl` file is a JSON string, or an object with the text under `prompt`.

    Raises:
        UsageError: The file cannot be read or holds no prompt, or a line is too long or malformed.
    """
    try:
        text = read_text(file, _MAX_BYTES)
    except OSError as error:
        raise UsageError(
            f"[prompt] 'prompts_file' must be a UTF-8 text file but '{file}' cannot be read: "
            f"{error}."
        ) from error
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(
            f"[prompt] 'prompts_file' must hold a prompt but '{file}' is empty. Write one on each line."
        )
    for n, line in lines:
        _check_size(len(line.encode()), f"'{file}' line {n}")
    if file.suffix == ".jsonl":
        return [_parsed(line, f"'{file}' line {n}") for n, line in lines]
    return [line.rstrip("\r") for _, line in lines]


def _check_size(size: int, place: str) -> None:
    if size > _MAX_PROMPT_BYTES:
        raise UsageError(
            f"[prompt] {place} must have at most {_MAX_PROMPT_BYTES:,} bytes but has more. "
            "Shorten the prompt."
        )


def max_token_count(prompt: str) -> int:
    """The largest number of tokens that a prompt can have: each takes at least a byte."""
    return len(prompt.encode("utf-8", "surrogatepass"))


def _parsed(line: str, place: str) -> str:
    try:
        value = parse_json(line.encode())
    except ValueError as error:
        raise UsageError(f"[prompt] {place} {error}.") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise UsageError(
            f"[prompt] {place} must be a string or an object with a string under 'prompt' but is "
            f"{line[:80]!r}."
        )
    return prompt
