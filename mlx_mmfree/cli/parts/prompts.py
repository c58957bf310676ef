"""Reads the prompts of a command and writes them the way a model was taught."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...files.json_reader import parse_json
from ...files.opening import read_file

_MAX_BYTES = 100_000_000
# about two million tokens, for which a tokenizer takes a gigabyte
_MAX_PROMPT_BYTES = 8_000_000


def given_prompt(text: str) -> str:
    """The prompt of a flag; `-` stands for all of standard input.

    Raises:
        UsageError: As `read_standard_input`.
    """
    return read_standard_input() if text == "-" else text


def read_standard_input() -> str:
    """All of standard input as text.

    Raises:
        UsageError: It is not UTF-8, empty, or too long for a prompt.
    """
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    _check_size(len(data), "standard input")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"[generate] standard input must be UTF-8 text but byte {error.start} is "
            f"0x{error.object[error.start]:02x}."
        ) from error
    if not text:
        raise UsageError(
            "[generate] standard input must hold the prompt of '--prompt -' but is empty or closed."
        )
    return text


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file: one a line, empty lines left out.

    A line of a `.jsonl` file is a JSON string or an object with the text under `prompt`.

    Raises:
        UsageError: The file cannot be read, holds no prompt, or a line is too long or not as
            described.
    """
    try:
        text = read_file(file, _MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"[generate] 'prompts_file' must be a UTF-8 text file but '{file}' cannot be read: "
            f"{error}."
        ) from error
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"[generate] 'prompts_file' must hold a prompt but '{file}' is empty.")
    for n, line in lines:
        _check_size(len(line.encode()), f"'{file}' line {n}")
    if file.suffix == ".jsonl":
        return [_parsed(line, f"'{file}' line {n}") for n, line in lines]
    return [line.rstrip("\r") for _, line in lines]


def _check_size(size: int, place: str) -> None:
    if size > _MAX_PROMPT_BYTES:
        raise UsageError(
            f"[generate] {place} must have at most {_MAX_PROMPT_BYTES:,} bytes but has more. "
            "Shorten the prompt."
        )


def most_tokens(prompt: str) -> int:
    """How many tokens a prompt has at most: one is a byte at least."""
    return len(prompt.encode("utf-8", "surrogatepass"))


def _parsed(line: str, place: str) -> str:
    try:
        value = parse_json(line.encode())
    except ValueError as error:
        raise UsageError(f"[generate] {place} {error}.") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise UsageError(
            f"[generate] {place} must be a string or an object with a string under 'prompt'."
        )
    return prompt


# Stands for the text that a chat template is cut at.
_MARK = "\ufffcprompt\ufffc"


class PromptWriter:
    """Turns a prompt into what the model reads.

    Args:
        tokenizer: Belongs to the model.
        system_prompt: What the model is told before the prompt; needs a chat template.
        prefill_response: How the answer begins.
        ignore_chat_template: Feed the bare prompt even if there is a template.
        variables: Further names for the template.

    Raises:
        UsageError: A system prompt is given but no chat template is used.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        prefill_response: str = "",
        ignore_chat_template: bool = False,
        variables: Mapping[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self._uses_template = tokenizer.has_chat_template and not ignore_chat_template
        if system_prompt is not None and not self._uses_template:
            raise UsageError(
                "[generate] 'system_prompt' must be left out where no chat template is used. Write "
                "it into the prompt."
            )
        self._before = [] if system_prompt is None else [_message("system", system_prompt)]
        self._prefill = prefill_response
        self._variables = dict(variables or {})

    def __call__(self, prompt: str) -> str | Sequence[int]:
        """The text or the ids for `generate`."""
        if not prompt or not self._uses_template:
            return prompt and prompt + self._prefill
        messages = [*self._before, _message("user", prompt)]
        ids: list[int] = self._tokenizer.apply_chat_template(messages, **self._variables)
        return [*ids, *self._plain(self._prefill)]

    def opening(self, prompt: str) -> list[int]:
        """The ids of a prompt that more text of the same message will follow."""
        from ...generation.text import encode_once_begun

        if not self._uses_template:
            ids: list[int] = self._tokenizer.encode(prompt)
            return ids
        before, _ = self._around_message()
        begun = encode_once_begun(self._tokenizer, before, parse_special=True)
        return [*begun, *self._plain(prompt)]

    def continuation(self, prompt: str) -> list[int]:
        """The ids that go on after `opening`, to where the answer begins."""
        if not self._uses_template:
            return self._plain(prompt + self._prefill)
        _, after = self._around_message()
        return [*self._plain(prompt), *self._parsed(after), *self._plain(self._prefill)]

    def _around_message(self) -> tuple[str, str]:
        """What the template writes before and after the prompt."""
        messages = [*self._before, _message("user", _MARK)]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **self._variables)
        parts = text.split(_MARK)
        if len(parts) != 2:
            raise UsageError(
                "[generate] the chat template must write a message once but writes it "
                f"{len(parts) - 1} times: the prompt cannot be cut in two. Ignore the template."
            )
        return parts[0], parts[1]

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        return ids

    def _parsed(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        return ids


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
