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
    ):
        self._tokenizer = tokenizer
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
        ids: list[int] = self._tokenizer.apply_chat_template(messages, **self._variables)
        return [*ids, *self._tokenizer.encode_continuation(self._prefill)]

    def opening(self, prompt: str) -> list[int]:
        """The token ids of a prompt that will be followed by more text of the same message."""
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
        """The token ids from the end of `opening` up to the beginning of the answer."""
        encode = self._tokenizer.encode_continuation
        if not self.uses_template:
            ids: list[int] = encode(prompt + self._prefill)
            return ids
        _, after = self._around_message()
        return [*encode(prompt), *encode(after, parse_special=True), *encode(self._prefill)]

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
