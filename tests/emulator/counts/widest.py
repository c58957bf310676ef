"""Kernels at their widest shapes: threads, registers, threadgroup memory and size."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlx_mmfree.ops.backend import launch
from mlx_mmfree.ops.hadamard import MAX_BLOCK
from tests.emulator import apple_gpu
from tests.emulator.apple_gpu import Code

rotation = import_module("mlx_mmfree.ops.hadamard")
rule = import_module("mlx_mmfree.ops.gated_delta_rule.metal")
attention = import_module("mlx_mmfree.ops.gated_linear_attention.metal")

MOST_MEMORY = 32768
"""Bytes of threadgroup memory that a Metal GPU has."""

Launched = list[tuple[str, str, int]]


@contextmanager
def launches() -> Iterator[Launched]:
    """Records the launches inside the `with` block: names, texts and the threads of a threadgroup."""
    found: Launched = []
    usual = launch.launch

    def recorded(kernel: Any, **call: Any) -> list[mx.array]:
        with launch.recording() as texts:
            results = usual(kernel, **call)
        ((name, text),) = texts.items()
        x, y, z = call["threadgroup"]
        found.append((name, text, x * y * z))
        return results

    with patch.object(launch, "launch", recorded):
        yield found


def _rotations() -> None:
    x, signs = mx.zeros((1, 2 * MAX_BLOCK), mx.float16), mx.ones((2 * MAX_BLOCK,))
    rotation._in_one_launch(x, signs, block=MAX_BLOCK, inverse=False)
    eps = [signs.astype(mx.float16), mx.array(1e-6)]
    rotation._launch(rotation._norm_kernel, x, signs, MAX_BLOCK, others=eps)
    rotation._launch(rotation._sum_kernel, x, signs, MAX_BLOCK, others=[*eps, x])
    gates = mx.zeros((1, 4 * MAX_BLOCK), mx.float16)
    rotation._launch(rotation._gate_kernel, gates, signs, MAX_BLOCK)


def _delta_rule() -> None:
    for keys, values in ((rule.MAX_KEYS, rule.MAX_KEYS), (256, 256), (128, 128)):
        row, state = mx.zeros((1, 2, 1, keys)), mx.zeros((1, 2, keys, values))
        v, one = mx.zeros((1, 2, 1, values)), mx.zeros((1, 2, 1, 1))
        for gate in (one, row):
            rule._computed(row, row, v, row, gate, state)
            rule._computed(row, row, v, row, gate, state, row)


def _chunks_of_the_delta_rule() -> None:
    for keys in (rule.MAX_KEYS, 256, 128):
        row, state = mx.zeros((1, 2, rule.MAX_LENGTH + 1, keys)), mx.zeros((1, 2, keys, keys))
        for gate in (row[..., :1], row):
            rule._computed(row, row, row, row, gate, state)
            rule._computed(row, row, row, row, gate, state, row)


def _linear_attention() -> None:
    for keys in (attention.MAX_KEYS, 256):
        state = mx.zeros((1, 2, keys, keys))
        for length in (1, attention.MAX_LENGTH + 1):
            row = mx.zeros((1, 2, length, keys))
            for gates in ((), (row[..., :1],), (row,)):
                attention._computed(row, row, row, state, *gates)


WIDEST: tuple[Callable[[], None], ...] = (
    _rotations,
    _delta_rule,
    _chunks_of_the_delta_rule,
    _linear_attention,
)


def counted() -> Iterator[tuple[str, int, Code]]:
    """The name, the threads and the machine code of each kernel."""
    for call in WIDEST:
        with launches() as found:
            call()
        # some are launched for several shapes
        for name, text, threads in dict.fromkeys(found):
            short = name.removeprefix("custom_kernel_").partition("_float")[0].rstrip("_")
            yield short, threads, apple_gpu.machine_code(name, text, (threads, 1, 1))


def report() -> str:
    lines = [
        "| kernel | threads launched | at most | stack, spills | threadgroup memory | bytes |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| `{name}` | {threads} | {code.threads} | {code.stack}, {code.spills} | {code.shared:,} "
        f"| {code.bytes:,} |"
        for name, threads, code in counted()
    ]
    return "\n".join(lines)
