"""What the benchmark of servers finds."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from .settings import ServeSettings

SCHEDULER, BARE = "scheduler without HTTP", "scheduler without HTTP and sessions"


@dataclass(frozen=True)
class Spread:
    """Seconds that something took.

    Attributes:
        median: The median.
        late: The 95th percentile.
    """

    median: float
    late: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """The spread of some seconds."""
        late = quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
        return cls(median(seconds), late)


@dataclass(frozen=True)
class RateFigure:
    """What clients get from one program.

    Attributes:
        program: A server, `SCHEDULER`, or `BARE`, which keeps no sessions.
        clients: How many ask at the same time.
        tokens_per_second: Of all clients together, in the median round.
        best: In the fastest round.
        first: Seconds up to the first piece of text, over all rounds; `None` without HTTP.
        between: Seconds from one piece of text to the next of the same answer.
    """

    program: str
    clients: int
    tokens_per_second: float
    best: float
    first: Spread | None
    between: Spread | None


@dataclass(frozen=True)
class LeftOut:
    """A program that failed.

    Attributes:
        program: Another server.
        clients: With how many clients.
        reason: What it did.
    """

    program: str
    clients: int
    reason: str


@dataclass(frozen=True)
class ParkedFigure:
    """What parked sessions take.

    Attributes:
        name: The model.
        sessions: How many are parked.
        bytes: What they count in memory.
        tokens: Length of each.
        resident_bytes: By how much a process has grown that parks them; `None` where unknown.
        restore: Seconds to restore one from memory, in the median of those resumed.
        tokenize: Seconds to turn its whole text into tokens; `None` where there is no tokenizer.
        read: Seconds to read `new_tokens` more.
        new_tokens: How many were sent on resuming.
    """

    name: str
    sessions: int
    bytes: int
    tokens: int
    resident_bytes: int | None
    restore: float
    tokenize: float | None
    read: float
    new_tokens: int


@dataclass(frozen=True)
class ResumedFigure:
    """Sessions of a server that went on after all of them were parked.

    Attributes:
        sessions: How many the server kept.
        bytes: What they count in its memory.
        asked: Seconds up to the first piece of text when they began.
        resumed: The same when they went on.
        cached: The share of the tokens of a resumed prompt that were not read again.
    """

    sessions: int
    bytes: int
    asked: Spread
    resumed: Spread
    cached: float


@dataclass(frozen=True)
class ServeReport:
    """All that was measured.

    Attributes:
        settings: How much.
        rates: What clients get.
        left_out: What could not be measured of them.
        resumed: Sessions of the server.
        parked: Sessions without HTTP, of one model after the other.
        loads: The load average of one minute after each measurement.
        processors: Of this machine.
    """

    settings: ServeSettings
    rates: list[RateFigure]
    left_out: list[LeftOut]
    resumed: ResumedFigure
    parked: list[ParkedFigure]
    loads: list[float]
    processors: int
