"""Holds a text to a JSON schema or to the format of a call.

Whatever llguidance does with what a request brings happens in processes of their own: one compiles a
grammar, and a fork of it follows a text. A grammar that grows, lasts or crashes ends there, and with it
the answer that asked for it.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from ...platform.confinement.policy import COMPILATION, FOLLOWING, GRAMMARS, MB
from ...platform.confinement.process import Branch, ConfinedProcess, LimitError, TimeLimitError
from ..answers import token_bytes
from ..errors import RequestError
from .sources import Source

# nearly every grammar needs less; the others wait apart, so that no other waits for them
_QUICK_SECONDS = 0.1
_MOST_CACHED, _MOST_CACHED_MB = 8, 100
_REFUSALS, _REFUSED_SECONDS = 256, 60.0
_MOST_WAITING = 32
_NONE = -1


class Lanes:
    """The threads that wait for compilations, few at a time.

    Attributes:
        quick: For compilations that have only begun.
        long: For compilations that were not done soon.
        waiting: How many there are. They must not take all rows of a server.
    """

    def __init__(self) -> None:
        self.waiting = 0
        count = max(1, (os.cpu_count() or 1) // 4)
        self.quick = ThreadPoolExecutor(count + 1, "grammar")
        self.long = ThreadPoolExecutor(count, "long-grammar")

    def close(self) -> None:
        """Drops what waits, and waits for what runs."""
        for lane in (self.quick, self.long):
            lane.shutdown(cancel_futures=True)


class Grammars:
    """Makes grammars for one vocabulary.

    Args:
        tokenizer: Has the vocabulary, which is read where it is first needed.
        vocab_size: How many tokens the model has logits for; the tokenizer may have more.
        lanes: Where compilations run.
        check: Called before each; refuses it if the server ends.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, lanes: Lanes, check: Callable[[], None]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lanes = lanes
        self._check = check
        self._process = GRAMMARS.process(first=self._vocabulary)
        self._cached: OrderedDict[str, tuple[Branch, int]] = OrderedDict()
        self._refusals: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def compiled(self, source: Source) -> "Grammar":
        """The grammar of a source. What was compiled or refused lately is known.

        Raises:
            RequestError: The source is wrong or asks for what llguidance does not know, it takes too
                much to compile, or nothing ends a text of the model.
        """
        if not self._ends():
            raise RequestError(
                f"[request] '{source.param}' must go to a model that has a token for the end of a text "
                "but this one has none.",
                param=source.param,
            )
        key = source.key
        # equal ones that come meanwhile wait for the first
        async with self._locks.setdefault(key, asyncio.Lock()):
            compiled = self._known(key, source) or await self._newly_compiled(key, source)
        return Grammar(compiled, self._tokenizer, source.param)

    def close(self) -> None:
        """Ends the process."""
        self._process.close()

    def _known(self, key: str, source: Source) -> Branch | None:
        until, message = self._refusals.get(key, (0.0, ""))
        if time.monotonic() < until:
            raise _refusal(message, source.param)
        compiled, _ = self._cached.get(key, (None, 0))
        if compiled is None or compiled.process_id is None:
            return None
        self._cached.move_to_end(key)
        return compiled

    async def _newly_compiled(self, key: str, source: Source) -> Branch:
        tell = self._tokenizer.encode_continuation
        compilation = _Compilation(self._process, source, self._check, tell)
        if self._lanes.waiting >= _MOST_WAITING:
            raise RequestError(
                f"[server] at most {_MOST_WAITING} schemas must wait to be compiled but so many do. Try "
                "again later.",
                429,
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        self._lanes.waiting += 1
        run = asyncio.get_running_loop().run_in_executor
        try:
            try:
                answer = await run(self._lanes.quick, compilation.run, _QUICK_SECONDS)
            except TimeLimitError:
                answer = await run(self._lanes.long, compilation.run, COMPILATION.seconds)
        except asyncio.CancelledError:
            compilation.cancel()
            raise
        except LimitError as error:
            answer = {"beyond": str(error)}
        finally:
            self._lanes.waiting -= 1
        if "held" not in answer:
            message = _words(answer, source.param)
            _keep(self._refusals, key, (time.monotonic() + _REFUSED_SECONDS, message), _REFUSALS)
            raise _refusal(message, source.param)
        compiled = compilation.branch
        # what is dropped ends with the last of its texts
        _keep(self._cached, key, (compiled, answer["held"]), _MOST_CACHED)
        while sum(nbytes for _, nbytes in self._cached.values()) > _MOST_CACHED_MB * MB:
            self._cached.popitem(last=False)
        return compiled

    def _ends(self) -> list[int]:
        """The tokens that end a text and that the model can write."""
        return sorted(token for token in self._tokenizer.eos_token_ids if token < self._vocab_size)

    def _vocabulary(self) -> Any:
        """The tokens that have both a text and a logit."""
        tokenizer = self._tokenizer
        count = min(tokenizer.vocab_size, self._vocab_size)
        tokens = [token_bytes(tokenizer, number) or b"" for number in range(count)]
        special = sorted(token for token in tokenizer.special_tokens.values() if token < count)
        first = tokenizer.bos_token_id
        first = first if first is not None and first < count else None
        return "vocabulary", (tokens, special, first, self._ends())


def _keep(cache: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > most:
        cache.popitem(last=False)


class _Compilation:
    """One grammar on its way; it may be tried again with more time.

    Args:
        process: Knows the vocabulary.
        source: What is compiled.
        check: Refuses it if the server ends.
        tell: Cuts a text into tokens.

    Attributes:
        branch: The process that compiles it.
    """

    def __init__(
        self,
        process: ConfinedProcess,
        source: Source,
        check: Callable[[], None],
        tell: Callable[[str], list[int]],
    ):
        self._process = process
        self._source = source
        self._check = check
        self._tell = tell
        self._is_left = False
        self.branch: Branch

    def run(self, seconds: float) -> dict[str, Any]:
        """The compiler's answer; see `grammar_server`.

        Raises:
            LimitError: It takes too long or too much memory, crashes, or nobody waits for it.
            RequestError: It cannot begin.
        """
        self._check()
        try:
            self.branch = self._process.branch(COMPILATION.memory_bytes)
        except LimitError as error:
            raise RequestError(
                f"[server] a grammar must be compiled in a process of its own, but none can be started: "
                f"{error}. Try again later.",
                503,
                code="server_overloaded",
                retry_after_s=1,
            ) from error
        if self._is_left:
            raise LimitError("nobody waits for it")
        request = ("grammar", (self._source.kind, self._source.text))
        return self.branch.ask(request, seconds, self._tell)

    def cancel(self) -> None:
        """Ends it, since nobody waits for it any more."""
        self._is_left = True
        if hasattr(self, "branch"):
            self.branch.interrupt()


def _words(answer: Mapping[str, str], param: str) -> str:
    """Why a grammar is refused."""
    if "beyond" in answer:
        return (
            f"[request] '{param}' must have a schema that compiles within {COMPILATION.seconds:g} s and "
            f"{COMPILATION.memory_bytes // MB} MB but got one that does not: {answer['beyond']}. Give "
            "it fewer or simpler patterns, alternatives and definitions."
        )
    reason = " ".join(answer["refused"].split())
    return (
        f"[request] '{param}' must have a schema that can be followed but got one that cannot: "
        f"{reason:.300}."
    )


def _refusal(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_json_schema")


class Grammar:
    """Leaves only tokens with which the text can still become what a grammar describes.

    It is a `LogitsProcessor` for one row, whose text is followed by a process of its own.

    Args:
        compiled: The process that holds the grammar before the first token.
        tokenizer: The model's tokenizer. Tokens beyond it, for which there are logits but no text, are
            never chosen.
        param: The parameter that asked for it.
    """

    def __init__(self, compiled: Branch, tokenizer: Any, param: str):
        self._compiled = compiled
        self._tokenizer = tokenizer
        self._param = param
        self._text: Branch | None = None

    def copy(self) -> "Grammar":
        """The same for another text."""
        return Grammar(self._compiled, self._tokenizer, self._param)

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> mx.array:
        self._text = None
        return mx.full((tokens.shape[0],), _NONE, dtype=mx.int32)

    def __call__(self, logits: mx.array, state: mx.array) -> mx.array:
        chosen = cast(int, state.item())
        answer = self._answer(None if chosen == _NONE else chosen)
        allowed = np.zeros(logits.shape[-1], bool)
        if answer["allowed"] is None:
            ends = self._tokenizer.eos_token_ids
            allowed[[token for token in ends if token < len(allowed)]] = True
        else:
            bits = np.frombuffer(bytes.fromhex(answer["allowed"]), np.uint8)
            size = min(self._tokenizer.vocab_size, len(allowed))
            allowed[:size] = np.unpackbits(bits, count=size, bitorder="little")
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def update(self, state: mx.array, tokens: mx.array) -> mx.array:
        return tokens.astype(mx.int32)

    def _answer(self, token: int | None) -> dict[str, Any]:
        try:
            if self._text is None:
                self._text = self._compiled.branch(FOLLOWING.memory_bytes)
            encode = self._tokenizer.encode_continuation
            answer = self._text.ask(("allowed", token), FOLLOWING.seconds, encode)
        except LimitError as error:
            answer = {"refused": f"while the text was written, {error}"}
        if "refused" in answer:
            raise _refusal(_words(answer, self._param), self._param)
        return answer
