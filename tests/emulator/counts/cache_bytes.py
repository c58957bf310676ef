"""Bytes of keys and values that a decoded token moves, by how they come into the cache.

A command buffer ends after 40 launches or inputs of 40 Mi elements, 50 on Max and Ultra, and MLX lets
eleven be unfinished. So a step that takes more of them finds the caches of the step before free.
"""

from functools import cache
from typing import NamedTuple

from mlx_mmfree.evaluation.audit.metal_step import (
    BUFFER_LIMIT,
    LARGE_BUFFER_LIMIT,
    UNFINISHED,
    MetalStep,
    metal_step,
)
from mlx_mmfree.evaluation.audit.skeleton import presets, skeleton
from mlx_mmfree.layers.attention.key_values import GROWTH_STEP
from mlx_mmfree.layers.attention.mixer import SelfAttention
from mlx_mmfree.ops.attention.metal_step import parts_of

SHAPES = (
    *("bitnet-2b-4t", "falcon3-1b", "falcon3-3b", "falcon3-10b", "llama3-8b-1.58"),
    *("ternary-bonsai-1.7b", "ternary-bonsai-8b", "ternary-bonsai-27b"),
)
TOKENS = (4096, 32768)
LIMITS = {"base": BUFFER_LIMIT, "Max": LARGE_BUFFER_LIMIT}


class Moved(NamedTuple):
    """A decoded token of a shape.

    Attributes:
        buffers: Command buffers with a tail.
        waiting_buffers: Those where a row waits for the next step.
        written_last: Bytes of keys and values that are moved, of those that attention must read, if the
            cache is written after it was read.
        row_waits: If a token's row stays outside of it until the next step writes it.
        tail: With a tail, with its share of what a full one takes. Growing counts in all three.
    """

    buffers: int
    waiting_buffers: int
    written_last: float
    row_waits: float
    tail: float


@cache
def _step_of(shape: str, tokens: int) -> tuple[MetalStep, int]:
    """The step, and the bytes of sums that the parts of heads pass on for 80 cores."""
    model = skeleton(presets()[shape])
    step, sums = metal_step(model, tokens), 0
    for mixer in model.token_mixers:
        if isinstance(mixer, SelfAttention):
            parts = parts_of(mixer.num_heads, tokens, (80,))
            sums += 2 * 4 * mixer.num_heads * parts * (mixer.head_dim + 2)
    return step, sums


def moved(shape: str, tokens: int, limit: int) -> Moved:
    step, sums = _step_of(shape, tokens)
    capacity = -(-(tokens + 1) // GROWTH_STEP) * GROWTH_STEP
    row = sum(step.caches) // capacity
    # an update of keys and one of values, each of which finds its slot first
    waiting = [
        each._replace(launches=each.launches + 4) if each.of_state >= capacity else each
        for each in step.operations
    ]
    buffers, waiting_buffers = (
        each.command_buffers(limit) for each in (step, MetalStep(waiting, 0, 0, ()))
    )
    copied = 2 * sum(step.caches)
    others = row + step.growth + sums

    def share(more: int) -> float:
        return 1 + more / (tokens * row)

    return Moved(
        buffers,
        waiting_buffers,
        share(others + copied),
        share(others + (copied if waiting_buffers <= UNFINISHED else 0)),
        share(sums + step.moved(limit)),
    )


def report() -> str:
    """A table of all shapes."""
    lines = [
        "Bytes of keys and values that a token moves, of those that attention must read:\n",
        "| shape, tokens, chip | buffers | written last | row waits | tail |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for shape in SHAPES:
        for tokens in TOKENS:
            for chip, limit in LIMITS.items():
                found = moved(shape, tokens, limit)
                buffers = f"{found.buffers} ({found.waiting_buffers} where a row waits)"
                cells = [f"{shape}, {tokens:,}, {chip}", buffers]
                cells += [f"{each:.2f}" for each in found[2:]]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
