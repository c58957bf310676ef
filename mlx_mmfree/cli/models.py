"""`mmfree models`: lists the models in the caches of this machine, or those that are known to load."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

from ..errors import UsageError
from .parts.command import command
from .parts.flags import add_json_flag
from .parts.parser import CommandParser
from .parts.terminal import aligned, size_text

if TYPE_CHECKING:
    from ..hub.checkpoint.pack_cache import CachedModel

HELP = "list the downloaded models, or remove some of them"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree models",
        description=__doc__,
        epilog="A packed form made from a local folder is listed under the name of its file.",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--known",
        action="store_true",
        help="list the repositories of the Hub that are known to load, with the form of their weights "
        "and what small models in this form were compared with",
    )
    chosen.add_argument(
        "--remove",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names of models to delete from the caches",
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    add_json_flag(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.known:
        known = _known()
        head = ("repository", "family", "weights", "compared with")
        rows = [head, *(tuple(each.values()) for each in known)]
        print(json.dumps({"known": known}) if args.json else "\n".join(aligned(rows, left=4)))
        return 0
    from ..hub.checkpoint.pack_cache import cached_models, remove_model

    models = cached_models()
    if not args.remove:
        print(_json(models) if args.json else "\n".join(_table(models)))
        return 0
    chosen = _chosen(models, args.remove)
    if not args.yes and not _agrees(chosen):
        print("Nothing was removed.")
        return 0
    for model in chosen:
        remove_model(model)
        print(f"Removed {model.name}, {size_text(_bytes(model))}.")
    return 0


def _known() -> list[dict[str, str]]:
    """The repositories that the architectures declare, each family together."""
    from ..models import architectures

    return [
        {"repository": name, "family": family, **known._asdict()}
        for family, architecture in sorted(architectures().items())
        for name, known in architecture.repositories.items()
    ]


def _chosen(models: "Sequence[CachedModel]", names: Sequence[str]) -> "list[CachedModel]":
    by_name = {model.name: model for model in models}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UsageError(
            f"[models] 'remove' must name models of the caches but got {', '.join(map(repr, unknown))}. "
            f"The caches hold: {', '.join(by_name) or 'none'}."
        )
    return [by_name[name] for name in dict.fromkeys(names)]


def _agrees(models: "Sequence[CachedModel]") -> bool:
    if not sys.stdin.isatty():
        raise UsageError(
            "[models] 'yes' must be given where standard input is not a terminal, since nobody can be "
            "asked."
        )
    for line in _table(models):
        print(line)
    return input("Remove from the caches? [y/N] ").strip().lower() in ("y", "yes")


def _json(models: "Sequence[CachedModel]") -> str:
    return json.dumps({"models": [asdict(model) for model in models]}, default=str)


def _table(models: "Sequence[CachedModel]") -> list[str]:
    if not models:
        return ["The caches hold no models."]
    rows = [("model", "family", "size", "packed form", "last used")]
    for model in models:
        rows.append(
            (
                model.name,
                model.family or "?",
                size_text(model.nbytes) if model.nbytes else "-",
                size_text(model.packed_bytes) if model.packed_bytes else "-",
                datetime.fromtimestamp(model.last_used).strftime("%Y-%m-%d %H:%M"),
            )
        )
    total = size_text(sum(map(_bytes, models)))
    return [*aligned(rows, left=2), f"{len(models)} in all, {total}."]


def _bytes(model: "CachedModel") -> int:
    return model.nbytes + model.packed_bytes
