"""Compiles a grammar and follows a text inside the confined process, by the package llguidance.

The process itself knows the vocabulary of a model. Its branches compile one grammar each, and their
branches follow one text each.
"""

import time
from typing import Any

import llguidance

from ...platform.confinement.loop import ask_back
from ...platform.resident_memory import peak_resident_bytes

# what may stand between the parts of JSON; without a bound a model can write spaces for ever
_WHITESPACE = r"( |\n {0,12})?"
_MOST_ITEMS, _MOST_FUEL = 20_000, 500_000
# what must follow is cut into tokens as the tokenizer does; the first of them is all that is needed
_MOST_FORCED = 500
_TEXT_SECONDS, _TOKEN_SECONDS = 0.25, 0.003


class _Vocabulary(llguidance.TokenizerWrapper):
    """The tokens as llguidance asks for them.

    Args:
        tokens: The bytes of every token.
        special: The tokens that no text spells.
        bos: The BOS token.
        eos: The tokens that end a text.
    """

    def __init__(self, tokens: list[bytes], special: list[int], bos: int | None, eos: list[int]):
        self.tokens = tokens
        self.special_token_ids = special
        self.bos_token_id = bos
        self.eos_token_id = eos[0]
        self.is_tokenizer_wrapper = True
        self.read = llguidance.LLTokenizer(self, eos_token=eos)
        # they have been read
        self.tokens = []

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = ask_back(text[:_MOST_FORCED])
        return ids


class _Text:
    """A text on its way, or none yet, and what it must follow.

    Attributes:
        matcher: Where the text stands.
        tokens: How many it has.
    """

    def __init__(self, matcher: llguidance.LLMatcher):
        self.matcher = matcher
        self.tokens = 0

    def allowed(self, token: int | None) -> dict[str, Any]:
        """The tokens that may follow another one, or begin; see `handle`."""
        matcher = self.matcher
        self.tokens += 1
        # once the text has ended, what is written is not shown
        if token is not None and not matcher.is_stopped():
            matcher.consume_token(token)
        if matcher.is_stopped() and not matcher.is_error():
            return {"allowed": None}
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            return {"refused": f"the text has no way on; {_reason(matcher)}"}
        if time.process_time() > _TEXT_SECONDS + _TOKEN_SECONDS * self.tokens:
            return {"refused": "to find the tokens that may follow takes too long"}
        return {"allowed": mask.hex()}


_vocabularies: list[_Vocabulary] = []
_texts: list[_Text] = []


def handle(request: tuple[str, Any]) -> dict[str, Any]:
    """Does one of three things, the later ones in branches.

    - `("vocabulary", arguments)` reads a vocabulary.
    - `("grammar", (kind, source))` compiles a schema (`json`) or rules (`lark`): `held`, the bytes
      that it takes, or `refused`, why not.
    - `("allowed", token)` lets the text go on with a token, `None` at its start: `allowed`, a bit
      for each token that may follow in hexadecimal digits, `None` if only the end may; or `refused`.
    """
    name, value = request
    if name == "vocabulary":
        _vocabularies[:] = [_Vocabulary(*value)]
        return {}
    if name == "grammar":
        return _compiled(*value)
    return _texts[0].allowed(value)


def _compiled(kind: str, source: str) -> dict[str, Any]:
    before = peak_resident_bytes()
    try:
        if kind == "json":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                source, overrides={"whitespace_pattern": _WHITESPACE}
            )
        else:
            grammar = llguidance.LLMatcher.grammar_from_lark(source)
    except ValueError as error:
        return {"refused": str(error)}
    limits = llguidance.LLParserLimits(
        step_max_items=_MOST_ITEMS,
        initial_lexer_fuel=_MOST_FUEL,
        step_lexer_fuel=_MOST_FUEL,
        verbose_errors=False,
    )
    matcher = llguidance.LLMatcher(_vocabularies[0].read, grammar, log_level=0, limits=limits)
    # some faults show only where a first token is asked for
    if matcher.is_error() or not any(matcher.compute_bitmask()):
        return {"refused": _reason(matcher) or "it allows no text"}
    _texts[:] = [_Text(matcher)]
    return {"held": peak_resident_bytes() - before}


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The error, without what llguidance shows of its inside."""
    return matcher.get_error().partition("\n<")[0]
