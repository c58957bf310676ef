"""Answers of `/v1/completions`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...generation.scheduling import Event, Request
from .answer import Answer, Choice
from .logprobs import ShownTokens


@dataclass
class _Text:
    detokenizer: Any = None
    parts: list[str] = field(default_factory=list)
    size: int = 0
    tokens: dict[str, list[Any]] = field(
        default_factory=lambda: {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
    )
    finish_reason: str | None = None


class CompletionAnswer(Answer):
    """Texts that continue prompts.

    Args:
        model: The name of the model.
        texts: The texts that were asked for.
        texts_a_prompt: How many of them each prompt gets.
        shown: Writes tokens with their probabilities; `None` shows none.
    """

    def __init__(
        self,
        model: str,
        texts: Sequence[Request],
        texts_a_prompt: int,
        shown: ShownTokens | None,
    ):
        kind = "text_completion"
        super().__init__("cmpl", kind, kind, model, len(texts), texts_a_prompt)
        self._shown = shown
        self._all = [_Text(shown and shown.detokenizer(text.tokens)) for text in texts]

    def _piece(self, index: int, events: Sequence[Event]) -> Choice | None:
        text = self._all[index]
        added = "".join(event.text for event in events)
        text.parts.append(added)
        text.finish_reason = events[-1].finish_reason
        tokens = self._tokens(text, events)
        if not added and text.finish_reason is None and not tokens:
            return None
        return _choice(index, added, tokens or None, text.finish_reason)

    def _tokens(self, text: _Text, events: Sequence[Event]) -> dict[str, list[Any]]:
        """The probabilities of some steps, by what they say."""
        if self._shown is None:
            return {}
        added: dict[str, list[Any]] = {name: [] for name in text.tokens}
        for token, likely in self._shown.steps(events):
            name = self._shown.text(token)
            characters = text.detokenizer.add(token) if name else ""
            if not text.size and name == f" {characters}":
                # the space before a text that begins anew is not shown
                name = characters
            added["tokens"].append(name)
            added["token_logprobs"].append(self._shown.number(likely.logprob))
            added["top_logprobs"].append(
                {
                    self._shown.text(t): self._shown.number(value)
                    for t, value in self._shown.likely(likely)
                }
            )
            added["text_offset"].append(text.size)
            text.size += len(characters)
        for name, values in added.items():
            text.tokens[name] += values
        return added if added["tokens"] else {}

    def _choice(self, index: int) -> Choice:
        text = self._all[index]
        tokens = None if self._shown is None else text.tokens
        return _choice(index, "".join(text.parts), tokens, text.finish_reason)


def _choice(index: int, text: str, tokens: Any, finish_reason: str | None) -> Choice:
    return {"index": index, "text": text, "logprobs": tokens, "finish_reason": finish_reason}
