"""`mmfree bench serve`: measures servers with many clients, and what parked sessions take."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...errors import UsageError
from ..serve import check_serve_packages
from .bench_serve_table import serve_lines
from .command import CommandParser, command
from .flags import positive

_AMOUNTS: Mapping[str, tuple[str, bool]] = {
    "clients": ("numbers of clients at the same time (1 4 16 64)", True),
    "prompt_tokens": ("lengths of the prompts, which clients send in turn (16 512)", True),
    "tokens": ("tokens of each answer (64)", False),
    "requests": ("requests of each client, one after the other (4)", False),
    "rounds": ("how often each server is measured, in turn with the others (3)", False),
    "rows": ("rows of the scheduler without HTTP (16)", False),
    "parked": ("sessions that are parked (1000)", False),
    "parked_tokens": ("tokens of a parked session that is restored (8000)", False),
}
_COMPARE = ("mlx-lm", "llama.cpp")


def build_parser() -> CommandParser:
    parser = CommandParser(prog="mmfree bench serve", description=__doc__)
    parser.add_argument(
        "--model",
        help="folder or Hub repository of the model to serve, or a name as for --config, which gets "
        "random weights (the packaged model)",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        choices=_COMPARE,
        default=[],
        help="also measure the servers of these with the same model; llama.cpp runs no MatMul-free "
        "model",
    )
    parser.add_argument(
        "--config",
        nargs="*",
        default=["mmfreelm-370m"],
        help="also park sessions of models with random weights: names of configurations, as for `mmfree "
        "bench`; none leaves this out (mmfreelm-370m)",
    )
    for name, (text, is_several) in _AMOUNTS.items():
        nargs = "+" if is_several else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, nargs=nargs, help=text)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try the command in a short time; the figures say nothing about speed",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    form.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from tqdm import tqdm

    from ...evaluation.serving.benchmark import measure_serving, step_count
    from ...evaluation.serving.programs import OWN, check_program
    from ...evaluation.serving.settings import QUICK, ServeSettings

    check_serve_packages("bench")
    configs = _configs(args.config)
    for program in args.compare:
        check_program(program)
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in _AMOUNTS
        if (value := getattr(args, name)) is not None
    }
    settings = replace(QUICK if args.quick else ServeSettings(), **given)
    programs = [OWN, *args.compare]
    count = step_count(programs, configs, settings)
    with tqdm(total=count, unit="figure", disable=None, dynamic_ncols=True) as bar:
        report = measure_serving(args.model, programs, configs, settings, bar.update)
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        print("\n".join(serve_lines(report, args.markdown)))
    return 0


def _configs(names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The configurations of these names."""
    from ...evaluation.benchmark_weights import presets

    for name in names:
        if name not in presets():
            raise UsageError(
                f"[bench] 'config' must be of {', '.join(sorted(presets()))} but got {name!r}."
            )
    return {name: presets()[name] for name in names}
