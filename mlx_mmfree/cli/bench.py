"""`mmfree bench`: measures matrix products, training and models against the limits of this machine."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MeasurementError, UsageError
from .parts import bench_images, bench_mixers, bench_serve, bench_train
from .parts.bench_table import graph_lines, report_lines, starting_lines
from .parts.command import CommandParser, check_writable, command
from .parts.flags import positive
from .parts.loading import DTYPES, add_latent_flag, check_revision
from .parts.shapes import ShapeParser, add_config_flag, matrix_shape, read_config

if TYPE_CHECKING:
    from ..evaluation.benchmark import BenchmarkSettings, ModelChoice, Report

HELP = "measure the speed of this machine and of models on it"

_SETTINGS = ("processes", "rounds", "rows", "prompt_tokens", "positions", "decoded_tokens")
_HEAD_BITS = (4, 6, 8, 16)

_OPTIONAL_PACKAGES = (
    ("plot", "matplotlib", "matplotlib"),
    ("compare", "llama_cpp", "llama-cpp-python"),
    ("compare", "gguf", "gguf"),
)
"""Flags, the modules that they need, and the packages of those."""

_OTHERS: dict[str, tuple[Any, str]] = {
    "train": (bench_train, "training steps, beside PyTorch if wanted"),
    "images": (bench_images, "models of images, beside timm if wanted"),
    "mixers": (bench_mixers, "token mixers against the length of the sequence"),
    "serve": (bench_serve, "servers with many clients, and parked sessions"),
}
"""Measurements with flags of their own."""


def build_parser() -> argparse.ArgumentParser:
    parser = ShapeParser(prog="mmfree bench", description=__doc__)
    others = parser.add_subparsers(
        title="other measurements", metavar=", ".join(_OTHERS), parser_class=CommandParser
    )
    for name, (module, what) in _OTHERS.items():
        other = module.build_parser()
        others.add_parser(
            name,
            prog=other.prog,
            description=other.description,
            help=what,
            parents=[other],
            add_help=False,
        )
    _add_model_flags(parser.add_argument_group("models"))
    _add_amount_flags(parser.add_argument_group("amount"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="PNG file for the roofline; needs matplotlib"
    )
    return parser


def _add_model_flags(group: Any) -> None:
    add_config_flag(group, "models to measure with random weights", nargs="+", default=[])
    group.add_argument(
        "--head-bits",
        type=int,
        choices=_HEAD_BITS,
        nargs="+",
        default=[6],
        help="with random weights: bits of an output head that is not ternary (6)",
    )
    group.add_argument("--model", help="folder or Hub repository of a model to measure")
    group.add_argument("--revision", help="branch, tag or commit of the Hub repository")
    add_latent_flag(group)
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="float type to compute in; default: that of the checkpoint, or of the published files of "
        "a configuration, else float32",
    )
    group.add_argument(
        "--compare",
        choices=("llama.cpp",),
        help="also measure llama.cpp with TQ2_0 weights in the shape of BitNet-2B-4T; needs "
        "llama-cpp-python and gguf",
    )


def _add_amount_flags(group: Any) -> None:
    group.add_argument(
        "--threads",
        type=positive,
        nargs="+",
        help="numbers of threads of a CPU (1 and all processors)",
    )
    group.add_argument(
        "--processes",
        type=positive,
        help="number of fresh processes for each figure (8, on a GPU 3)",
    )
    group.add_argument("--rounds", type=positive, help="number of measurements in each process (5)")
    group.add_argument(
        "--prompt-tokens", type=positive, nargs="+", help="lengths of the prompts to read (128 512)"
    )
    group.add_argument(
        "--positions",
        type=positive,
        nargs="+",
        help="numbers of tokens after which decoding is measured (16 512 2048)",
    )
    group.add_argument(
        "--decoded-tokens", type=positive, help="number of tokens decoded in a measurement (16)"
    )
    for name, what in (("products", "ternary products and heads"), ("training", "a training step")):
        group.add_argument(
            f"--{name}",
            action=argparse.BooleanOptionalAction,
            default=True,
            help=f"whether to measure {what}; default: yes",
        )
    group.add_argument(
        "--shapes",
        type=matrix_shape,
        nargs="+",
        metavar="OUTPUTSxINPUTS",
        help="shapes of ternary matrices to measure, without heads, instead of the usual ones",
    )
    group.add_argument(
        "--rows", type=positive, nargs="+", help="numbers of tokens multiplied at a time (1 128)"
    )
    group.add_argument(
        "--walk-mb",
        type=positive,
        help="megabytes of all copies of a matrix (537); few of them stay in a cache",
    )
    group.add_argument(
        "--host",
        action="store_true",
        help="measure only what Python costs: building the graph of a token for each --config, and "
        "starting a program; also counts the kernel texts that Metal compiles",
    )
    group.add_argument(
        "--quick",
        action="store_true",
        help="try the command in seconds; the figures say nothing about speed",
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in _OTHERS:
        return _OTHERS[given[0]][0].main(given[1:])
    args = build_parser().parse_args(given)
    _check(args)
    if args.host:
        return _host(args)
    from ..evaluation.benchmark import benchmark, join

    reports = benchmark(
        _settings(args),
        _threads(args),
        products=args.products,
        training=args.training,
        models=_models(args),
        compare=args.compare is not None,
    )
    stops: list[BaseException] = []
    whole = join(_until_stopped(reports, stops), _ignore if args.json else _show)
    if args.plot is not None and whole.figures:
        from ..evaluation.benchmark_plot import plot_roofline

        plot_roofline(whole, args.plot)
    if args.json:
        print(json.dumps(whole.to_json() | {"is_complete": not stops}))
    for stop in stops:
        raise stop
    return 0


def _threads(args: argparse.Namespace) -> list[int]:
    """The numbers of threads to measure with, 0 for a GPU."""
    from ..ops.backend.dispatch import on_cpu
    from ..platform.threads import thread_count

    if on_cpu():
        return args.threads or sorted({1, thread_count()})
    if args.threads:
        raise UsageError(
            f"[bench] 'threads' must be left out where a GPU computes but got {args.threads[0]}."
        )
    return [0]


def _host(args: argparse.Namespace) -> int:
    from ..evaluation.benchmark_host import graph_cost, start_seconds

    rounds = 1 if args.quick else args.rounds or 20
    costs = [graph_cost(name, read_config("bench", name), rounds) for name in args.config]
    starts = start_seconds(min(rounds, 5))
    if args.json:
        print(json.dumps({"graphs": [cost.to_json() for cost in costs], "starts": starts}))
    else:
        graphs = [line for cost in costs for line in graph_lines(cost)]
        print("\n".join([*graphs, *starting_lines(starts)]))
    return 0


def _until_stopped(reports: "Iterator[Report]", stops: list[BaseException]) -> "Iterator[Report]":
    """Yields the reports up to Ctrl-C or a failure, which `stops` gets: what was measured is kept."""
    try:
        yield from reports
    except (KeyboardInterrupt, MeasurementError) as stop:
        stops.append(stop)


def _check(args: argparse.Namespace) -> None:
    if args.host and (args.model is not None or args.plot is not None or args.compare is not None):
        raise UsageError(
            "[bench] 'host' must come with 'config' alone but came with model, plot or compare. Leave "
            "those out."
        )
    check_revision(args)
    for flag, module, package in _OPTIONAL_PACKAGES:
        if getattr(args, flag) is not None and find_spec(module) is None:
            raise UsageError(
                f"[bench] '{flag}' needs the package {package}, which is not installed. Install it: "
                f"pip install {package}"
            )
    if args.plot is not None:
        check_writable("[bench] 'plot'", args.plot)


def _settings(args: argparse.Namespace) -> "BenchmarkSettings":
    from ..evaluation.benchmark import ON_GPU, QUICK, BenchmarkSettings
    from ..ops.backend.dispatch import on_cpu

    usual = BenchmarkSettings() if on_cpu() else ON_GPU
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in _SETTINGS
        if (value := getattr(args, name)) is not None
    }
    if args.shapes:
        given |= {"shapes": tuple(args.shapes), "heads": ()}
    if args.walk_mb:
        given["walk_bytes"] = args.walk_mb * 10**6
    return replace(QUICK if args.quick else usual, **given)


def _models(args: argparse.Namespace) -> list["ModelChoice"]:
    from ..evaluation.benchmark import ModelChoice
    from ..evaluation.benchmark_weights import has_dense_head
    from ..hub.checkpoint.load import open_model
    from ..models import check_causal

    choices = []
    for name in args.config:
        config = read_config("bench", name)
        if not has_dense_head(config):
            choices.append(ModelChoice(name, config, dtype=args.dtype))
            continue
        for bits in args.head_bits:
            title = f"{name}, {bits}-bit head"
            choices.append(ModelChoice(title, config, head_bits=bits, dtype=args.dtype))
    if args.model is not None:
        # downloads the model, if need be, before anything is measured
        check_causal(open_model(args.model, args.revision, latent=args.latent).model)
        choices.append(
            ModelChoice(
                args.model,
                checkpoint=args.model,
                revision=args.revision,
                latent=args.latent,
                dtype=args.dtype,
            )
        )
    return choices


def _show(report: "Report") -> None:
    for line in report_lines(report):
        print(line, flush=True)


def _ignore(_: "Report") -> None:
    pass
