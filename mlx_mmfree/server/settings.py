"""The settings of a server: its models, its limits, and its defaults for requests."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..generation.suggested import Suggestion, suggested_sampling
from ..models import Decoder
from ..tokenizer.sampling_defaults import USUAL
from .errors import RequestError

if TYPE_CHECKING:
    from ..generation.sessions import Sessions


_log = logging.getLogger(__name__)

MAX_CHOICES = 128
"""Texts that one request may ask for: prompts times `n`."""
MAX_PROBABILITIES = 4_000_000
"""Probabilities that one answer may show: texts times tokens times one more than `logprobs`."""
MAX_EMBEDDED_TEXTS, MAX_EMBEDDED_TOKENS = 2_048, 450_000
"""Texts of one request for embeddings and their tokens together, as many as OpenAI takes."""
BODY_SECONDS = 60.0
"""Time in which the body of a request must have come."""
LARGE_BODY_BYTES = 65_536
"""Larger bodies are worked out one after another, and given up where all together take too much."""
BODIES_IN_MEMORY = 8
"""How many bodies of the largest size may be in memory."""
HEAD_SECONDS = 20.0
"""Time in which the request line and the headers of a request must have come."""
QUIET_SECONDS = 10.0
"""Time after which a stream that has nothing to tell yet sends a sign of life."""
UNREAD_SECONDS = 60.0
"""Time after which a client that reads nothing of its answer is left."""
LINGER_SECONDS = 2.0
"""Time in which a client may read why its connection ends."""
MOST_CONNECTIONS = 1024
"""Connections that may be open at the same time."""
MOST_ADDRESS_BYTES, MOST_HEAD_BYTES = 8_192, 65_536
"""The largest address of a request, and the largest headers in all."""
MOST_HEADERS = 100
"""Headers that a request may have."""
MOST_PIPELINED = 16
"""Requests that may be sent on a connection before the first of them is answered."""


_USUAL: Mapping[str, float] = {**USUAL, "temp": 1.0}
"""How tokens are drawn where neither a request nor the server nor the model says."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn where a request does not say.

    Attributes:
        values: Arguments of `make_sampler` and `make_processors`. Where they say nothing, the model's
            files or makers do.
        seed: The seed; `None` draws another one for each request.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None

    def values_for(self, body: Any, suggestion: Suggestion) -> dict[str, float]:
        """All arguments, for a request whose own values come first."""
        asked = {name: getattr(body, _IN_REQUESTS.get(name, name)) for name in _USUAL}
        asked = {name: value for name, value in asked.items() if value is not None}
        given = {**self.values, **asked}
        return {**_USUAL, **suggestion.without(given), **given}


_IN_REQUESTS = {"temp": "temperature"}


@dataclass(frozen=True)
class Settings:
    """The limits and defaults of a server.

    Attributes:
        api_key: What requests must bring; `None` for nothing.
        hosts: Names under which the server may be called, beside numeric addresses.
        origins: Origins of pages that may call it; `"*"` for all.
        max_rows: Texts that are written at the same time.
        max_waiting: Texts that may wait for their turn.
        max_body_bytes: The largest body of a request.
        max_context: The most tokens of a prompt and its answer together.
        max_tokens: The most tokens of an answer where a request does not say.
        prefill_step_size: Tokens of a prompt that are read between two steps of other texts.
        ngram_drafts: Whether texts propose what followed the same tokens earlier in them.
        num_draft_tokens: Tokens that are proposed at a time.
        timeout_s: The longest time that a request may take.
        grace_s: How long answers may go on once the server was asked to end.
        sampling: How tokens are drawn where a request does not say.
        template_variables: Further names for the chat template.
        reasoning_budget: The most tokens of reasoning; `None`: no limit but the answer's.
        extra_end: Further tokens that end a text.
        response_folder: Where responses are kept; `None` keeps them in memory.
        kept_responses: How many are kept at most.
        kept_response_bytes: How many bytes they have at most.
        kept_response_s: How long one is kept that nobody uses.
    """

    api_key: str | None = None
    hosts: frozenset[str] = frozenset()
    origins: tuple[str, ...] = ()
    max_rows: int = 32
    max_waiting: int = 128
    max_body_bytes: int = 8_000_000
    max_context: int = 32_768
    max_tokens: int = 4096
    prefill_step_size: int = 512
    ngram_drafts: bool = False
    num_draft_tokens: int = 3
    timeout_s: float = 600.0
    grace_s: float = 20.0
    sampling: Sampling = field(default_factory=Sampling)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_budget: int | None = None
    extra_end: tuple[str, ...] = ()
    response_folder: Path | None = None
    kept_responses: int = 1000
    kept_response_bytes: int = 100_000_000
    kept_response_s: float = 30 * 86_400.0


@dataclass(frozen=True)
class ServedModel:
    """A model under its name.

    Attributes:
        name: What requests call it.
        model: The model, with its adapter.
        tokenizer: Belongs to it.
        sessions: What it has read and keeps; `None` if it keeps nothing.
        draft: A smaller model that proposes tokens; `None`: there is none.
        aliases: Further names under which requests may ask for it.
    """

    name: str
    model: Decoder
    tokenizer: Any
    sessions: "Sessions | None" = None
    draft: Decoder | None = None
    aliases: tuple[str, ...] = ()

    def suggested(self, thinks: bool) -> Suggestion:
        """How its texts are sampled by its files or its makers, with or without reasoning.

        Raises:
            CheckpointError: A value of the files has the wrong type or range.
        """
        return self._suggested[thinks]

    def defaults(self, settings: "Settings") -> dict[str, Any]:
        """The numbers that count where a request says nothing, by their names in requests.

        Raises:
            CheckpointError: A value of the files has the wrong type or range.
        """
        thinks = settings.template_variables.get("enable_thinking") is not False
        given = settings.sampling.values
        values = {**_USUAL, **self.suggested(thinks).without(given), **given}
        numbers: dict[str, Any] = {
            _IN_REQUESTS.get(name, name): value for name, value in values.items()
        }
        numbers |= {"max_tokens": settings.max_tokens}
        for name, value in (
            ("seed", settings.sampling.seed),
            ("reasoning_budget", settings.reasoning_budget),
        ):
            numbers |= {} if value is None else {name: value}
        return numbers

    @cached_property
    def _suggested(self) -> dict[bool, Suggestion]:
        folder = self.tokenizer.folder
        return {
            thinks: suggested_sampling(self.model, folder, thinks=thinks)
            for thinks in (False, True)
        }

    @cached_property
    def kind(self) -> str:
        """The use of a model: `"chat"`, `"base"` to continue texts, `"embedding"`."""
        if self.model.purpose != Decoder.purpose:
            return "embedding"
        return "chat" if self.tokenizer.has_chat_template else "base"


_FOREIGN = ("claude-", "gpt-")
"""How names begin that agents send of their own accord, as for their sub-agents."""
_MOST_FOREIGN = 32


class Catalogue:
    """The models of a server by name; the first one answers requests that name none.

    Args:
        models: At least one, each with a name of its own.
    """

    def __init__(self, models: Sequence[ServedModel]):
        self._models = {served.name: served for served in models}
        self._aliases = {alias: served for served in models for alias in served.aliases}
        self._first = models[0]
        # adapters are named after the model that they change
        own = f"{self._first.name}:"
        self._is_alone = all(name.startswith(own) for name in list(self._models)[1:])
        self._foreign: set[str] = set()

    def __iter__(self) -> Any:
        return iter(self._models.values())

    def find(self, name: str | None, *, writes: bool = False) -> ServedModel:
        """The model of a name. Names of other vendors' models go to the only model that there is.

        Args:
            name: The name; `None`: the first model.
            writes: Whether it must write texts.

        Raises:
            RequestError: There is none.
        """
        found = self._first if name is None else self._models.get(name) or self._aliases.get(name)
        if found is None and name is not None and self._is_alone and name.startswith(_FOREIGN):
            found = self._instead_of(name)
        if found is None:
            known = ", ".join(map(repr, self._models))
            raise RequestError(
                f"[request] 'model' must be one of {known} but got {name!r:.100}.",
                404,
                param="model",
                code="model_not_found",
            )
        if writes and found.kind == "embedding":
            raise RequestError(
                f"[request] 'model' must write texts but {found.name!r:.100} is for "
                f"{found.model.purpose}. Ask /v1/embeddings.",
                param="model",
                code="unsupported_model",
            )
        return found

    def _instead_of(self, name: str) -> ServedModel:
        """The only model; the log says so, once for each of the names that agents usually send."""
        if name not in self._foreign and len(self._foreign) < _MOST_FOREIGN:
            self._foreign.add(name)
            _log.info("Requests for %.100r go to %s, the only model.", name, self._first.name)
        return self._first
