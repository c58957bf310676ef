"""Shows where the time of a prompt and of a decoded token goes on a CPU: by operation, and between them.

The operations are this library's compiled kernels, timed where they run, on the thread that runs them
for MLX. The rest of the time are MLX's own operations and what lies between any two.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from time import perf_counter, thread_time
from typing import Any

import mlx.core as mx
from random_models import add_config_flag, has_dense_head, random_model

from mlx_mmfree import native
from mlx_mmfree.cli.parts.command import command
from mlx_mmfree.cli.parts.flags import positive
from mlx_mmfree.cli.parts.parser import CommandParser
from mlx_mmfree.errors import UsageError
from mlx_mmfree.evaluation.audit.skeleton import read_config
from mlx_mmfree.evaluation.benchmark import (
    Limits,
    head_macs,
    measure,
    read_weights,
    ternary_macs,
)
from mlx_mmfree.generation.decode import Decoding
from mlx_mmfree.generation.reader import prefill
from mlx_mmfree.ops.backend.dispatch import on_cpu
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.platform.memory_reader import memory_reader
from mlx_mmfree.platform.threads import thread_count

HEAD_BITS = 6


@dataclass(frozen=True)
class Part:
    """The share of one operation in the time of a prompt or a token.

    Attributes:
        runs: How often it ran.
        seconds: Of all runs.
        waited: Of these, the mean time for which a thread waited for the others.
    """

    runs: int
    seconds: float
    waited: float


@dataclass(frozen=True)
class Breakdown:
    """The time of a prompt or of a token.

    Attributes:
        name: What was measured.
        threads: How many computed.
        seconds: Of the whole.
        limit_seconds: Of a plain read of the weights, or of the arithmetic of a prompt; of several texts
            whichever of the two is longer.
        host_seconds: Processor time of the thread that prepares the operations.
        parts: By the names of the operations.
    """

    name: str
    threads: int
    seconds: float
    limit_seconds: float
    host_seconds: float
    parts: Mapping[str, Part]


def measure_parts(
    name: str,
    config: Mapping[str, Any],
    prompt_tokens: int,
    position: int,
    decoded_tokens: int,
    rounds: int,
    rows: int = 1,
    head_bits: int | None = None,
) -> list[dict[str, Any]]:
    """Measures a prompt and decoded tokens of a model with random weights.

    Args:
        name: Name of the model.
        config: Configuration, as in a `config.json` of the Hub.
        prompt_tokens: Length of the prompt.
        position: Number of tokens before those that are decoded.
        decoded_tokens: Number of tokens in each round.
        rounds: Number of measurements, after one that does not count.
        rows: Number of texts that are decoded together.
        head_bits: Bits of a head that is not ternary.
    """
    keep_freed_memory()
    model = random_model(config, head_bits=head_bits)
    prompt = mx.random.randint(0, model.vocab_size, (1, prompt_tokens))
    state = prefill(model, mx.random.randint(0, model.vocab_size, (rows, position)))
    mx.eval(prompt, state)
    with memory_reader() as reader:
        found = Limits(reader)

        def arithmetic_seconds(inputs: int, logits: int) -> float:
            macs = ternary_macs(model) * inputs + head_macs(model) * logits
            return macs / (found.multiply_rate() or float("inf"))

        def step_seconds() -> float:
            read = found.read_seconds(read_weights(model))
            return read if rows == 1 else max(read, arithmetic_seconds(rows, rows))

        def read() -> None:
            hidden, new = model.hidden(prompt)
            mx.eval(model.logits(hidden[:, -1:]), new)

        decoding = Decoding(model, mx.repeat(prompt[:, :1], rows, axis=0), state=state)
        token = "token" if rows == 1 else f"token of {rows} texts"
        breakdowns = [
            _breakdown(
                f"{name}: prompt of {prompt_tokens}",
                read,
                1,
                lambda: arithmetic_seconds(prompt_tokens, 1),
                rounds,
            ),
            _breakdown(
                f"{name}: {token} after {position}",
                decoding.step,
                decoded_tokens,
                step_seconds,
                rounds,
            ),
        ]
        decoding.step(is_last=True)
    return [asdict(breakdown) for breakdown in breakdowns]


def _breakdown(
    name: str, run: Callable[[], Any], count: int, limit: Callable[[], float], rounds: int
) -> Breakdown:
    """The fastest round of `count` calls, which other programs have disturbed least."""
    times, threads = native.kernels().operation_times, thread_count()
    found = []
    for _ in range(rounds + 1):
        limit_seconds = limit()
        run()
        # a token is computed while the one before is returned
        mx.synchronize()
        times(True)
        start, host = perf_counter(), thread_time()
        for _ in range(count):
            run()
        mx.synchronize()
        whole, host = perf_counter() - start, thread_time() - host
        parts = {
            operation: Part(round(runs / count), seconds / count, waited / count / threads)
            for operation, (runs, seconds, waited) in times(False).items()
        }
        found.append(Breakdown(name, threads, whole / count, limit_seconds, host / count, parts))
    # the first round starts threads and touches pages
    return fastest(found[1:])


def fastest(found: Sequence[Breakdown]) -> Breakdown:
    """The fastest one, beside the fastest limit."""
    limit_seconds = min(each.limit_seconds for each in found)
    return replace(min(found, key=attrgetter("seconds")), limit_seconds=limit_seconds)


def breakdown_lines(found: Breakdown) -> list[str]:
    """A headline, then a line for each operation, the slowest first, and for the rest."""
    threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
    limit = found.limit_seconds / found.seconds
    lines = [
        f"{found.name}, {threads}: {found.seconds * 1e3:.2f} ms, its limit is {limit:.0%} of that"
    ]

    def line(name: str, seconds: float, note: str = "") -> str:
        return f"  {name:<36} {seconds * 1e3:>8.2f} ms {seconds / found.seconds:>5.0%}{note}"

    for name, part in sorted(found.parts.items(), key=lambda item: -item[1].seconds):
        waited = f", of which threads waited {part.waited / found.seconds:.0%}"
        shown = waited if found.threads > 1 else ""
        lines.append(line(f"{name}, {part.runs} runs", part.seconds, shown))
    rest = found.seconds - sum(part.seconds for part in found.parts.values())
    lines.append(line("MLX's operations, and between all", rest))
    lines.append(line("meanwhile, to prepare operations", found.host_seconds, " of one core"))
    return lines


def build_parser() -> CommandParser:
    parser = CommandParser(prog="breakdown.py", description=__doc__)
    add_config_flag(parser)
    numbers: dict[str, Any] = {"type": positive}
    parser.add_argument(
        "--threads", nargs="+", **numbers, help="numbers of threads (1, and as many as usual)"
    )
    parser.add_argument(
        "--prompt-tokens", default=128, **numbers, help="length of the prompt (128)"
    )
    parser.add_argument(
        "--position", default=16, **numbers, help="number of tokens before the decoded ones (16)"
    )
    parser.add_argument(
        "--rows", default=1, **numbers, help="number of texts that are decoded together (1)"
    )
    parser.add_argument(
        "--decoded-tokens", default=8, **numbers, help="number of tokens in each round (8)"
    )
    parser.add_argument(
        "--rounds",
        default=20,
        **numbers,
        help="measurements in each process, the fastest counts (20)",
    )
    parser.add_argument("--processes", default=3, **numbers, help="number of fresh processes (3)")
    parser.add_argument("--quick", action="store_true", help="measure once, a prompt of 8")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of lines"
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if not on_cpu() or (reason := native.unavailable()):
        why = "a GPU computes here" if not on_cpu() else reason
        raise UsageError(f"[bench] the times of CPU kernels cannot be measured: {why}")
    shown = []
    for name in args.config or ["mmfreelm-370m", "bitnet-2b-4t"]:
        for found in _measured(name, args):
            shown.append(asdict(found))
            if not args.json:
                print("\n".join(breakdown_lines(found)), flush=True)
    if args.json:
        print(json.dumps(shown))
    return 0


def _measured(name: str, args: argparse.Namespace) -> list[Breakdown]:
    """The breakdowns of one model, the threads in turn in each round of processes."""
    config = read_config("bench", name)
    amounts: dict[str, Any] = {
        "prompt_tokens": args.prompt_tokens,
        "position": args.position,
        "decoded_tokens": args.decoded_tokens,
        "rounds": args.rounds,
        "rows": args.rows,
    }
    processes = args.processes
    if args.quick:
        processes, amounts = 1, amounts | {"prompt_tokens": 8, "decoded_tokens": 2, "rounds": 1}
    call = {"name": name, "config": config, **amounts}
    if has_dense_head(config):
        call["head_bits"] = HEAD_BITS
    groups: dict[tuple[str, int], list[Breakdown]] = {}
    for _ in range(processes):
        for threads in args.threads or sorted({1, thread_count()}):
            for each in measure("breakdown:measure_parts", call, threads):
                parts = {part: Part(**values) for part, values in each.pop("parts").items()}
                found = Breakdown(**each, parts=parts)
                groups.setdefault((found.name, found.threads), []).append(found)
    return [fastest(group) for group in groups.values()]


if __name__ == "__main__":
    sys.exit(main())
