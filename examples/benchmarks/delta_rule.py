"""Times the delta rule beside the loops of transformers in torch and of mlx-lm, in turns.

python delta_rule.py [--torch-python PYTHON] [--length 4096] [--rounds 5] [--quick]

`--torch-python` names an interpreter that has torch and transformers. Without one, and without mlx-lm,
their columns are left out. Seconds are the least of the rounds. A state that is copied is what a decoded
token cannot be faster than.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADS, DIMS = 8, 128
STATE_MIB, QUICK_STATE_MIB = 64, 1
PAIRS = 31


def best(call: Callable[[], Any], rounds: int) -> float:
    """The least seconds of a call."""
    call()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def of_torch(length: int, rounds: int) -> dict[str, float]:
    """The chunked fallback of transformers, forward alone and with gradients."""
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    torch.set_num_threads(2)
    torch.manual_seed(0)
    shape = (1, length, HEADS, DIMS)
    q, k = (torch.nn.functional.normalize(torch.randn(shape), dim=-1) for _ in range(2))
    given = [q, k, torch.randn(shape), -torch.rand(shape[:3]), torch.rand(shape[:3])]

    def forward() -> Any:
        return torch_chunk_gated_delta_rule(*given)[0]

    def backward() -> None:
        for x in given:
            x.grad = None
            x.requires_grad_(True)
        forward().sum().backward()

    with torch.no_grad():
        found = {"forward": best(forward, rounds)}
    return found | {"with gradients": best(backward, rounds)}


def inputs(length: int) -> tuple[Any, ...]:
    import mlx.core as mx

    rows = (1, HEADS, length)
    q, k, v = (mx.random.normal((*rows, DIMS), key=mx.random.key(n)) for n in range(3))
    q, k = (x * mx.rsqrt(x.square().sum(axis=-1, keepdims=True)) for x in (q, k))
    f, beta = (mx.random.uniform(shape=(*rows, 1), key=mx.random.key(n)) for n in (3, 4))
    given = (q, k, v, beta, mx.exp(-f), mx.zeros((1, HEADS, DIMS, DIMS)))
    mx.eval(given)
    return given


def of_this_library(length: int, rounds: int) -> dict[str, float]:
    import mlx.core as mx

    from mlx_mmfree.ops import gated_delta_rule

    given = inputs(length)
    gradient = mx.grad(lambda *x: gated_delta_rule(*x)[0].sum(), argnums=list(range(len(given))))
    return {
        "forward": best(lambda: mx.eval(gated_delta_rule(*given)), rounds),
        "with gradients": best(lambda: mx.eval(gradient(*given)), rounds),
    }


def of_mlx_lm(length: int) -> dict[str, float]:
    import mlx.core as mx
    from mlx_lm.models.gated_delta import gated_delta_ops

    q, k, v, beta, f, state = inputs(length)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    f, beta = (x.swapaxes(1, 2)[..., 0] for x in (f, beta))
    return {"forward": best(lambda: mx.eval(gated_delta_ops(q, k, v, f, beta, state)), 1)}


def of_a_token(rounds: int, state_mib: int) -> float:
    """The rate of one position of many texts over the rate of copying its states, in the median."""
    import mlx.core as mx

    from mlx_mmfree.ops import gated_delta_rule

    texts = state_mib * 2**20 // (4 * HEADS * DIMS * DIMS)
    q, k, v, beta, f, _ = inputs(texts)
    q, k, v, beta, f = (x.reshape(texts, HEADS, 1, -1) for x in (q, k, v, beta, f))
    state, one = mx.random.normal((texts, HEADS, DIMS, DIMS)), mx.ones(())
    mx.eval(q, k, v, beta, f, state, one)
    return statistics.median(
        best(lambda: mx.eval(state * one), 1)
        / best(lambda: mx.eval(gated_delta_rule(q, k, v, beta, f, state)), 1)
        for _ in range(rounds)
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Times the delta rule beside other programs.")
    parser.add_argument("--torch-python", type=Path)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="try it with few positions, once")
    parser.add_argument("--torch-alone", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    pairs, state_mib = PAIRS, STATE_MIB
    if args.quick:
        args.length, args.rounds, pairs, state_mib = 64, 1, 1, QUICK_STATE_MIB
    if args.torch_alone:
        print(json.dumps(of_torch(args.length, args.rounds)))
        return
    found = {"this library": of_this_library(args.length, args.rounds)}
    if args.torch_python is not None:
        options = ["--length", str(args.length), "--rounds", str(args.rounds), "--torch-alone"]
        command = [str(args.torch_python), __file__, *options]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found["torch, chunked"] = json.loads(lines.splitlines()[-1])
        # once more, so that what else the machine did weighs on both
        again = of_this_library(args.length, args.rounds)
        found["this library"] = {
            name: min(seconds, again[name]) for name, seconds in found["this library"].items()
        }
    if importlib.util.find_spec("mlx_lm") is not None:
        found["mlx-lm, loop"] = of_mlx_lm(args.length)
    own = found["this library"]
    for program, seconds in found.items():
        for name, each in seconds.items():
            print(f"{program:16} {name:16} {each * 1e3:9.1f} ms {each / own[name]:7.2f} times")
    share = of_a_token(pairs, state_mib)
    print(f"a token of states of {state_mib} MiB: {share:.0%} of the rate of copying them")


if __name__ == "__main__":
    main()
