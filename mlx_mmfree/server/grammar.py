"""Holds a text to a JSON schema or to the form of a call, by the package llguidance."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import llguidance
import llguidance.numpy
import mlx.core as mx
import numpy as np

from .errors import RequestError
from .served import ServedModel
from .token_bytes import token_bytes
from .tools.families import CallForm

_NONE = -1
# what may stand between the parts of JSON; without a bound a model can write spaces for ever
_WHITESPACE = r"( |\n {0,12})?"
_MOST_ITEMS, _MOST_FUEL = 20_000, 500_000


class _Vocabulary:
    """The tokens as llguidance asks for them.

    Attributes:
        eos_token_id, bos_token_id: The ends of texts.
        tokens: The bytes of every token.
        special_token_ids: Those that no text spells.
    """

    def __init__(self, tokenizer: Any, size: int):
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_tokens.values())
        self.tokens = [token_bytes(tokenizer, number) or b"" for number in range(size)]

    def __call__(self, text: bytes | str) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8")
        ids: list[int] = self._tokenizer.encode_continuation(text)
        return ids


class Grammars:
    """Makes grammars for the vocabulary of one model.

    Args:
        served: The model. Its vocabulary is read where it is first needed.
    """

    def __init__(self, served: ServedModel):
        self._served = served
        self._tokenizer: llguidance.LLTokenizer | None = None

    def json(self, schema: dict[str, Any] | bool) -> "Grammar":
        """What lets a text be nothing but JSON that follows a schema.

        Raises:
            RequestError: The schema is wrong or asks for what llguidance does not know, or nothing
                ends a text of the model.
        """
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_pattern": _WHITESPACE}
            )
        except ValueError as error:
            raise _refused(str(error), "response_format") from error
        return self._made(grammar, "response_format")

    def call(self, form: CallForm, functions: Mapping[str, dict[str, Any]]) -> "Grammar":
        """What lets a text be nothing but a call of one of some functions.

        Args:
            form: How the model writes calls.
            functions: The schemas of their arguments by name.

        Raises:
            RequestError: As for `json`.
        """
        calls, rules = [], []
        for number, (name, schema) in enumerate(functions.items()):
            # each schema by itself, since its references begin at its own root
            opening = f'{{"name": {json.dumps(name)}, "{form.arguments}": '
            calls.append(f"call_{number}")
            rules.append(f'call_{number}: {json.dumps(opening)} arguments_{number} "}}"')
            rules.append(f"arguments_{number}: %json {json.dumps({'type': 'object'} | schema)}")
        parts = [json.dumps(form.begin), f"({' | '.join(calls)})", json.dumps(form.end)]
        start = "start: " + " ".join(part for part in parts if part != '""')
        grammar = llguidance.LLMatcher.grammar_from_lark("\n".join([start, *rules]))
        return self._made(grammar, "tools")

    def _made(self, grammar: str, param: str) -> "Grammar":
        tokenizer = self._served.tokenizer
        if not tokenizer.eos_token_ids:
            raise RequestError(
                f"[request] '{param}' must go to a model that has a token for the end of a text but "
                f"{self._served.name!r} has none.",
                param=param,
            )
        if self._tokenizer is None:
            vocabulary = _Vocabulary(tokenizer, tokenizer.vocab_size)
            self._tokenizer = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(vocabulary), eos_token=sorted(tokenizer.eos_token_ids)
            )
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        # some faults show only where a first token is asked for
        size = tokenizer.vocab_size
        if not matcher.is_error() and not _allowed(matcher.deep_copy(), size).any():
            raise _refused("it allows no text", param)
        if matcher.is_error():
            raise _refused(matcher.get_error(), param)
        return Grammar(matcher, size, sorted(tokenizer.eos_token_ids), param)


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        step_max_items=_MOST_ITEMS, initial_lexer_fuel=_MOST_FUEL, step_lexer_fuel=_MOST_FUEL
    )


def _refused(reason: str, param: str) -> RequestError:
    # behind this mark llguidance shows what is inside it
    reason = " ".join(reason.partition("<state>")[0].split())
    return RequestError(
        f"[request] '{param}' must have a schema that can be followed but got one that cannot: "
        f"{reason:.300}.",
        param=param,
        code="invalid_json_schema",
    )


def _allowed(matcher: llguidance.LLMatcher, size: int) -> np.ndarray:
    """Which of `size` tokens may follow, booleans; none where the grammar has no way on."""
    mask = np.zeros((1, (size + 31) // 32), np.int32)
    llguidance.numpy.fill_next_token_bitmask(matcher, mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return bits[:size].astype(bool) & (not matcher.is_error())


class Grammar:
    """Leaves only tokens with which the text can still become what a grammar describes.

    It is a `LogitsProcessor` for one row. What the row has written lies in the matcher, so that it
    serves one text.

    Args:
        matcher: The grammar before the first token.
        size: How many tokens it knows. Those beyond, for which there are logits but no text, are never
            chosen.
        end: Tokens that end the text.
        param: The parameter that asked for it.
    """

    def __init__(self, matcher: llguidance.LLMatcher, size: int, end: Sequence[int], param: str):
        self._first = matcher
        self._matcher = matcher
        self._size = size
        self._end = list(end)
        self._param = param

    def copy(self) -> "Grammar":
        """The same for another text."""
        return Grammar(self._first.deep_copy(), self._size, self._end, self._param)

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> mx.array:
        self._matcher = self._first.deep_copy()
        return mx.full((tokens.shape[0],), _NONE, dtype=mx.int32)

    def __call__(self, logits: mx.array, state: mx.array) -> mx.array:
        chosen = cast(int, state.item())
        # once the text has ended, what is written is not shown
        if chosen != _NONE and not self._matcher.is_stopped():
            self._matcher.consume_token(chosen)
        allowed = np.zeros(logits.shape[-1], bool)
        if self._matcher.is_stopped() and not self._matcher.is_error():
            allowed[self._end] = True
        else:
            allowed[: self._size] = _allowed(self._matcher, self._size)
        if not allowed.any():
            reason = f"the text has no way on; {self._matcher.get_error()}"
            raise _refused(reason, self._param)
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def update(self, state: mx.array, tokens: mx.array) -> mx.array:
        return tokens.astype(mx.int32)
