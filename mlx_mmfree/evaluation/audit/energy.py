"""An estimate of energy by published figures for single operations.

M. Horowitz, "Computing's energy problem (and what we can do about it)", ISSCC 2014, figure 1.1.9: 45 nm,
0.9 V. Divisions, roots, exponentials and comparisons are not in the figure and not in the estimate.
Neither is what moves instructions and controls them, which takes more than arithmetic in any processor.
"""

from dataclasses import asdict, dataclass

from .work import Work

SOURCE = "M. Horowitz, Computing's energy problem, ISSCC 2014, figure 1.1.9 (45 nm, 0.9 V)"

_PICOJOULES = {
    ("multiply", 16): 1.1,
    ("multiply", 32): 3.7,
    ("add", 16): 0.4,
    ("add", 32): 0.9,
    ("integer", 8): 0.03,
    ("integer", 16): 0.05,
    ("integer", 32): 0.1,
}
"""Of integers, additions."""

_DRAM = 1300 / 8
"""Of a byte, by the lower of the two figures for 8 bytes, 1.3 and 2.6 nJ."""

_CACHE = 20 / 8
"""Of a byte, in a cache of 32 kB."""


@dataclass(frozen=True)
class Energy:
    """Microjoules of one decoded token.

    Attributes:
        arithmetic: Operations on floats and integers.
        memory: Weights and state, from DRAM.
        cache: What passes between operations.
    """

    arithmetic: float
    memory: float
    cache: float

    @property
    def total(self) -> float:
        return self.arithmetic + self.memory + self.cache

    def to_json(self) -> dict[str, float]:
        return asdict(self) | {"total": self.total}


def energy(work: Work, far_bytes: int, near_bytes: int) -> Energy:
    """Estimates the energy of some work.

    Args:
        work: The operations. Those of other widths than the figure has count as the next wider one.
        far_bytes: Bytes of weights and state that are read or written.
        near_bytes: Bytes that pass between operations.
    """
    picojoules = sum(count * _each(kind, bits) for (kind, bits), count in work.items())
    return Energy(picojoules / 1e6, far_bytes * _DRAM / 1e6, near_bytes * _CACHE / 1e6)


def _each(kind: str, bits: int) -> float:
    widths = sorted(width for known, width in _PICOJOULES if known == kind)
    if not widths:
        return 0.0
    return _PICOJOULES[kind, next((width for width in widths if width >= bits), widths[-1])]
