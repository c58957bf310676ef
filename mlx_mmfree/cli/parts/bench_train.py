"""`mmfree bench train`: measures training steps of a Llama model on a CPU, beside PyTorch if wanted."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...errors import UsageError
from .command import CommandParser, command
from .flags import positive
from .terminal import aligned

if TYPE_CHECKING:
    from ...training.benchmark import Figure, Setup

_SETUP = {
    "hidden_size": "model dims",
    "layers": "number of blocks",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "intermediate_size": "width of the feed-forward",
    "vocab_size": "number of tokens in the vocabulary",
    "batch_size": "sequences in a step",
    "length": "tokens in a sequence",
    "steps": "steps that are timed in each process",
}
_QUICK = {
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "intermediate_size": 48,
    "vocab_size": 64,
    "batch_size": 2,
    "length": 8,
    "steps": 1,
}


def build_parser() -> CommandParser:
    parser = CommandParser(prog="mmfree bench train", description=__doc__)
    parser.add_argument(
        "--compare",
        choices=("torch",),
        help="also train the same dense model with PyTorch, from the same weights and batches; needs "
        "torch",
    )
    parser.add_argument(
        "--threads", type=positive, nargs="+", help="numbers of threads (1 and all processors)"
    )
    parser.add_argument(
        "--processes",
        type=positive,
        default=3,
        help="number of fresh processes for each program, which take turns (3)",
    )
    for name, what in _SETUP.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help=what)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try the command in seconds; the figures say nothing about speed",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.compare and find_spec("torch") is None:
        raise UsageError(
            "[bench] 'compare' needs the package torch, which is not installed. Install it: pip "
            "install torch"
        )
    from ...platform.threads import thread_count
    from ...training.benchmark import benchmark_training

    setup = _setup(args)
    programs = ["dense", "ternary", *([args.compare] if args.compare else [])]
    threads = args.threads or sorted({1, thread_count()})
    processes = 1 if args.quick else args.processes
    figures = benchmark_training(setup, programs, threads, processes)
    if args.json:
        found = [asdict(figure) for figure in figures]
        print(json.dumps({"setup": asdict(setup), "figures": found}))
        return 0
    for line in _lines(list(_announced(figures))):
        print(line)
    return 0


def _setup(args: argparse.Namespace) -> "Setup":
    from ...training.benchmark import Setup

    known = asdict(Setup()) | (_QUICK if args.quick else {})
    given: dict[str, int] = {name: getattr(args, name) or known[name] for name in _SETUP}
    for name, divisor in (("hidden_size", "heads"), ("heads", "kv_heads")):
        if given[name] % given[divisor]:
            raise UsageError(
                f"[bench] '{name}' must be a multiple of {divisor}, {given[divisor]}, but got "
                f"{given[name]}. Change one of them."
            )
    if given["hidden_size"] // given["heads"] % 2:
        raise UsageError(
            "[bench] 'hidden_size' must give each head an even number of dims but got "
            f"{given['hidden_size']} for {given['heads']} heads. Change one of them."
        )
    return Setup(**given)


def _announced(figures: "Iterator[Figure]") -> "Iterator[Figure]":
    """Yields the figures with a progress bar, where stderr is a terminal."""
    from tqdm import tqdm

    with tqdm(unit="figure", disable=None, dynamic_ncols=True) as bar:
        for figure in figures:
            bar.update()
            yield figure


def _lines(figures: "Sequence[Figure]") -> list[str]:
    rows = [["threads", "program", "tokens/s", "best", "tokens/processor s", "of dense"]]
    for figure in figures:
        dense = next(
            each for each in figures if each.program == "dense" and each.threads == figure.threads
        )
        share = figure.tokens_per_processor_second / dense.tokens_per_processor_second
        rows.append(
            [
                str(figure.threads),
                figure.program,
                f"{figure.tokens_per_second:,.0f}",
                f"{figure.best:,.0f}",
                f"{figure.tokens_per_processor_second:,.0f}",
                f"{100 * share:.0f} %",
            ]
        )
    return aligned(rows, left=2)
