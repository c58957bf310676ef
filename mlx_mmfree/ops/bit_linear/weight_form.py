"""Chooses by timing whether weights with five trits a byte are multiplied as they are, or as 2 bits."""

import mlx.core as mx
import numpy as np

from ...platform.threads import thread_count
from ..backend.choice import choose
from ..backend.dispatch import forced_backend, native_unavailable, on_cpu
from ..backend.inspection import cpu_kernels
from ..five_trits import FRACTIONS, five_width, unpack_fives
from ..ternary import pack_ternary
from . import Projection, bit_linear

TWO_BITS, FIVE_TRITS = "two_bits", "five_trits"

MOST_BYTES = 2**27
"""The most bytes of 2-bit weights that are timed, which are more than caches hold."""

_DRAWN_ROWS = 16


def multiplies_fives(outputs: int, inputs: int, weights: int) -> bool:
    """Whether the kernel of decoding is faster with five trits a byte than with 2 bits.

    Both are timed with the largest matrix of a model, which is copied until its copies take as much
    memory as the model: weights that lie in a cache are read faster than those in memory.

    Args:
        outputs, inputs: The shape of the matrix.
        weights: The number of weights in all ternary matrices of the model.
    """
    if not on_cpu() or native_unavailable() or forced_backend() not in (None, "native"):
        return False
    count = max(min(weights // 4, MOST_BYTES) * 4 // (outputs * inputs), 1)
    x = mx.sin(mx.arange(inputs))[None]
    held: dict[str, list[mx.array]] = {}

    def products(form: str) -> mx.array:
        if not held:
            held.update(_matrices(outputs, inputs, count))
        scale = mx.ones((1,))
        return mx.concatenate([bit_linear(x, (Projection(each, scale),)) for each in held[form]])

    chosen = choose(
        "weight_form",
        (TWO_BITS, FIVE_TRITS),
        (),
        products,
        x,
        must_agree=True,
        facts={"matrices": count},
        task={
            "outputs": outputs,
            "inputs": inputs,
            "matrices": count,
            "threads": thread_count(),
            "instructions": cpu_kernels().instructions,
        },
    )
    if held:
        held.clear()
        mx.clear_cache()
    return chosen == FIVE_TRITS


def _matrices(outputs: int, inputs: int, count: int) -> dict[str, list[mx.array]]:
    """The same matrices in both forms, each with memory of its own."""
    drawn = np.random.default_rng(0).integers(0, len(FRACTIONS), (_DRAWN_ROWS, five_width(inputs)))
    fives = mx.array(FRACTIONS[drawn].astype(np.uint8))
    few = {TWO_BITS: pack_ternary(unpack_fives(fives, inputs)), FIVE_TRITS: fives}
    rows = mx.arange(outputs) % _DRAWN_ROWS
    found = {
        form: [mx.take(each, rows, axis=0) for _ in range(count)] for form, each in few.items()
    }
    mx.eval(found)
    return found
