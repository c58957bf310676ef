"""The linears of a layer of MMfreeLM-370M, whose matrices are small: the work of the busiest core.

A launch after another takes 1.3 us on the GPU, see `evaluation/bound.py`, in which a core issues 4
instructions of a SIMD group in each cycle.
"""

from collections.abc import Sequence
from typing import NamedTuple
from unittest.mock import patch

from mlx_mmfree.evaluation.bound import LAUNCH_SECONDS
from mlx_mmfree.ops.backend import launch
from mlx_mmfree.ops.bit_linear import Options, metal_tuning
from mlx_mmfree.ops.bit_linear.definition import Variant
from mlx_mmfree.ops.bit_linear.metal_tuning import Tuning
from tests.emulator.counts import bit_linear
from tests.emulator.counts.shares_of_cores import CORES

CLOCK = 1.398e9
"""Of the M2 family, the fastest one that issues so many."""

INSTRUCTIONS_OF_A_LAUNCH = LAUNCH_SECONDS * CLOCK * 4


class Linear(NamedTuple):
    """One launch of a layer.

    Attributes:
        name: What it computes.
        dims: Inputs.
        outputs: Those of each matrix.
        options: What is around the product.
        before: Instructions of the busiest core of 8, 20, 40 and 80 when a threadgroup had 8 SIMD groups
            of 8 outputs where these made 64 threadgroups, else of 4.
    """

    name: str
    dims: int
    outputs: Sequence[int]
    options: Options
    before: tuple[int, ...]


_NORMED = bit_linear.options(has_norm=True, eps=1e-6)
LAYER = (
    Linear("gates", 1024, (1024,) * 3, _NORMED, (58080, 24200, 14520, 9680)),
    Linear(
        "output",
        1024,
        (1024,),
        bit_linear.options(eps=1e-6, has_residual=True),
        (15968, 7984, 3992, 3992),
    ),
    Linear("gate and up", 1024, (5632,), _NORMED, (69432, 31560, 18936, 12624)),
    Linear(
        "down",
        2816,
        (1024,),
        bit_linear.options(gate="silu", eps=1e-6, has_residual=True),
        (40464, 20232, 10116, 10116),
    ),
)


class Work(NamedTuple):
    """The work of the busiest core for a linear.

    Attributes:
        threadgroups: Threadgroups of the launch.
        shape: The SIMD groups of a threadgroup, and the outputs of each.
        instructions: Instructions of the core.
    """

    threadgroups: int
    shape: tuple[int, int]
    instructions: float


def work(linear: Linear, cores: int) -> Work:
    """With the text that is chosen on chips of this kind."""
    with patch.object(metal_tuning, "cores", lambda: CORES[cores]), launch.recording():
        tuning = Tuning.of(Variant.of(linear.options), 1, linear.dims, linear.outputs)
    shape = tuning.simd_groups, tuning.outputs
    count = bit_linear.of(
        1,
        tuning.outputs,
        linear.options,
        simd_groups=tuning.simd_groups,
        matrices=len(linear.outputs),
    )
    return Work(
        metal_tuning.blocks(linear.outputs, shape[0] * shape[1]),
        shape,
        count.of_the_busiest_core(linear.dims, linear.outputs, cores),
    )


def work_without_norms(linear: Linear, cores: int) -> float:
    """The least that would be left to the busiest core with norm and codes in a launch of their own."""
    threadgroups, (groups, outputs), _ = work(linear, cores)
    options = bit_linear.options(has_residual=linear.options.residual is not None)
    count = bit_linear.of(
        1,
        outputs,
        options,
        simd_groups=groups,
        matrices=len(linear.outputs),
        has_statistics=False,
    )
    return -(-threadgroups // cores) * count.of_a_threadgroup(linear.dims)


def share(cores: int, linears: Sequence[Linear] = LAYER) -> float:
    """Instructions of the busiest core with a launch for each linear, of those that it had before."""
    launches = len(linears) * INSTRUCTIONS_OF_A_LAUNCH
    now = sum(work(linear, cores).instructions for linear in linears)
    before = sum(linear.before[[*CORES].index(cores)] for linear in linears)
    return (now + launches) / (before + launches)


def report() -> str:
    """A table of linears and cores, and the sums of the layer."""
    lines = [
        "Of the busiest core, for a decoded token; a launch takes as long as "
        f"{INSTRUCTIONS_OF_A_LAUNCH:,.0f} of its instructions.\n",
        "| linear | " + " | ".join(f"{cores} cores" for cores in CORES) + " |",
        "| --- |" + " ---: |" * len(CORES),
    ]
    for linear in LAYER:
        cells = []
        for cores, before in zip(CORES, linear.before, strict=True):
            threadgroups, (groups, outputs), found = work(linear, cores)
            made = f"{threadgroups} of {groups} x {outputs}"
            cells.append(f"{found:,.0f}, {found / before:.2f} of before; {made}")
        lines.append(f"| {linear.name} | {' | '.join(cells)} |")
    for linear in LAYER:
        cells = []
        for cores in CORES:
            saved = work(linear, cores).instructions - work_without_norms(linear, cores)
            cells.append(f"{INSTRUCTIONS_OF_A_LAUNCH - saved:+,.0f}")
        lines.append(f"| {linear.name}, norm and codes in a launch before | {' | '.join(cells)} |")
    three = [linear for linear in LAYER if linear.name != "gate and up"]
    for name, linears in (("without gate and up", three), ("all", LAYER)):
        shares = (f"{share(cores, linears):.3f} of before" for cores in CORES)
        lines.append(f"| {name}, with launches | {' | '.join(shares)} |")
    return "\n".join(lines)
