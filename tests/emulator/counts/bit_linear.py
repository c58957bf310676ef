"""`bit_linear` in groups of rows: its machine code, and what a SIMD group takes for rows of any size."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_mmfree.ops import Projection
from mlx_mmfree.ops.activations import Activation
from mlx_mmfree.ops.backend import launch
from mlx_mmfree.ops.bit_linear import Options
from mlx_mmfree.ops.bit_linear.definition import Variant
from mlx_mmfree.ops.bit_linear.metal_groups import SIMD_GROUPS, Tuning, in_groups, slab_words
from mlx_mmfree.ops.ternary import packed_width
from tests.emulator import apple_gpu
from tests.emulator.apple_gpu import Code

FILLED_INPUTS = 4 * 32 * SIMD_GROUPS
"""The inputs that a threadgroup finds statistics of, or lays out, in a round of those loops."""


@dataclass(frozen=True)
class BitLinear:
    """The kernel for a group of rows.

    Attributes:
        code: Its machine code: loops of statistics, over slabs, that lays out inputs, and over words.
        rows, outputs: Those of a SIMD group.
        slab: The packed words of a slab.
    """

    code: Code
    rows: int
    outputs: int
    slab: int

    def of_a_simd_group(self, dims: int) -> float:
        """Instructions of a SIMD group for rows of so many inputs."""
        *statistics, slab, filling, products = self.code.loops
        slabs = [min(self.slab, dims // 16 - start) for start in range(0, dims // 16, self.slab)]
        # a SIMD group that has no inputs left ends the loop
        shared = sum(loop.instructions for loop in (*statistics, filling)) * dims / FILLED_INPUTS
        done = self.code.outside.instructions + slab.instructions * len(slabs) + shared
        return done + products.instructions * sum(-(-size // 32) for size in slabs)

    def whole(self, dims: int) -> float:
        """Instructions of the whole kernel for each weight and row."""
        return self.of_a_simd_group(dims) / (dims / 32 * self.outputs) / self.rows


def options(
    *,
    gate: Activation | None = None,
    has_norm: bool = False,
    eps: float | None = None,
    quantize: bool = True,
) -> Options:
    norm = mx.ones((64,)) if has_norm else None
    norm_eps = 1e-6 if has_norm else None
    return Options(gate=gate, norm=norm, norm_eps=norm_eps, eps=eps, quantize=quantize)


def of(
    rows: int, outputs: int, options: Options | None = None, *, are_halves: bool = True
) -> BitLinear:
    """Counts the kernel for rows of float16."""
    options = options or Options()
    variant = Variant.of(options)
    own_norm = None if variant.eps is None else mx.ones((64,))
    projection = Projection(mx.zeros((64, packed_width(64)), mx.uint32), mx.ones((1,)), own_norm)
    x = mx.zeros((rows, 64 * (1 if variant.gate is None else 2)), mx.float16)
    tuning = Tuning(rows, outputs, are_halves and variant.quantize, True)
    with launch.recording() as texts:
        in_groups(variant, *variant.flat(x, [projection], options.norm, None), tuning=tuning)
    ((kernel, text),) = texts.items()
    code = apple_gpu.machine_code(kernel, text, (32 * SIMD_GROUPS, 1, 1))
    return BitLinear(code, rows, outputs, slab_words(variant, rows))
