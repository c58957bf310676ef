"""How fast a model could be on an Apple chip at most: a bound by bytes, instructions and launches.

What one token takes is counted by `mmfree audit`, see `certificate`. The chip has limits of three kinds,
and the slowest one binds:

- bytes: weights and state at the memory's nominal bandwidth, and what MLX copies of the state,
- instructions: for a decoded token the kernels that multiply packed weights, counted in machine code
  at the model's own shapes (`kernel_slots`); for a prompt its multiply-adds,
- launches: a kernel that needs what the one before it wrote waits for it.

Sources: bandwidths and numbers of cores from Apple's specifications. Cores of the M1 and M2 families
issue 128 instructions or multiply-adds in a cycle (P. Turner, github.com/philipturner/metal-benchmarks,
which gives their clocks too). Those of the M3 and M4 families are taken to multiply as fast, at the
clocks that `powermetrics` shows; what they issue beside is not published, nor what the matrix units of
the M5 family do. A launch: 1.3 us in turn, github.com/kryptic-sh/infr/pull/14.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from ..arguments import did_you_mean
from ..errors import UsageError
from ..models import Decoder
from .audit import Certificate, certify
from .audit.metal_step import BUFFER_LIMIT, LARGE_BUFFER_LIMIT
from .audit.products import MatrixProduct
from .kernel_slots import fewest_slots

LAUNCH_SECONDS = 1.3e-6

LIMITS = {
    "decode": ("bandwidth", "launches", "instructions"),
    "prefill": ("bandwidth", "launches", "multiply-adds"),
}
"""The limits that may bind."""

_LANES = 128
"""Instructions, or multiply-adds, of a core in a cycle."""


class Chip(NamedTuple):
    """A chip with so many GPU cores.

    Attributes:
        name: Its name, as `M2 Max`.
        cores: GPU cores.
        bandwidth: Bytes a second of its memory, nominal.
        clock: Cycles a second of the GPU; 0 where its rates are not known.
        has_issue_rates: Whether it is known how many instructions a core issues.
    """

    name: str
    cores: int
    bandwidth: float
    clock: float = 0
    has_issue_rates: bool = False

    @property
    def buffer_limit(self) -> int:
        """How many launches MLX gathers in a command buffer."""
        is_large = {"Max", "Ultra"} & set(self.name.split())
        return LARGE_BUFFER_LIMIT if is_large else BUFFER_LIMIT

    @property
    def rate(self) -> float:
        """Multiply-adds, or instructions of single lanes, in a second."""
        return self.cores * _LANES * self.clock


def _family(
    clock: float, chips: dict[str, tuple[tuple[int, float], ...]], has_issue_rates: bool = False
) -> list[Chip]:
    return [
        Chip(name, cores, bandwidth * 1e9, clock * 1e9, has_issue_rates)
        for name, sizes in chips.items()
        for cores, bandwidth in sizes
    ]


CHIPS = [
    Chip("M1", 8, 68.25e9, 1.278e9, has_issue_rates=True),
    *_family(
        1.296,
        {
            "M1 Pro": ((16, 200), (14, 200)),
            "M1 Max": ((32, 400), (24, 400)),
            "M1 Ultra": ((64, 800), (48, 800)),
        },
        has_issue_rates=True,
    ),
    *_family(
        1.398,
        {
            "M2": ((10, 100), (8, 100)),
            "M2 Pro": ((19, 200), (16, 200)),
            "M2 Max": ((38, 400), (30, 400)),
            "M2 Ultra": ((76, 800), (60, 800)),
        },
        has_issue_rates=True,
    ),
    *_family(
        1.38,
        {
            "M3": ((10, 100), (8, 100)),
            "M3 Pro": ((18, 150), (14, 150)),
            "M3 Max": ((40, 400), (30, 300)),
            "M3 Ultra": ((80, 819), (60, 819)),
        },
    ),
    *_family(
        1.578,
        {
            "M4": ((10, 120), (8, 120)),
            "M4 Pro": ((20, 273), (16, 273)),
            "M4 Max": ((40, 546), (32, 410)),
        },
    ),
    *_family(0, {"M5": ((10, 153),), "M5 Pro": ((20, 307),), "M5 Max": ((40, 614), (32, 460))}),
]
"""Of a name, the chip with most cores first."""


def chip(words: str) -> Chip:
    """The chip of a name, such as `M2 Max`, or of a name and a number of GPU cores, `M2 Max 30`.

    Raises:
        UsageError: It is not in the table.
    """
    asked = words.lower().removeprefix("apple").split()
    for each in CHIPS:
        name = each.name.lower().split()
        if asked in (name, [*name, str(each.cores)]):
            return each
    names = list(dict.fromkeys(each.name for each in CHIPS))
    # a chip that is not known yet is most like the newest
    meant = did_you_mean(words.lower().removeprefix("apple").strip(), names, cutoff=0.5)
    raise UsageError(
        f"[bench] 'bound' must be one of {', '.join(names)}, or one with its number of GPU cores, as "
        f"'M2 Max 30', but got {words!r}.{meant}"
    )


class Bound(NamedTuple):
    """The most tokens a second that a chip allows, and what binds.

    Attributes:
        tokens_per_second: The bound.
        binds: Which of the `LIMITS` takes longest.
        seconds: The seconds that each of them takes; what is not known of the chip is missing.
    """

    tokens_per_second: float
    binds: str
    seconds: dict[str, float]


def _bound(tokens: int, seconds: dict[str, float]) -> Bound:
    binds = max(seconds, key=lambda kind: seconds[kind])
    return Bound(tokens / seconds[binds], binds, seconds)


def decoding_bound(token: Certificate, of: Chip) -> Bound:
    """The bound for decoding after as many tokens as the certificate says."""
    step, limit = token.on_metal, of.buffer_limit
    seconds = {
        "bandwidth": (token.traffic.far + step.moved(limit)) / of.bandwidth,
        "launches": step.launches(limit) * LAUNCH_SECONDS,
    }
    if of.has_issue_rates:
        seconds["instructions"] = sum(map(_slots, token.products)) / of.rate
    return _bound(1, seconds)


def _slots(product: MatrixProduct) -> float:
    """The slots of a product in a kernel that was counted."""
    name = product.storage if product.storage.startswith("codes") else product.operation
    if product.is_chosen and name == "codes of 2 bits":
        name = "GatherAffineMatmul"
    return product.times * fewest_slots(name, product.inputs, product.outputs, product.around)


def prompt_bound(token: Certificate, of: Chip, length: int) -> Bound | None:
    """The bound for a prompt of a length: each block's products for all tokens, the rest for the last.

    Products of activations with activations, as in attention, are left out. `None` for a chip whose
    multiply-adds are not known: bandwidth and launches alone say little of many tokens.
    """
    if not of.rate:
        return None
    seconds = {
        "bandwidth": token.traffic.weights_read / of.bandwidth,
        "launches": token.launches["metal"] * LAUNCH_SECONDS,
    }
    macs = sum(
        product.macs * (1 if product.is_outside else length)
        for product in token.products
        if product.kind != "activations"
    )
    seconds["multiply-adds"] = macs / of.rate
    return _bound(length, seconds)


def bounds(
    model: Decoder, of: Chip, positions: Iterable[int], lengths: Iterable[int]
) -> dict[str, Bound]:
    """The bounds for decoding after numbers of tokens, and for prompts of some lengths, if there are."""
    tokens = [certify(model, position) for position in positions]
    decoding = {f"decode after {token.position}": decoding_bound(token, of) for token in tokens}
    prompts = {f"prefill of {length}": prompt_bound(tokens[-1], of, length) for length in lengths}
    return decoding | {what: each for what, each in prompts.items() if each is not None}


def describe(what: str, bound: Bound, of: Chip) -> str:
    """A line of `bounds` for a reader."""
    rest = [kind for kind in LIMITS[what.split()[0]] if kind not in bound.seconds]
    unknown = f" ({' and '.join(rest)} of this chip are not known)" if rest else ""
    return (
        f"{of.name} with {of.cores} GPU cores, {what}: at most "
        f"{ceil(bound.tokens_per_second):,} tokens/s, bound by {bound.binds}{unknown}"
    )
