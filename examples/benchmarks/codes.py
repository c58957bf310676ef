"""Times products with codes of 1 and 2 bits beside trits and floats, in turns.

python codes.py [--outputs 1024] [--inputs 1024] [--rows 1 64] [--seconds 4]

A rate is that of the fastest of many calls, which other programs disturb least. Floats are multiplied by
the BLAS library of MLX. The gradient is the one by the input.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial

import mlx.core as mx

from mlx_mmfree.cli.parts.terminal import markdown
from mlx_mmfree.ops import AffineForm, dense_matmul, pack_ternary, ternary_matmul

GROUP = 128

Calls = Mapping[str, Callable[[], object]]


def gradient(multiply: Callable[[mx.array], mx.array], x: mx.array, dy: mx.array) -> mx.array:
    """That of the input alone."""
    return mx.vjp(multiply, [x], [dy])[1][0]


def products(rows: int, outputs: int, inputs: int) -> Calls:
    """The products of some rows, by their names."""
    x, dy = mx.random.normal((rows, inputs)), mx.random.normal((rows, outputs))
    weight = mx.random.normal((outputs, inputs))
    trits = pack_ternary(mx.sign(mx.round(weight)))
    mx.eval(x, dy, weight, trits)
    calls: dict[str, Callable[[], object]] = {}
    for name, bits in (("1 bit", 1), ("2 bits", 2)):
        codes, scales, biases = mx.quantize(weight, group_size=GROUP, bits=bits)
        mx.eval(codes, scales, biases)
        form = AffineForm(scales, biases, GROUP, bits)
        multiply = partial(dense_matmul, weight=codes, quantization=form)
        calls[name] = partial(multiply, x)
        calls[f"gradient, {name}"] = partial(gradient, multiply, x, dy)
    calls["trits"] = lambda: ternary_matmul(x, trits)
    calls["floats (BLAS)"] = lambda: x @ weight.T
    calls["gradient, floats"] = lambda: dy @ weight
    return calls


def fastest(calls: Calls, seconds: float) -> dict[str, float]:
    """The least seconds of each call, all in turns."""
    found = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            mx.eval(call())
            found[name] = min(found[name], time.perf_counter() - start)
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Times products with codes of 1 and 2 bits.")
    parser.add_argument("--outputs", type=int, default=1024)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--seconds", type=float, default=4.0)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    table = []
    for rows in args.rows:
        macs = rows * args.outputs * args.inputs
        found = fastest(products(rows, args.outputs, args.inputs), args.seconds)
        # gradients last
        names = sorted(found, key=lambda name: name.startswith("gradient"))
        table.append([str(rows), *(f"{macs / found[name] / 1e9:.0f}" for name in names)])
    print("Billions of multiply-accumulates a second")
    print(*markdown([["rows", *names], *table]), sep="\n")


if __name__ == "__main__":
    main()
