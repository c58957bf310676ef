"""Turns prompts into what a model was taught to read, with its chat template where it has one."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import UsageError
from .flags import json_object, positive


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
    group.add_argument(
        "--chat-template-config",
        type=json_object,
        help="JSON object with further variables of the chat template",
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
        help="largest number of tokens to write (%(default)s)",
    )
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
        prefill_response: The beginning of the answer.
        ignore_chat_template: Whether to read the bare prompt even if there is a chat template.
        variables: Further variables of the chat template.

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
    ):
        self._tokenizer = tokenizer
        self._uses_template = tokenizer.has_chat_template and not ignore_chat_template
        if system_prompt is not None and not self._uses_template:
            raise UsageError(
                "[prompt] 'system_prompt' must be left out where no chat template is used. Write "
                "the instruction into the prompt."
            )
        self._before = [] if system_prompt is None else [_message("system", system_prompt)]
        self._prefill = prefill_response
        self._variables = dict(variables or {})

    def __call__(self, prompt: str) -> str | Sequence[int]:
        """The text or the token ids to give to `generate`."""
        if not prompt or not self._uses_template:
            return prompt and prompt + self._prefill
        messages = [*self._before, _message("user", prompt)]
        ids: list[int] = self._tokenizer.apply_chat_template(messages, **self._variables)
        return [*ids, *self._plain(self._prefill)]

    def opening(self, prompt: str) -> list[int]:
        """The token ids of a prompt that will be followed by more text of the same message."""
        from ...generation.prompt_ids import encode_once_begun

        if not self._uses_template:
            ids: list[int] = self._tokenizer.encode_parts([prompt, ""])[0]
            return ids
        before, _ = self._around_message()
        begun = encode_once_begun(self._tokenizer, before, parse_special=True)
        return [*begun, *self._plain(prompt)]

    def continuation(self, prompt: str) -> list[int]:
        """The token ids from the end of `opening` up to the beginning of the answer."""
        if not self._uses_template:
            return self._plain(prompt + self._prefill)
        _, after = self._around_message()
        return [*self._plain(prompt), *self._parsed(after), *self._plain(self._prefill)]

    def _around_message(self) -> tuple[str, str]:
        """The texts that the chat template writes before and after the prompt."""
        messages = [*self._before, _message("user", _MARK)]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **self._variables)
        parts = text.split(_MARK)
        if len(parts) != 2:
            raise UsageError(
                "[prompt] the chat template must write a message once but writes it "
                f"{len(parts) - 1} times, so that the prompt cannot be cached. Use "
                "--ignore-chat-template."
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
