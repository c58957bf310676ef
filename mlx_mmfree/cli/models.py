"""`mmfree models`: lists the models in the caches of this machine, or those that are known to load."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

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
        epilog="A packed format made from a local folder is listed under the name of its file.",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--known",
        action="store_true",
        help="list the repositories of the Hub that are known to load, with the format of their weights "
        "and what small models in this format were compared with",
    )
    chosen.add_argument(
        "--remove",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names of models to delete from the caches",
    )
    parser.add_argument(
        "--family", metavar="NAME", help="with --known: list the repositories of this family alone"
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    add_json_flag(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.family is not None and not args.known:
        raise UsageError("[models] 'family' must come with --known but came alone. Add --known.")
    if args.known:
        known = _known(args.family)
        head = ("repository", "use", "file", "memory", "family", "weights", "compared with")
        rows = [head, *(tuple(map(_cell, each.values())) for each in known)]
        print(json.dumps({"known": known}) if args.json else "\n".join(aligned(rows, left=7)))
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


SIZES = {
    "ridger/MMfreeLM-370M": (0.75, 0.5),
    "ridger/MMfreeLM-1.3B": (2.73, 1.1),
    "ridger/MMfreeLM-2.7B": (5.41, 1.6),
    "microsoft/bitnet-b1.58-2B-4T": (1.18, 1.8),
    "prism-ml/Ternary-Bonsai-1.7B-mlx-2bit": (0.48, 1.1),
    "prism-ml/Ternary-Bonsai-4B-mlx-2bit": (1.13, 2.0),
    "prism-ml/Ternary-Bonsai-8B-mlx-2bit": (2.30, 3.4),
    "prism-ml/Ternary-Bonsai-27B-mlx-2bit": (7.57, 9.0),
    "prism-ml/Ternary-Bonsai-2-27B-mlx-2bit": (8.60, 9.0),
    "prism-ml/Ternary-Bonsai-2-27B-gguf": (5.95, 9.0),
    "prism-ml/Ternary-Bonsai-2-27B-gguf-dev": (7.63, 9.8),
    "tiiuae/Falcon-E-3B-Instruct": (1.00, 1.8),
    "tiiuae/Falcon3-1B-Instruct-1.58bit": (1.36, 2.0),
    "tiiuae/Falcon3-7B-Instruct-1.58bit": (3.27, 4.8),
    "tiiuae/Falcon3-10B-Instruct-1.58bit": (3.99, 5.6),
}
"""Gigabytes of the file and of the memory for a text, of the models in the table of `hub/README.md`."""
_CHAT = re.compile(r"Instruct|Bonsai|MiniCPM4|/bitnet-b1\.58-2B-4T")


def _known(family: str | None) -> list[dict[str, Any]]:
    """The repositories that the architectures declare: chat models first, with known sizes."""
    from ..models import architectures

    families = architectures()
    if family is not None and family not in families:
        raise UsageError(
            f"[models] 'family' must be one of {', '.join(sorted(families))} but got {family!r:.60}."
        )
    found: list[dict[str, Any]] = []
    for name, architecture in sorted(families.items()):
        for repository, known in (
            architecture.repositories.items() if family in (None, name) else ()
        ):
            file_gb, memory_gb = SIZES.get(repository, (None, None))
            found.append(
                {
                    "repository": repository,
                    "use": "chat" if _CHAT.search(repository) else None,
                    "file_gb": file_gb,
                    "memory_gb": memory_gb,
                    "family": name,
                    **known._asdict(),
                }
            )
    return sorted(found, key=lambda each: (each["use"] is None, each["file_gb"] is None))


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f} GB" if isinstance(value, float) else str(value)


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
    rows = [("model", "family", "size", "packed format", "last used")]
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
