"""`mmfree bench`: measures how fast a model reads prompts and decodes, and what this machine allows.

With `--bound`, nothing is measured: it tells what an Apple chip allows at most.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MeasurementError, UsageError
from .parts.command import CommandParser, check_writable, command
from .parts.flags import add_json_flag, add_picture_flag, positive
from .parts.loading import add_model_flags, model_source
from .parts.show_attention import require_matplotlib

if TYPE_CHECKING:
    from ..evaluation.benchmark import Figure

HELP = "measure how fast a model reads prompts and decodes on this machine"

_USUAL: dict[str, Any] = {"processes": 3, "rounds": 5, "decoded_tokens": 16}
_USUAL |= {"prompt_tokens": [512], "positions": [512]}
_QUICK: dict[str, Any] = {"processes": 1, "rounds": 1, "decoded_tokens": 2}
_QUICK |= {"prompt_tokens": [8], "positions": [8]}
_PROGRAMS = dict.fromkeys(("--head-bits", "--training", "--products"), "products.py")
_PROGRAMS |= dict.fromkeys(("--shapes", "--rows", "--walk-mb"), "products.py")
_PROGRAMS |= {"train": "training.py", "images": "images.py", "mixers": "mixers.py"}
_PROGRAMS |= {"serve": "servers.py", "--compare": "beside_llama_cpp.py", "--host": "host.py"}
"""What programs of the clone measure."""


def build_parser() -> argparse.ArgumentParser:
    usual = (
        "--model --prompt-tokens --positions --threads --bound --config --quick --json --picture "
    )
    usual += "--report"
    parser = CommandParser(prog="mmfree bench", description=__doc__, usual=usual)
    add_model_flags(parser, takes_adapter=False)
    for name, what in (
        ("prompt-tokens", "lengths of the prompts to read (512)"),
        ("positions", "numbers of tokens after which decoding is measured (512)"),
        ("threads", "numbers of threads of a CPU (all processors)"),
    ):
        parser.add_argument(f"--{name}", type=positive, nargs="+", help=what)
    for name, what in (
        ("decoded-tokens", "tokens decoded in a measurement (16)"),
        ("processes", "fresh processes for each figure, which is their median (3)"),
        ("rounds", "measurements in each process (5)"),
    ):
        parser.add_argument(f"--{name}", type=positive, help=f"number of {what}")
    parser.add_argument("--quick", action="store_true", help="only try the command, in seconds")
    bound = parser.add_argument_group("bound")
    bound.add_argument(
        "--bound",
        metavar="CHIP",
        help="measure nothing, but say how fast the model could be on this Apple chip at most, by its "
        "bandwidth, counted instructions and launches: M2 Max, or with its GPU cores M2 Max 30",
    )
    bound.add_argument(
        "--config",
        help="with bound: a published shape (`mmfree audit --help` lists them) or a config.json, "
        "instead of a model",
    )
    for name in ("--no-products", "--no-training"):
        parser.add_argument(name, action="store_true", help="of no effect: neither is measured now")
    output = parser.add_argument_group("output")
    add_json_flag(output)
    add_picture_flag(output, "--plot", what="draw the rates")
    output.add_argument(
        "--report",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FOLDER",
        help="also write a file for the project's table of machines, without names or paths of yours, "
        "into this folder (the current one)",
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    _refuse_other_programs(given)
    args = build_parser().parse_args(given)
    if args.bound is not None:
        return _show_bound(args)
    source, name = str(model_source(args)), args.model or "packaged model"
    _check(args)
    from ..evaluation.benchmark import computing_threads
    from ..hub.checkpoint.load import OpenedModel
    from ..models import check_causal
    from ..platform.device import device_info
    from ..version import __version__

    if args.threads and not computing_threads():
        raise UsageError(
            f"[bench] 'threads' must be left out where a GPU computes but got {args.threads[0]}."
        )
    # downloads the model, if need be, before anything is measured
    opened = OpenedModel(source, args.revision, latent=args.latent)
    check_causal(opened.model)
    device = device_info()
    machine: dict[str, Any] = {
        "version": __version__,
        "device": device.name,
        "backend": device.backend,
        "memory_bytes": device.memory_bytes,
    }
    figures, memory, stop = _measured(args, name, source)
    if args.json:
        shown = {"machine": machine, "figures": [figure.to_json() for figure in figures]}
        print(json.dumps(shown | {"memory": memory, "is_complete": stop is None}))
    else:
        print(*map(_line, figures), sep="\n")
    if stop is not None:
        raise stop
    if args.picture is not None:
        _plot(figures, device.name, args.picture)
    if args.report is not None:
        kind = f"{opened.checkpoint.config.get('model_type')} of {opened.nbytes / 1e6:.0f} MB"
        # the owner of a repository may be a person, and so may a folder's path
        public = kind if Path(name).expanduser().exists() else name.rpartition("/")[2]
        file = _write_report(args.report, machine, public, figures)
        print(f"Wrote {file}. How to send it: .github/benchmarks/README.md", file=sys.stderr)
    return 0


def _refuse_other_programs(given: Sequence[str]) -> None:
    for number, word in enumerate(given):
        program = _PROGRAMS.get(word.partition("=")[0])
        if program and (not number or word.startswith("--")):
            raise UsageError(
                f"[bench] {word} is measured by a program of its own, in a clone: python "
                f"examples/benchmarks/{program} --help"
            )


def _show_bound(args: argparse.Namespace) -> int:
    from ..evaluation import bound
    from ..evaluation.audit import certify
    from ..evaluation.audit.skeleton import read_config, skeleton
    from ..hub.checkpoint.load import OpenedModel

    measured = ("threads", "decoded_tokens", "processes", "rounds", "quick", "picture", "report")
    if used := [name for name in measured if getattr(args, name)]:
        raise UsageError(
            f"[bench] {used[0].replace('_', '-')!r} must come without 'bound', which measures nothing. "
            "Leave one of them out."
        )
    if args.config is not None and args.model is not None:
        raise UsageError("[bench] 'config' must come without 'model'. Leave one of them out.")
    chip = bound.chip(args.bound)
    if args.config is not None:
        model = skeleton(read_config("bench", args.config))
    else:
        model = OpenedModel(str(model_source(args)), args.revision, latent=args.latent).model
    name = args.config or args.model or "packaged model"
    bounds = {}
    for position in args.positions or _USUAL["positions"]:
        token = certify(model, position)
        bounds[f"decode after {position}"] = bound.decoding_bound(token, chip)
    for length in args.prompt_tokens or _USUAL["prompt_tokens"]:
        bounds[f"prefill of {length}"] = bound.prompt_bound(token, chip, length)
    if args.json:
        shown = {what: each._asdict() for what, each in bounds.items()}
        print(json.dumps({"model": name, "chip": chip._asdict(), "bounds": shown}))
        return 0
    for what, each in bounds.items():
        rest = [kind for kind in bound.LIMITS[what.split()[0]] if kind not in each.seconds]
        unknown = f" ({' and '.join(rest)} of this chip are not known)" if rest else ""
        print(
            f"{name}, {chip.name} with {chip.cores} GPU cores, {what}: at most "
            f"{ceil(each.tokens_per_second):,} tokens/s, bound by {each.binds}{unknown}"
        )
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.config is not None:
        raise UsageError(
            "[bench] 'config' must come with 'bound'. Models of random weights are measured by a "
            "program of a clone: python examples/benchmarks/products.py --help"
        )
    if args.picture is not None:
        require_matplotlib("picture", "bench")
        check_writable("[bench] 'picture'", args.picture)
    if args.report is not None:
        check_writable("[bench] 'report'", args.report / "report.json")
        if args.quick:
            raise UsageError(
                "[bench] 'report' must come without 'quick', whose figures say nothing about speed. "
                "Leave one of them out."
            )


def _measured(
    args: argparse.Namespace, name: str, source: str
) -> "tuple[list[Figure], list[dict[str, Any]], BaseException | None]":
    """The figures, the memory in each process, and what stopped the measurement, if anything did."""
    from ..evaluation import benchmark

    amounts = _USUAL | (_QUICK if args.quick else {})
    amounts |= {key: value for key in amounts if (value := getattr(args, key)) is not None}
    processes = amounts.pop("processes")
    arguments = {"name": name, "source": source, "revision": args.revision, "latent": args.latent}
    arguments |= {"dtype": args.dtype} | amounts
    records, memory = [], []
    stop: BaseException | None = None
    try:
        for threads in (args.threads or [0]) * processes:
            found = benchmark.measure(benchmark.MODEL, arguments, threads)
            records += [benchmark.Record(**record) for record in found["records"]]
            memory.append(found["memory"])
    except (KeyboardInterrupt, MeasurementError) as error:
        stop = error
    return benchmark.figures(records), memory, stop


def _line(figure: "Figure") -> str:
    first = figure.records[0]
    name, _, what = first.name.rpartition(": ")
    threads = f"{first.threads} thread{'s' * (first.threads > 1)}" if first.threads else "GPU"
    allowed = figure.rate / figure.share
    limit = "a plain read of the weights" if first.limit == "plain read" else first.limit
    return (
        f"{name}, {threads}, {what}: {figure.rate:,.1f} tokens/s, {figure.share:.0%} of the "
        f"{allowed:,.1f} that {limit} would allow"
    )


def _plot(figures: "Sequence[Figure]", device: str, file: Path) -> None:
    """Draws tokens a second as bars, within those that the machine allows."""
    import numpy as np
    from matplotlib.figure import Figure as Canvas

    from ..evaluation.picture import COLOURS, save_picture

    canvas = Canvas(figsize=(9, 1.5 + 0.5 * len(figures)), dpi=120, layout="constrained")
    axes = canvas.subplots()
    names, rates, shares = zip(
        *((f.records[0].name, f.rate, f.share) for f in figures), strict=True
    )
    places, allowed = range(len(figures)), np.divide(rates, shares)
    axes.barh(places, allowed, color="0.85", label="allowed by reads or arithmetic")
    axes.barh(places, rates, height=0.5, color=COLOURS[0], label="measured")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="tokens per second", title=device)
    canvas.legend(loc="outside lower center", ncols=2)
    save_picture(canvas, file)


def _write_report(
    folder: Path, machine: dict[str, Any], model: str, figures: "Sequence[Figure]"
) -> Path:
    """Writes a file for `.github/benchmarks` under a name by the rule there; no file is replaced."""
    import platform
    from importlib.metadata import version

    from ..files.reading import write_json
    from ..files.writing import new_file, writing

    mac = platform.mac_ver()[0]
    system = f"macOS {mac}" if mac else f"{platform.system()} {platform.machine()}"
    memory = round(machine["memory_bytes"] / 2**30)
    rows = [
        {
            "what": figure.records[0].name.rpartition(": ")[2],
            "threads": figure.records[0].threads,
            "tokens_per_second": round(figure.rate, 1),
            "limit": figure.records[0].limit,
            "share_of_limit": float(f"{figure.share:.3g}"),
            "processes": len(figure.records),
        }
        for figure in figures
    ]
    words = (machine["device"], f"{memory} gb", model)
    parts = [re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-") for word in words]
    file, number = folder / f"{'_'.join(parts)}.json", 1
    while file.exists():
        number += 1
        file = folder / f"{'_'.join(parts)}_{number}.json"
    report = {"chip": machine["device"], "memory_gib": memory, "system": system}
    report |= {"backend": machine["backend"], "mlx": version("mlx")}
    report |= {"mlx_mmfree": machine["version"], "model": model, "figures": rows}
    with writing("bench", file), new_file(file) as new:
        write_json(new, report)
    return file
