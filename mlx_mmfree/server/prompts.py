"""Token ids of what requests hold: prompts and conversations."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import MMFreeError, shown_path
from ..generation.decode import prompt_tokens
from .errors import RequestError
from .schemas.chat import ChatRequest
from .served import ServedModel
from .settings import Settings


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it.

    Attributes:
        tokens: Its ids.
        marks: Numbers of its first tokens after which its state is worth keeping.
    """

    tokens: list[int]
    marks: tuple[int, ...] = ()


def most_tokens(served: ServedModel, settings: Settings) -> int:
    """The most tokens of a prompt and its answer together."""
    return min(settings.max_context, served.model.max_length or settings.max_context)


def check_size(
    served: ServedModel, texts: Sequence[str | Sequence[int]], most: int, what: str
) -> None:
    """Refuses texts that have too many tokens together, without encoding them.

    Raises:
        RequestError: They have, whatever their tokens are.
    """
    if sum(map(len, texts)) <= most:
        return
    least = served.tokenizer.least_tokens
    count = sum(least(text) if isinstance(text, str) else len(text) for text in texts)
    if count > most:
        words = "at least " if any(isinstance(text, str) for text in texts) else ""
        raise RequestError(
            f"[request] {what} must have at most {most:,} tokens but has {words}{count:,}.",
            413,
            code="context_length_exceeded",
        )


def checked_tokens(served: ServedModel, text: str | Sequence[int], param: str) -> list[int]:
    """The ids of a text.

    Raises:
        RequestError: An id is not in the vocabulary, or the text cannot be encoded.
    """
    try:
        return prompt_tokens(served.tokenizer, text, served.model.vocab_size)
    except (ValueError, MMFreeError) as error:
        reason = _of_request(served, error)
        raise RequestError(f"[request] '{param}' cannot be read: {reason}", param=param) from error


def chat_prompt(served: ServedModel, body: ChatRequest, settings: Settings) -> Prompt:
    """A conversation up to where its next answer begins.

    Args:
        served: The model, with a chat template.
        body: The request.
        settings: Of the server.

    Raises:
        RequestError: The model has no template, its template refuses the conversation, or that is too
            long.
    """
    tokenizer = served.tokenizer
    if not tokenizer.has_chat_template:
        raise RequestError(
            f"[request] 'messages' must go to a model with a chat template but {served.name!r} has "
            "none: it is a base model, which was not taught to answer. Send a 'prompt' to "
            "/v1/completions.",
            param="messages",
            code="no_chat_template",
        )
    messages = [message.for_template() for message in body.messages]
    names = dict(settings.template_variables) | body.chat_template_kwargs
    if body.offered:
        names["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    try:
        chat = tokenizer.render_chat(messages, **names)
        most = most_tokens(served, settings)
        check_size(served, [chat.text], most, "the conversation with its answer")
        tokens = chat.ids()
        checked = prompt_tokens(tokenizer, tokens, served.model.vocab_size)
    except RequestError:
        raise
    except (ValueError, MMFreeError) as error:
        raise RequestError(_of_request(served, error), param="messages") from error
    return Prompt(checked, _marks(served, messages, names, chat, checked))


def _marks(
    served: ServedModel,
    messages: list[dict[str, Any]],
    names: dict[str, Any],
    chat: Any,
    tokens: list[int],
) -> tuple[int, ...]:
    """After the system's message, which others may share, and after the last message."""
    marks = set()
    # a template may refuse a part of the conversation
    with suppress(MMFreeError):
        asked = served.tokenizer.render_chat(messages, add_generation_prompt=False, **names)
        if chat.text.startswith(asked.text):
            marks.add(len(tokens) - len(chat.ids_after(len(asked.text))))
    if messages[0]["role"] == "system" and len(messages) > 1:
        with suppress(MMFreeError):
            first = served.tokenizer.render_chat(messages[:1], add_generation_prompt=False, **names)
            ids = first.ids()
            if tokens[: len(ids)] == ids:
                marks.add(len(ids))
    return tuple(sorted(mark for mark in marks if 0 < mark < len(tokens)))


def _of_request(served: ServedModel, error: Exception) -> str:
    """The words of an error, without the folder that the model lies in."""
    return str(error).replace(shown_path(str(served.tokenizer.folder)), served.name)
