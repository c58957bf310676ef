"""How much `mmfree bench serve` measures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeSettings:
    """How much is measured.

    Attributes:
        clients: Numbers of clients at the same time.
        requests: Requests of each client, one after the other.
        prompt_tokens: Lengths of the prompts, which clients send in turn; about as many in their words.
        tokens: Tokens of each answer.
        rounds: How often each server is measured, in turn with the others.
        rows: Rows of the scheduler without HTTP.
        parked: Sessions that are parked.
        parked_tokens: Tokens of a parked session that is restored.
        new_tokens: Tokens that a resumed session is sent.
        resumed: Sessions that are resumed.
    """

    clients: tuple[int, ...] = (1, 4, 16, 64)
    requests: int = 4
    prompt_tokens: tuple[int, ...] = (16, 512)
    tokens: int = 64
    rounds: int = 3
    rows: int = 16
    parked: int = 1000
    parked_tokens: int = 8000
    new_tokens: int = 16
    resumed: int = 100


QUICK = ServeSettings(
    clients=(1, 4),
    requests=2,
    prompt_tokens=(12, 32),
    tokens=8,
    rounds=1,
    rows=4,
    parked=20,
    parked_tokens=64,
    new_tokens=4,
    resumed=5,
)
"""To try the command in a short time."""
