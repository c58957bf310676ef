"""Reads prompts and texts, and turns them into what a model was taught to read."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...files.reading import parse_json, read_text
from .command import argument_errors
from .flags import json_object, non_negative, positive

if TYPE_CHECKING:
    from ...hub.checkpoint.load import OpenedModel


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
    if not (text := piped_text()):
        raise UsageError(
            "[prompt] standard input must hold the prompt of '--prompt -' but is empty or closed. "
            "Send a text to the command."
        )
    return text


def piped_text() -> str:
    """All of standard input, which may be empty.

    Raises:
        UsageError: Standard input is not UTF-8, or is too long for a prompt.
    """
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    _check_size(len(data), "standard input")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"[prompt] standard input must be UTF-8 text but byte {error.start} is "
            f"0x{error.object[error.start]:02x}. Convert the text to UTF-8."
        ) from error


def read_prompts(file: Path, keys: Sequence[str] = ("prompt",)) -> list[str]:
    """Reads the prompts of a file, one on each line. Empty lines are left out.

    A line of a `.jsonl` file is a JSON string, or an object with the text under the first of `keys` that
    it has.

    Raises:
        UsageError: The file cannot be read or holds no prompt, or a line is too long or malformed.
    """
    try:
        text = read_text(file, _MAX_BYTES)
    except OSError as error:
        raise UsageError(
            f"[prompt] 'data' must be a UTF-8 text file but '{file}' cannot be read: {error}."
        ) from error
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(
            f"[prompt] 'data' must hold a prompt but '{file}' is empty. Write one on each line."
        )
    for n, line in lines:
        _check_size(len(line.encode()), f"'{file}' line {n}")
    if file.suffix == ".jsonl":
        return [_parsed(line, f"'{file}' line {n}", keys) for n, line in lines]
    return [line.rstrip("\r") for _, line in lines]


def _check_size(size: int, where: str) -> None:
    if size > _MAX_PROMPT_BYTES:
        raise UsageError(
            f"[prompt] {where} must have at most {_MAX_PROMPT_BYTES:,} bytes but has more. "
            "Shorten the prompt."
        )


def max_token_count(prompt: str) -> int:
    """The largest number of tokens that a prompt can have: each takes at least a byte."""
    return len(prompt.encode("utf-8", "surrogatepass"))


def _parsed(line: str, where: str, keys: Sequence[str]) -> str:
    try:
        value = parse_json(line.encode())
    except ValueError as error:
        raise UsageError(f"[prompt] {where} {error}.") from error
    prompt = value
    if isinstance(value, dict):
        prompt = next((value[key] for key in keys if key in value), None)
    if not isinstance(prompt, str):
        known = " or ".join(f'"{key}"' for key in keys)
        raise UsageError(
            f"[prompt] {where} must be a string or an object with a string under {known} but is "
            f"{line[:80]!r}."
        )
    return prompt


def add_template_flags(group: Any, *, can_ignore: bool = True) -> None:
    """Adds the flags for the chat template; `can_ignore` adds the one that turns it off."""
    group.add_argument(
        "--system-prompt", help="instruction that a chat model reads before all else"
    )
    if can_ignore:
        group.add_argument(
            "--ignore-chat-template",
            action="store_true",
            help="read the bare prompt even if the tokenizer has a chat template",
        )
    add_template_args_flag(group)


def add_chat_template_flag(group: Any) -> None:
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="file with a chat template in place of the adapter's or the model's",
    )


def add_template_args_flag(group: Any) -> None:
    """Adds the flags for variables of the chat template, which are in `chat_template_args` together."""
    group.add_argument(
        "--chat-template-args",
        "--chat-template-config",
        type=json_object,
        help="JSON object with further variables of the chat template",
    )
    group.add_argument(
        "--reasoning-effort",
        metavar="EFFORT",
        help="how much the model thinks before it answers, by a name that its chat template knows, such "
        "as low or medium; none: not at all",
    )


def template_variables(args: argparse.Namespace) -> dict[str, Any]:
    """The variables of the chat template that the flags give."""
    given = dict(args.chat_template_args or {})
    if args.reasoning_effort == "none":
        return {"enable_thinking": False, **given}
    if args.reasoning_effort is not None:
        given["reasoning_effort"] = args.reasoning_effort
    return given


def thinks(variables: Mapping[str, Any]) -> bool:
    """Returns whether answers begin with reasoning, by the variables of a template that knows it."""
    return variables.get("enable_thinking") is not False


def add_reasoning_budget_flag(group: Any) -> None:
    group.add_argument(
        "--reasoning-budget",
        type=non_negative,
        metavar="N",
        help="largest number of tokens of reasoning, after which its tag is closed; default: no limit "
        "except the answer's",
    )


def add_prefill_flag(group: Any) -> None:
    group.add_argument(
        "--prefill-step-size",
        type=positive,
        default=2048,
        help="number of prompt tokens read at a time (%(default)s)",
    )


def add_end_flags(group: Any, *, max_tokens: int) -> None:
    """Adds the flags for the end of a text; `max_tokens` is the default of its flag."""
    group.add_argument(
        "--max-tokens",
        "-m",
        type=positive,
        default=max_tokens,
        help="write at most this many tokens (%(default)s)",
    )
    add_end_token_flag(group)


def add_end_token_flag(group: Any) -> None:
    group.add_argument(
        "--extra-eos-token",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="further tokens or ids that end the text, beside the tokenizer's own",
    )


# Stands for the prompt in a rendered chat template, which is cut in two there.
_MARK = "\ufffcprompt\ufffc"


class PromptWriter:
    """Turns a prompt into what the model reads.

    Args:
        tokenizer: The tokenizer of the model.
        system_prompt: Instruction that comes before the prompt. It needs a chat template.
        prefill_response: The prefix of the answer.
        ignore_chat_template: Whether to read the bare prompt even if there is a chat template.
        variables: Further variables of the chat template.
        most: The most tokens that the model reads, where it ends; longer texts are not encoded.

    Attributes:
        uses_template: Whether prompts become messages, which the model answers.

    Raises:
        UsageError: There is a system prompt but no chat template is used.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        prefill_response: str = "",
        ignore_chat_template: bool = False,
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ):
        self._tokenizer = tokenizer
        self._most = most
        self.uses_template: bool = tokenizer.has_chat_template and not ignore_chat_template
        if system_prompt is not None and not self.uses_template:
            raise UsageError(
                "[prompt] 'system_prompt' must be left out where no chat template is used. Write "
                "the instruction into the prompt."
            )
        self._before = [] if system_prompt is None else [_message("system", system_prompt)]
        self._prefill = prefill_response
        self._variables = dict(variables or {})

    def __call__(self, prompt: str) -> str | Sequence[int]:
        """The text or the token ids to give to `generate`."""
        if not prompt or not self.uses_template:
            return prompt and prompt + self._prefill
        messages = self._messages(prompt)
        chat = self._tokenizer.render_chat(messages, **self._variables)
        self._check(chat.text)
        ids: list[int] = chat.ids()
        return [*ids, *self._tokenizer.encode_continuation(self._prefill)]

    def opening(self, prompt: str) -> list[int]:
        """The token ids of a prompt that will be followed by more text of the same message."""
        self._check(prompt)
        if not self.uses_template:
            ids: list[int] = self._tokenizer.encode_parts([prompt, ""])[0]
            return ids
        before, _ = self._around_message()
        encode = self._tokenizer.encode
        begun: list[int] = encode(before, add_special_tokens=False, parse_special=True)
        first = self._tokenizer.apply_chat_template(self._messages(_MARK), **self._variables)[:1]
        if first == [self._tokenizer.bos_token_id] != begun[:1]:
            begun = [*first, *begun]
        return [*begun, *self._tokenizer.encode_continuation(prompt)]

    def continuation(self, prompt: str) -> list[int]:
        """The token ids from the end of `opening` up to the start of the answer."""
        self._check(prompt)
        encode = self._tokenizer.encode_continuation
        if not self.uses_template:
            ids: list[int] = encode(prompt + self._prefill)
            return ids
        _, after = self._around_message()
        return [*encode(prompt), *encode(after, parse_special=True), *encode(self._prefill)]

    def _check(self, text: str) -> None:
        from ...generation.prompts import check_text_length

        check_text_length(self._tokenizer, text, self._most)

    def _messages(self, prompt: str) -> list[dict[str, str]]:
        return [*self._before, _message("user", prompt)]

    def _around_message(self) -> tuple[str, str]:
        """The texts that the chat template writes before and after the prompt."""
        messages = self._messages(_MARK)
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **self._variables)
        parts = text.split(_MARK)
        if len(parts) != 2:
            raise UsageError(
                "[prompt] the chat template must write a message once but writes it "
                f"{len(parts) - 1} times, so that the prompt cannot be cached. Use "
                "--ignore-chat-template."
            )
        return parts[0], parts[1]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def add_texts(parser: argparse.ArgumentParser, purpose: str, *, is_required: bool = True) -> None:
    """Adds the flags for one text or a file of several; `purpose` such as "to translate"."""
    source = parser.add_mutually_exclusive_group(required=is_required)
    source.add_argument("--text", help=f"text {purpose}; '-' reads standard input")
    add_texts_file(source)


def add_texts_file(group: Any) -> None:
    group.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="text file with a text on each line, or a .jsonl file",
    )


def given_texts(args: argparse.Namespace) -> list[str]:
    """The texts that the flags give."""
    return [given_prompt(args.text)] if args.data is None else read_prompts(args.data)


def opened_as(
    pipelines: Collection[str], args: argparse.Namespace, command: str, task: str
) -> "OpenedModel":
    """Opens a model for some tasks, without its weights.

    Args:
        pipelines: The tasks, as the Hub names them.
        args: Has `model` and `revision`.
        command: The command.
        task: What its models must do.

    Raises:
        UsageError: It is a model for another task.
    """
    from ...hub.checkpoint.checkpoint import open_checkpoint
    from ...hub.checkpoint.load import OpenedModel

    opened = OpenedModel(open_checkpoint(args.model, args.revision))
    planned: Any = opened.model
    if planned.pipeline not in pipelines:
        raise UsageError(
            f"[{command}] 'model' must {task} but '{args.model}' is a model for {planned.purpose}. Use "
            f"'mmfree {planned.command}' for it."
        )
    return opened


@contextmanager
def texts_bar(count: int, unit: str = "text") -> Iterator[Callable[[int], object]]:
    """A progress bar of texts, told how many are done, with errors of arguments in a line each."""
    from ...platform.progress import Progress

    with argument_errors(), Progress("Texts", count, unit, leave=False) as bar:
        yield lambda done: bar.update(done - bar.n)
