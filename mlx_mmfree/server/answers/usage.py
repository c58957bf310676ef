"""How many tokens a request took."""

from dataclasses import dataclass, field
from typing import Any

from ...generation.scheduling import Event


@dataclass
class Usage:
    """Tokens that were read and written for one request.

    Attributes:
        texts_a_prompt: How many texts each prompt gets; the prompt counts once.
        completion_tokens: Tokens written.
    """

    texts_a_prompt: int
    completion_tokens: int = 0
    _prompts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, index: int, event: Event) -> None:
        """Counts a step of a text, by the number of the text."""
        self.completion_tokens += event.token is not None
        if index % self.texts_a_prompt == 0:
            self._prompts[index] = (event.prompt_tokens, event.cached_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(count for count, _ in self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        """Tokens of them that were not read again."""
        return sum(cached for _, cached in self._prompts.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
