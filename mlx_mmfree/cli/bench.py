"""`mmfree bench`: measures how fast a model reads prompts and decodes, and what this machine allows.

`--config` scales some layers of a published shape by depth. `--bound` tells what an Apple chip allows.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MeasurementError, UsageError
from .parts.command import command
from .parts.flags import add_json_flag, positive
from .parts.loading import add_model_flags, checkpoint_of, model_source
from .parts.parser import CommandParser
from .parts.picture_flag import add_picture_flag, check_picture

if TYPE_CHECKING:
    from ..evaluation.benchmark import Figure

HELP = "measure how fast a model reads prompts and decodes on this machine"

_AMOUNTS: dict[str, Any] = {"processes": (3, 1), "rounds": (5, 1), "decoded_tokens": (16, 2)}
_AMOUNTS |= dict.fromkeys(("prompt_tokens", "positions"), ([512], [8]))
_PROGRAMS = dict.fromkeys(("--head-bits", "--training", "--products"), "products.py")
_PROGRAMS |= dict.fromkeys(("--shapes", "--rows", "--walk-mb"), "products.py")
_PROGRAMS |= {"train": "training.py", "images": "images.py", "mixers": "mixers.py"}
_PROGRAMS |= {"serve": "servers.py", "--compare": "beside_llama_cpp.py", "--host": "host.py"}
"""The measurements by programs of the clone."""


def build_parser() -> argparse.ArgumentParser:
    usual = "--model --prompt-tokens --positions --threads --bound --config --quick --json"
    usual += " --picture"
    parser = CommandParser(prog="mmfree bench", description=__doc__, usual=usual)
    add_model_flags(parser, takes_adapter=False)
    for name, count, what in (
        ("prompt-tokens", "+", "lengths of the prompts to read (512)"),
        ("positions", "+", "numbers of tokens after which decoding is measured (512)"),
        ("threads", "+", "numbers of threads of a CPU (all processors)"),
        ("decoded-tokens", None, "number of tokens decoded in a measurement (16)"),
        ("processes", None, "number of fresh processes for each figure, which is their median (3)"),
        ("rounds", None, "number of measurements in each process (5)"),
    ):
        parser.add_argument(f"--{name}", type=positive, nargs=count, help=what)
    parser.add_argument("--quick", action="store_true", help="only try the command, in seconds")
    _add_bound_flags(parser.add_argument_group("bound"))
    output = parser.add_argument_group("output")
    add_json_flag(output)
    add_picture_flag(output, what="draw the rates")
    return parser


def _add_bound_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--bound",
        metavar="CHIP",
        help="measure nothing, and tell how fast the model could run at most on this Apple chip, such "
        "as M2 Max, or M2 Max 30 with its number of GPU cores; the bound follows from the bandwidth, "
        "counted instructions and launches",
    )
    group.add_argument(
        "--config",
        help="instead of a model: a published shape (`mmfree audit --help` lists them) or a "
        "config.json, of which some layers of random weights are measured and scaled by depth",
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    _refuse_other_programs(given)
    args = build_parser().parse_args(given)
    _check(args)
    _check_bound(args)
    if args.bound is not None:
        return _show_bound(args)
    from ..platform.device import device_info
    from ..version import __version__

    function, subject, _ = _subject(args)
    device = device_info()
    machine: dict[str, Any] = {"version": __version__, "device": device.name}
    machine |= {"backend": device.backend, "memory_bytes": device.memory_bytes}
    metrics, memory, stop = _measured(args, function, subject)
    if args.json:
        shown = {"machine": machine, "metrics": [figure.to_json() for figure in metrics]}
        print(json.dumps(shown | {"memory": memory, "is_complete": stop is None}))
    else:
        print(*map(_line, metrics), sep="\n")
    if stop is not None:
        raise stop
    if args.picture is not None:
        _plot(metrics, device.name, args.picture)
    return 0


def _refuse_other_programs(given: Sequence[str]) -> None:
    for number, word in enumerate(given):
        program = _PROGRAMS.get(word.partition("=")[0])
        if program and (not number or word.startswith("--")):
            raise UsageError(
                f"[bench] {word} is measured by a program of its own, in a clone: python "
                f"examples/benchmarks/{program} --help"
            )


def _check_bound(args: argparse.Namespace) -> None:
    measured = ("threads", "decoded_tokens", "processes", "rounds", "quick", "picture")
    pairs = [(name, "bound", ", which measures nothing") for name in measured]
    pairs += [("config", name, "") for name in ("model", "revision", "latent")]
    for name, other, why in pairs:
        if getattr(args, name) and getattr(args, other):
            raise UsageError(
                f"[bench] {name.replace('_', '-')!r} must come without {other!r}{why}. Leave one of "
                "them out."
            )


def _show_bound(args: argparse.Namespace) -> int:
    from ..evaluation import bound
    from ..evaluation.audit.skeleton import read_config, skeleton
    from ..hub.checkpoint.load import OpenedModel

    chip = bound.chip(args.bound)
    if args.config is not None:
        model = skeleton(read_config("bench", args.config))
    else:
        model = OpenedModel(checkpoint_of(args)).model
    name = args.config or args.model or "bundled model"
    lengths, positions = args.prompt_tokens or [512], args.positions or [512]
    bounds = bound.bounds(model, chip, positions, lengths)
    if args.json:
        shown = {what: each._asdict() for what, each in bounds.items()}
        print(json.dumps({"model": name, "chip": chip._asdict(), "bounds": shown}))
    else:
        lines = [bound.describe(what, each, chip) for what, each in bounds.items()]
        print(*(f"{name}, {line}" for line in lines), sep="\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    from ..evaluation.benchmark import computing_threads

    if args.threads and not computing_threads():
        raise UsageError(
            f"[bench] 'threads' must be left out where a GPU computes but got {args.threads[0]}."
        )
    check_picture("bench", args.picture)


def _subject(args: argparse.Namespace) -> tuple[str, dict[str, Any], str]:
    """The measuring function, its model, and the kind of a model in a report."""
    from ..evaluation import benchmark, scaled
    from ..evaluation.audit.skeleton import full_name, read_config
    from ..hub.checkpoint.load import OpenedModel
    from ..models import check_causal

    given = {"name": args.model or "bundled model", "dtype": args.dtype}
    if args.config is not None:
        config = read_config("bench", args.config)
        return scaled.SCALED, given | {"name": full_name(args.config), "config": config}, ""
    given |= {"source": str(model_source(args)), "revision": args.revision, "latent": args.latent}
    # downloads the model, if need be, before anything is measured
    opened = OpenedModel(checkpoint_of(args))
    check_causal(opened.model)
    kind = f"{opened.checkpoint.config.get('model_type')} of {opened.nbytes / 1e6:.0f} MB"
    return benchmark.MODEL, given, kind


def _measured(
    args: argparse.Namespace, function: str, subject: dict[str, Any]
) -> "tuple[list[Figure], list[dict[str, Any]], BaseException | None]":
    """The metrics, the memory in each process, and what stopped the measurement, if anything did."""
    from ..evaluation import benchmark

    given = {key: getattr(args, key) or each[args.quick] for key, each in _AMOUNTS.items()}
    records, memory = [], []
    stop: BaseException | None = None
    try:
        for threads in (args.threads or [0]) * given.pop("processes"):
            found = benchmark.measure(function, given | subject, threads)
            records += [benchmark.Record(**record) for record in found["records"]]
            memory.append(found["memory"])
    except (KeyboardInterrupt, MeasurementError) as error:
        stop = error
    return benchmark.metrics(records), memory, stop


def rates(model: str | None) -> list[dict[str, Any]]:
    """The rates of a model for a report of this machine, which names no owner and no path.

    Args:
        model: As of `--model`; `None` is the bundled model.

    Raises:
        MeasurementError: The measurement failed.
    """
    args = build_parser().parse_args([] if model is None else ["--model", model])
    function, subject, kind = _subject(args)
    name = subject["name"]
    metrics, _, stop = _measured(args, function, subject)
    if stop is not None:
        raise stop
    return [
        {
            # the owner of a repository may be a person, and so may a folder's path
            "model": kind if Path(name).expanduser().exists() else name.rpartition("/")[2],
            "what": figure.records[0].name.rpartition(": ")[2],
            "threads": figure.records[0].threads,
            "tokens_per_second": round(figure.rate, 1),
            "limit": figure.records[0].limit,
            "share_of_limit": float(f"{figure.share:.3g}"),
            "processes": len(figure.records),
        }
        for figure in metrics
    ]


def _line(figure: "Figure") -> str:
    first = figure.records[0]
    name, _, what = first.name.rpartition(": ")
    threads = f"{first.threads} thread{'s' * (first.threads > 1)}" if first.threads else "GPU"
    limit = "a plain read of the weights" if first.limit == "plain read" else first.limit
    return (
        f"{name}, {threads}, {what}: {figure.rate:,.1f} tokens/s, {figure.share:.0%} of the "
        f"{figure.rate / figure.share:,.1f} that {limit} would allow"
    )


def _plot(metrics: "Sequence[Figure]", device: str, file: Path) -> None:
    """Draws tokens a second as bars, within those that the machine allows."""
    from matplotlib.figure import Figure as Canvas

    from ..evaluation.picture import COLOURS, save_picture

    canvas = Canvas(figsize=(9, 1.5 + 0.5 * len(metrics)), dpi=120, layout="constrained")
    axes = canvas.subplots()
    bars, rates = range(len(metrics)), [figure.rate for figure in metrics]
    allowed = [figure.rate / figure.share for figure in metrics]
    axes.barh(bars, allowed, color="0.85", label="allowed by reads or arithmetic")
    axes.barh(bars, rates, height=0.5, color=COLOURS[0], label="measured")
    axes.set_yticks(bars, [figure.records[0].name for figure in metrics])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="tokens per second", title=device)
    canvas.legend(loc="outside lower center", ncols=2)
    save_picture(canvas, file)
