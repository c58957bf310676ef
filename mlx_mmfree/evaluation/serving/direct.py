"""The rate of the scheduler without HTTP: what a server could give at most."""

import time
from collections.abc import Sequence
from typing import Any

from ...generation.scheduling import Request, Scheduler
from ...generation.sessions import Sessions
from ...hub import load

_SESSION_BYTES = 10**9
"""As much as a server takes for them unless it is told otherwise."""


def run(
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
