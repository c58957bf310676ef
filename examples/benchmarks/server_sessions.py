"""Measurements without HTTP: the rate of the scheduler, which no server exceeds, and parked sessions."""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
from random_models import random_model
from server_clients import prompt

from mlx_mmfree.generation.reader import prefill
from mlx_mmfree.generation.scheduling import Request, Scheduler
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.generation.states import arrays_by_path
from mlx_mmfree.hub import load
from mlx_mmfree.models import Decoder
from mlx_mmfree.platform.allocator import return_freed_memory
from mlx_mmfree.platform.device import system_memory_bytes
from mlx_mmfree.platform.resident_memory import resident_memory
from mlx_mmfree.tokenizer.tokenizer import Tokenizer

_SESSION_BYTES = 10**9
"""The default of a server."""


def write_answers(
    model: str,
    warm_up: Sequence[str],
    clients: Sequence[Sequence[str]],
    tokens: int,
    keeps_sessions: bool,
) -> dict[str, Any]:
    """Reads and writes what the clients of a server would ask for.

    Args:
        model: The checkpoint.
        warm_up: Prompts that come before and do not count.
        clients: The prompts of each client, one after the other; all clients at the same time.
        tokens: Length of each answer.
        keeps_sessions: Whether states are kept, as a server does.

    Returns:
        The number of `tokens` written, and the `seconds` that they took.
    """
    loaded, tokenizer = load(model)
    sessions = Sessions(loaded, memory_bytes=_SESSION_BYTES) if keeps_sessions else None
    scheduler = Scheduler(loaded, tokenizer, max_rows=len(clients), sessions=sessions)

    def write(asked: Sequence[Sequence[str]]) -> int:
        waiting = [
            [Request(tokenizer.encode(prompt), max_tokens=tokens) for prompt in reversed(prompts)]
            for prompts in asked
        ]
        clients_by_request = {scheduler.submit(each.pop()): each for each in waiting}
        written = 0
        while scheduler.has_work:
            for event in scheduler.step():
                if event.error is not None:
                    raise event.error
                written += event.token is not None
                if event.finish_reason is not None:
                    rest = clients_by_request.pop(event.request)
                    if rest:
                        clients_by_request[scheduler.submit(rest.pop())] = rest
        return written

    write([warm_up])
    began = time.perf_counter()
    written = write(clients)
    return {"tokens": written, "seconds": time.perf_counter() - began}


_MEMORY_BYTES = 2**40


def park(
    model: str | None,
    config: Mapping[str, Any] | None,
    parked: int,
    tokens: int,
    new_tokens: int,
    resumed: int,
) -> dict[str, Any]:
    """Parks sessions of one length and goes on with some of them.

    A text is read once. The others differ from it in their first token, and keep copies of its state,
    which take as much.

    Args:
        model: A checkpoint, or `None`.
        config: The configuration of a float32 model of random weights, if there is no checkpoint.
        parked: How many sessions are kept; fewer where they would take over a quarter of the memory.
        tokens: How many tokens each has read.
        new_tokens: How many more are sent when it is resumed.
        resumed: How many sessions are resumed.

    Returns:
        How many `sessions` were kept, the `bytes` that they count, the `resident_bytes` by which the
        process has grown (`None` where the system does not tell), and the median seconds of a
        resumption: to `restore` a state from memory, to `read` the new tokens, and to `tokenize` the
        whole text (`None` without a checkpoint).
    """
    built, tokenizer = load(model) if model else (random_model(config or {}, mx.float32), None)
    text = [token % built.vocab_size for token in range(tokens)]
    state = prefill(built, mx.array([text]))
    state_bytes = sum(array.nbytes for array in arrays_by_path(state).values())
    parked = max(1, min(parked, system_memory_bytes() // 4 // state_bytes))
    sessions = Sessions(built, memory_bytes=_MEMORY_BYTES)
    # what reading the text has freed would hide what the sessions take
    mx.clear_cache()
    return_freed_memory()
    before = resident_memory()
    for first in range(parked):
        sessions.keep([*_first(first, built.vocab_size), *text[2:]], state)
    after = resident_memory()
    added = [token % built.vocab_size for token in range(new_tokens)]
    restored, read = [], []
    for number in range(resumed):
        first = number * parked // resumed
        asked = [*_first(first, built.vocab_size), *text[2:], *added]
        began = time.perf_counter()
        known = sessions.find(asked)
        mx.eval(known.state)
        found = time.perf_counter()
        _read(built, asked[known.count :], known.state)
        read.append(time.perf_counter() - found)
        restored.append(found - began)
        if known.count != tokens:
            raise RuntimeError(f"of a parked session {known.count} of {tokens} tokens were known")
    return {
        "sessions": parked,
        "bytes": sessions.stats().memory_bytes,
        "resident_bytes": after.anonymous_bytes - before.anonymous_bytes
        if before and after
        else None,
        "restore": median(restored),
        "read": median(read),
        "tokenize": tokenizer and _tokenizing(tokenizer, tokens, resumed),
    }


def _first(number: int, vocab_size: int) -> tuple[int, int]:
    """The first two tokens of a text, different for each number."""
    return divmod(number, vocab_size)


def _read(model: Decoder, tokens: list[int], state: Any) -> None:
    """Reads tokens up to the logits after them."""
    logits, state = model(mx.array([tokens]), state)
    mx.eval(logits, state)


def _tokenizing(tokenizer: Tokenizer, tokens: int, rounds: int) -> float:
    text = prompt(tokenizer, tokens, "parked")
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        tokenizer.encode(text)
        seconds.append(time.perf_counter() - began)
    return median(seconds)
