"""The results of a soak, and whether memory stays flat."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

_SHARE = 0.02
_BYTES = 8_000_000


@dataclass
class Report:
    """The events so far.

    Attributes:
        ends: How requests ended, by kind.
        faults: What must not happen.
        memory: Bytes of the server in memory, at equal distances in time.
    """

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {kind}" for kind, count in sorted(self.ends.items()))
        latest = f"{self.memory[-1] / 1e6:.1f} MB" if self.memory else "unknown memory"
        return f"{ends or 'nothing yet'}; {len(self.faults)} faults; {latest}"


def growth(memory: Sequence[int]) -> int:
    """By how many bytes the last third of some measurements lies above the second, by the medians.

    Caches and threads arise in the first third.
    """
    third = len(memory) // 3
    if not third:
        raise ValueError(f"memory must be measured at least 3 times but was {len(memory)} times.")
    return round(median(memory[-third:]) - median(memory[third:-third]))


def is_flat(memory: Sequence[int]) -> bool:
    """Whether memory has stopped growing, but for the little by which it goes up and down."""
    third = len(memory) // 3
    return growth(memory) <= _SHARE * median(memory[third:-third]) + _BYTES
