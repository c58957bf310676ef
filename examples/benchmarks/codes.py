"""Times products with codes of 1 and 2 bits beside trits and floats, in turns.

python codes.py [--quick] [--outputs 1024] [--inputs 1024] [--rows 1 64] [--seconds 4]
    [--limits | --rotation]

A rate comes from the fastest of many calls, which other programs disturb least. Floats are multiplied by
the BLAS library of MLX. The gradient is the one by the input. The trits of BitNet meet activations that
are rounded to 8 bits as a whole; "8-bit input" rounds them in each 32.

With --limits, one row meets matrices of 64 MiB in turn, beside a plain read of them by the same threads,
and many rows meet one matrix, beside floats. With --rotation, the rotations of a token in a gated delta
layer of Bonsai 2 27B stand beside its products.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import mlx.core as mx

from mlx_mmfree.cli.parts.terminal import markdown
from mlx_mmfree.evaluation.benchmark import Limits
from mlx_mmfree.ops import (
    AffineFormat,
    Projection,
    bit_linear,
    dense_matmul,
    hadamard,
    pack_ternary,
    ternary_matmul,
)
from mlx_mmfree.platform.memory_reader import memory_reader

GROUP = 128
MANY_ROWS = 128
COLD_BYTES = 64 << 20
"""More bytes than the caches of most processors hold."""
QUICK_COLD_BYTES = 64 << 10
READ_SHARE = 0.7
"""The share of a plain read that a product is measured by."""

Calls = Mapping[str, Callable[[], object]]


def gradient(multiply: Callable[[mx.array], mx.array], x: mx.array, dy: mx.array) -> mx.array:
    """The gradient of the input alone."""
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
        format = AffineFormat(scales, biases, GROUP, bits)
        multiply = partial(dense_matmul, weight=codes, quantization=format)
        calls[name] = partial(multiply, x)
        calls[f"{name}, 8-bit input"] = partial(multiply, x, activation_bits=8)
        calls[f"gradient, {name}"] = partial(gradient, multiply, x, dy)
    calls["trits"] = lambda: ternary_matmul(x, trits)
    calls["trits, BitNet"] = lambda: bit_linear(x, [Projection(trits, mx.ones(1), None)])
    calls["floats (BLAS)"] = lambda: x @ weight.T
    calls["gradient, floats"] = lambda: dy @ weight
    return calls


def fastest(calls: Calls, seconds: float) -> dict[str, float]:
    """The least seconds of each call, all in turns."""
    found = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + seconds
    while True:
        for name, call in calls.items():
            start = time.perf_counter()
            mx.eval(call())
            found[name] = min(found[name], time.perf_counter() - start)
        if time.perf_counter() >= end:
            return found


def limits(outputs: int, inputs: int, seconds: float, cold_bytes: int) -> None:
    """Prints the rates of each kind of code with the limit that the machine sets."""
    macs, rows = outputs * inputs, MANY_ROWS
    x, dy = mx.random.normal((rows, inputs)), mx.random.normal((rows, outputs))
    weight = mx.random.normal((outputs, inputs))
    for bits in (1, 2):
        count = max(cold_bytes * 8 // (macs * bits), 1)
        matrices = [
            mx.quantize(mx.random.normal(weight.shape), group_size=GROUP, bits=bits)
            for _ in range(count)
        ]
        mx.eval(x, dy, weight, matrices)
        multiply = [
            partial(
                dense_matmul, weight=codes, quantization=AffineFormat(scales, biases, GROUP, bits)
            )
            for codes, scales, biases in matrices
        ]
        with memory_reader() as reader:
            found = Limits(reader)
            read = float("inf")

            def one_row(activation_bits: int | None = None) -> list[mx.array]:
                return [each(x[:1], activation_bits=activation_bits) for each in multiply]  # noqa: B023

            calls: Calls = {
                "one row": one_row,
                "one row, 8-bit input": partial(one_row, activation_bits=8),
                "rows": lambda: multiply[0](x),  # noqa: B023
                "gradient": lambda: gradient(multiply[0], x, dy),  # noqa: B023
                "floats": lambda: x @ weight.T,
            }
            rates: dict[str, float] = {}
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                read = min(read, found.read_seconds([a for each in matrices for a in each]))
                for name, took in fastest(calls, 0.0).items():
                    size = macs * (count if name.startswith("one row") else rows)
                    rates[name] = max(rates.get(name, 0.0), size / took / 1e9)
        plain = macs * count / read / 1e9
        lower = min(READ_SHARE * plain, rates["floats"])
        for name in ("one row", "one row, 8-bit input", "rows", "gradient"):
            limit = lower if name.startswith("one row") else rates["floats"]
            shown = f"{rates[name]:8.1f} GMAC/s, {rates[name] / limit:4.0%} of {limit:.1f}"
            print(f"{bits} bits  {name:22} {shown}")
        print(f"{bits} bits  plain read {plain:.1f}, floats {rates['floats']:.1f} GMAC/s")


# the inputs and outputs of what is rotated: queries to gate, output, gate and up, down
ROTATED = ((5120, 16384), (6144, 5120), (5120, 34816), (17408, 5120))
BLOCK = 1024
QUICK_ROTATED = ((BLOCK, 64),)


def rotations(seconds: float, shapes: Sequence[tuple[int, int]]) -> None:
    """Prints what the rotations of a token in a layer take, and its products with codes of 2 bits."""
    calls: dict[str, Callable[[], object]] = {}
    for number, (inputs, outputs) in enumerate(shapes):
        x, signs = mx.random.normal((1, inputs)), mx.ones((inputs,))
        codes, scales = (
            mx.zeros((outputs, inputs // 16), mx.uint32),
            mx.ones((outputs, inputs // GROUP)),
        )
        mx.eval(x, signs, codes, scales)
        calls[f"rotation {number}"] = partial(hadamard, x, BLOCK, signs)
        calls[f"product {number}"] = partial(
            dense_matmul, x, codes, AffineFormat(scales, scales, GROUP, 2)
        )
    found = fastest(calls, seconds)
    both = [
        sum(took for name, took in found.items() if name.startswith(kind))
        for kind in ("rotation", "product")
    ]
    print(
        f"rotations {both[0] * 1e6:.0f} us, products {both[1] * 1e6:.0f} us: {both[0] / sum(both):.1%}"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Times products with codes of 1 and 2 bits.")
    parser.add_argument("--outputs", type=int, default=1024)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--seconds", type=float, default=4.0)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--limits", action="store_true", help="beside a plain read and floats")
    shown.add_argument("--rotation", action="store_true", help="of a layer, beside its products")
    parser.add_argument(
        "--quick", action="store_true", help="try it with small matrices, in seconds"
    )
    return parser


def main() -> None:
    args = build_parser().parse_args()
    if args.quick:
        args.outputs, args.inputs, args.rows, args.seconds = 64, GROUP, [1, 3], 0.05
    if args.limits:
        cold_bytes = QUICK_COLD_BYTES if args.quick else COLD_BYTES
        limits(args.outputs, args.inputs, args.seconds, cold_bytes)
        return
    if args.rotation:
        rotations(args.seconds, QUICK_ROTATED if args.quick else ROTATED)
        return
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
