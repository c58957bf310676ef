"""The records of measurements in several processes, and the figures that they give together."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

READ, MULTIPLY, BLAS = "plain read", "8-bit arithmetic", "float32 products"
"""Limits: reading the same memory, the processor's arithmetic, and the same products in float32."""

COPY = "copy"
"""The limit of work that must read and write: copying as many bytes."""

HALF = "float16 products"
"""The limit of arithmetic on a GPU: how fast MLX multiplies large float16 matrices."""

TERNARY = "ternary"
"""What the names of this library's own products begin with."""

"""What the names of its products with weights in that layout begin with."""

SLOW_SHARE = 0.8
"""A process counts if its limit reaches this share of the fastest. Others had slow memory."""


@dataclass(frozen=True)
class Record:
    """What one process measured, in turn with its limit.

    Attributes:
        name: What was measured.
        threads: Number of threads that computed, 0 on a GPU.
        limit: The limit that the seconds are compared with.
        bytes: Number of bytes of weights and state that must be read.
        macs: Number of multiply-accumulates.
        seconds: The seconds of each round.
        limit_seconds: The seconds of the limit in the same rounds.
        unit: What a measurement yields, such as tokens, for rates per second.
        count: How many of these it yields.
    """

    name: str
    threads: int
    limit: str
    bytes: int
    macs: int
    seconds: tuple[float, ...]
    limit_seconds: tuple[float, ...]
    unit: str = ""
    count: int = 1

    @property
    def share(self) -> float:
        """The fraction of the limit's speed that was reached: the median over the rounds."""
        pairs = zip(self.seconds, self.limit_seconds, strict=True)
        return median(limit / own for own, limit in pairs)

    @property
    def limit_rate(self) -> float:
        """The bytes or multiply-accumulates per second of the limit in the median round."""
        work = self.bytes if self.limit in (READ, COPY) else self.macs
        return work / median(self.limit_seconds)


@dataclass(frozen=True)
class Figure:
    """The records of one measurement in several processes.

    Attributes:
        records: One for each process.
    """

    records: tuple[Record, ...] = field(repr=False)

    @property
    def counted(self) -> list[Record]:
        """The records of processes whose limit was not far below the fastest."""
        fastest = max(record.limit_rate for record in self.records)
        return [r for r in self.records if r.limit_rate >= SLOW_SHARE * fastest]

    @property
    def share(self) -> float:
        """The fraction of the limit's speed that was reached: the median of the counted records."""
        return median(record.share for record in self.counted)

    @property
    def seconds(self) -> float:
        return median(median(record.seconds) for record in self.counted)

    def to_json(self) -> dict[str, Any]:
        first = self.records[0]
        return {
            "name": first.name,
            "threads": first.threads,
            "limit": first.limit,
            "fraction_of_limit": self.share,
            "seconds": self.seconds,
            "gb_per_second": first.bytes / self.seconds / 1e9,
            "gmac_per_second": first.macs / self.seconds / 1e9,
            "rate": first.count / self.seconds if first.unit else None,
            "unit": first.unit or None,
            "processes": [
                asdict(r) | {"fraction_of_limit": r.share, "is_counted": r in self.counted}
                for r in self.records
            ],
        }


@dataclass(frozen=True)
class Ratio:
    """How many times as fast something is as something else.

    All processes count, since memory may be slow for those of one only.

    Attributes:
        name: What was measured.
        other: What it is compared with.
        median: The ratio of the medians of all processes.
        best: The ratio of the best processes.
    """

    name: str
    other: str
    median: float
    best: float

    @classmethod
    def of(cls, name: str, own: Figure, other_name: str, other: Figure) -> "Ratio":
        """Compares two figures."""
        ours, theirs = (
            [median(record.seconds) for record in figure.records] for figure in (own, other)
        )
        return cls(name, other_name, median(theirs) / median(ours), min(theirs) / min(ours))


def figures(records: Iterable[Record]) -> list[Figure]:
    """A figure for each name, number of threads and limit, in the order of their first records."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.name, record.threads, record.limit), []).append(record)
    return [Figure(tuple(group)) for group in groups.values()]


def beside(measured: Sequence[Figure]) -> list[Ratio]:
    """Ternary products in relation to others with the same shape, rows and threads."""
    found = []
    for own in measured:
        name, threads = own.records[0].name, own.records[0].threads
        if not name.startswith(TERNARY):
            continue
        for other in measured:
            full = other.records[0].name
            title = full.removesuffix(name.removeprefix(TERNARY))
            if title not in (TERNARY, full) and other.records[0].threads == threads:
                on = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
                found.append(Ratio.of(name + on, own, title, other))
    return found


def median(values: Iterable[float] | Sequence[float]) -> float:
    """The median as a float."""
    return float(statistics.median(values))
