"""`bit_linear` in groups of rows: its machine code, and what a SIMD group takes for rows of any size."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlx_mmfree.ops import Projection
from mlx_mmfree.ops.activations import Activation
from mlx_mmfree.ops.backend import launch
from mlx_mmfree.ops.bit_linear import Options
from mlx_mmfree.ops.bit_linear.definition import Variant
from mlx_mmfree.ops.bit_linear.metal_groups import in_groups
from mlx_mmfree.ops.bit_linear.metal_tuning import Tuning, blocks, slab_words
from mlx_mmfree.ops.ternary import packed_width
from tests.emulator import apple_gpu
from tests.emulator.apple_gpu import Code

INPUTS_OF_A_GROUP = 4 * 32
"""The inputs that a SIMD group finds statistics of, or lays out, in a round of those loops."""


@dataclass(frozen=True)
class BitLinear:
    """The kernel for a group of rows.

    Attributes:
        code: Its machine code: loops of statistics, over slabs, that lays out inputs, and over words.
        rows, outputs: Those of a SIMD group.
        simd_groups: Those of a threadgroup.
        slab: The packed words of a slab.
    """

    code: Code
    rows: int
    outputs: int
    simd_groups: int
    slab: int

    def of_a_threadgroup(self, dims: int) -> float:
        """Instructions of a threadgroup for rows of so many inputs."""
        # there may be none of statistics
        *statistics, slab, filling, products = self.code.loops
        slabs = [min(self.slab, dims // 16 - start) for start in range(0, dims // 16, self.slab)]
        # a SIMD group that has no inputs left ends the loop
        shared = sum(loop.instructions for loop in (*statistics, filling)) * dims
        done = self.code.outside.instructions + slab.instructions * len(slabs)
        done += products.instructions * sum(-(-size // 32) for size in slabs)
        return self.simd_groups * done + shared / INPUTS_OF_A_GROUP

    def whole(self, dims: int) -> float:
        """Instructions of the whole kernel for each weight and row."""
        weights = dims / 32 * self.outputs * self.simd_groups
        return self.of_a_threadgroup(dims) / weights / self.rows

    def of_the_busiest_core(
        self, dims: int, outputs: Sequence[int], cores: int, groups: int = 1
    ) -> float:
        """Instructions of a core that has as many threadgroups as any other, or one more."""
        threadgroups = groups * blocks(outputs, self.outputs * self.simd_groups)
        return -(-threadgroups // cores) * self.of_a_threadgroup(dims)


def options(
    *,
    gate: Activation | None = None,
    has_norm: bool = False,
    eps: float | None = None,
    quantize: bool = True,
    has_residual: bool = False,
) -> Options:
    norm = mx.ones((64,)) if has_norm else None
    norm_eps = 1e-6 if has_norm else None
    residual = mx.zeros((1, 64), mx.float16) if has_residual else None
    return Options(eps, "half_even", quantize, gate, norm, norm_eps, residual)


def of(
    rows: int,
    outputs: int,
    options: Options | None = None,
    *,
    simd_groups: int = 8,
    matrices: int = 1,
    are_halves: bool = True,
    has_statistics: bool = True,
) -> BitLinear:
    """Counts the kernel for rows of float16, or one that is given what it finds of them first."""
    options = options or Options()
    are_halves = are_halves and options.quantize
    tuning = Tuning(rows, outputs, simd_groups, are_halves, True)
    return BitLinear(
        _code(tuning, Variant.of(options), matrices, has_statistics),
        rows,
        outputs,
        simd_groups,
        slab_words(Variant.of(options), rows),
    )


@cache
def _code(tuning: Tuning, variant: Variant, matrices: int, has_statistics: bool) -> Code:
    own_norm = None if variant.eps is None else mx.ones((64,))
    norm = None if variant.norm_eps is None else mx.ones((64,))
    projection = Projection(mx.zeros((64, packed_width(64)), mx.uint32), mx.ones((1,)), own_norm)
    x = mx.zeros((tuning.rows, 64 * (1 if variant.gate is None else 2)), mx.float16)
    residual = mx.zeros((tuning.rows, 64 * matrices), mx.float16) if variant.has_residual else None
    with launch.recording() as texts:
        in_groups(variant, *variant.flat(x, [projection] * matrices, norm, residual), tuning=tuning)
    ((kernel, text),) = texts.items()
    if not has_statistics:
        needed = "if (QUANTIZED || NORM || OWN_NORM)"
        assert text.count(needed) == 1
        text = text.replace(needed, "if (false)")
    return apple_gpu.machine_code(kernel, text, (32 * tuning.simd_groups, 1, 1))
