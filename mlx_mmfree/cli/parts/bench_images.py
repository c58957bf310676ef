"""`mmfree bench images`: measures images a second of models on a CPU, beside timm if wanted."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from .command import CommandParser, command
from .flags import positive
from .terminal import aligned, markdown

if TYPE_CHECKING:
    from ...evaluation.benchmark_images import ImageFigure, ImageSettings

_AMOUNTS = ("batch_sizes", "threads", "processes", "rounds")
_QUICK = {"threads": (1,), "processes": 1, "rounds": 1}


def build_parser() -> CommandParser:
    parser = CommandParser(prog="mmfree bench images", description=__doc__)
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="timm's name of an architecture, measured with random weights, or folder or Hub "
        "repository of a checkpoint",
    )
    parser.add_argument(
        "--compare",
        choices=("timm",),
        help="also measure timm's model on PyTorch with the same weights and images; needs timm and "
        "torch",
    )
    parser.add_argument(
        "--batch-sizes", type=positive, nargs="+", help="numbers of images at a time (1 8)"
    )
    parser.add_argument(
        "--threads", type=positive, nargs="+", help="numbers of threads (1 and all processors)"
    )
    parser.add_argument(
        "--processes",
        type=positive,
        help="number of fresh processes for each program, which take turns (3)",
    )
    parser.add_argument("--rounds", type=positive, help="passes timed in each process (10)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try the command in a short time; the figures say nothing about speed",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    form.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.compare:
        for package in ("timm", "torch"):
            if find_spec(package) is None:
                raise UsageError(
                    f"[bench] 'compare' needs the package {package}, which is not installed. Install "
                    f"it: pip install {package}"
                )
    from ...evaluation.benchmark_images import OWN, TIMM, ImageSettings, benchmark_images
    from ...platform.threads import thread_count

    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in _AMOUNTS
        if (value := getattr(args, name)) is not None
    }
    usual: dict[str, Any] = {"threads": tuple(sorted({1, thread_count()}))}
    settings = ImageSettings(**usual | (_QUICK if args.quick else {}) | given)
    figures = benchmark_images(args.models, [OWN, *([TIMM] if args.compare else [])], settings)
    found = list(_announced(figures, _count(args.models, settings, bool(args.compare))))
    if args.json:
        shown = {"settings": asdict(settings), "figures": [asdict(figure) for figure in found]}
        print(json.dumps(shown))
        return 0
    rows = _rows(found)
    print("\n".join(markdown(rows) if args.markdown else aligned(rows)))
    return 0


def _count(models: Sequence[str], settings: "ImageSettings", compares: bool) -> int:
    programs = 2 if compares else 1
    return len(models) * len(settings.threads) * len(settings.batch_sizes) * programs


def _announced(figures: "Iterator[ImageFigure]", count: int) -> "Iterator[ImageFigure]":
    """Yields the figures with a progress bar, where stderr is a terminal."""
    from tqdm import tqdm

    with tqdm(total=count, unit="figure", disable=None, dynamic_ncols=True) as bar:
        for figure in figures:
            bar.update()
            yield figure


def _rows(figures: "Sequence[ImageFigure]") -> list[list[str]]:
    """A row for each model, number of threads and of images; ratios where timm was measured."""
    groups: dict[tuple[str, int, int], dict[str, ImageFigure]] = {}
    for figure in figures:
        place = (figure.model, figure.threads, figure.batch_size)
        groups.setdefault(place, {})[figure.program] = figure
    programs = list(dict.fromkeys(figure.program for figure in figures))
    heading = ["model", "threads", "batch"]
    heading += [f"{program}, {kind}" for program in programs for kind in ("images/s", "best")]
    rows = [heading + (["of timm", "best of best"] if len(programs) > 1 else [])]
    for (model, threads, batch_size), measured in groups.items():
        row = [model, str(threads), str(batch_size)]
        for program in programs:
            figure = measured[program]
            row += [f"{figure.images_per_second:.1f}", f"{figure.best:.1f}"]
        if len(programs) > 1:
            own, other = (measured[program] for program in programs)
            row.append(f"{own.images_per_second / other.images_per_second:.2f}")
            row.append(f"{own.best / other.best:.2f}")
        rows.append(row)
    return rows
