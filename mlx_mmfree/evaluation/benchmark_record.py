"""Measurements of fresh processes, and the figure that they give together."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

READ, MULTIPLY, BLAS = "plain read", "8-bit arithmetic", "float32 products"
"""The limits: of the same memory, of the processor, and of the same products by the BLAS library."""

SLOW_SHARE = 0.8
"""Of the fastest limit seen; processes below it drew slow memory or were disturbed."""


@dataclass(frozen=True)
class Record:
    """What one process measured, in turn with its limit.

    Attributes:
        name: What was measured.
        threads: Threads that computed.
        limit: What the seconds are compared with.
        bytes: Weights that are read at least, and the state with them.
        macs: Multiply-accumulates.
        seconds: Of each round.
        limit_seconds: Of the limit in the same round.
        unit: What one measurement yields, for rates such as tokens a second.
        count: How many of them.
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
        """Median over the rounds of the limit's time over the measured one."""
        pairs = zip(self.seconds, self.limit_seconds, strict=True)
        return median(limit / own for own, limit in pairs)

    @property
    def limit_rate(self) -> float:
        """Bytes or multiply-accumulates a second of the limit, by the median round."""
        work = self.bytes if self.limit == READ else self.macs
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
        """The records whose limit was not far below the fastest."""
        fastest = max(record.limit_rate for record in self.records)
        return [r for r in self.records if r.limit_rate >= SLOW_SHARE * fastest]

    @property
    def share(self) -> float:
        """Fraction of the limit: the median of the counted records."""
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


def figures(records: Iterable[Record]) -> list[Figure]:
    """One figure for each name, number of threads and limit, in the order of their first record."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.name, record.threads, record.limit), []).append(record)
    return [Figure(tuple(group)) for group in groups.values()]


def median(values: Iterable[float] | Sequence[float]) -> float:
    """The middle value."""
    return float(statistics.median(values))
