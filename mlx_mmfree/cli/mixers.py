"""`mmfree mixers`: lists the token or spatial mixers, with what each computes, costs and can do."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .parts.command import command
from .parts.flags import add_json_flag, add_plugin_flag
from .parts.parser import CommandParser
from .parts.terminal import aligned

if TYPE_CHECKING:
    from ..layers.mixer import SpatialMixer, TokenMixer

HELP = "list the token mixers or spatial mixers that models are built from"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree mixers",
        description=__doc__,
        epilog="The cost counts multiplications between T positions of D dims, without projections.",
    )
    parser.add_argument(
        "--spatial",
        action="store_true",
        help="list the mixers for images instead of those for texts",
    )
    add_plugin_flag(parser)
    format = parser.add_mutually_exclusive_group()
    add_json_flag(format)
    format.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from ..models.parts.mixers import capabilities, spatial_mixers, token_mixers

    listed = (
        [_facts(name, mixer) for name, mixer in spatial_mixers().items()]
        if args.spatial
        else [
            _facts(name, mixer) | {"capabilities": capabilities(mixer)}
            for name, mixer in token_mixers().items()
        ]
    )
    if args.json:
        print(json.dumps({"mixers": listed}))
        return 0
    columns = {"name": "mixer", "complexity": "cost", "capabilities": "can be", "paper": "paper"}
    if args.spatial:
        del columns["capabilities"]
    columns["equation"] = "equation"
    rows: list[tuple[str, ...]] = [tuple(columns.values())]
    for facts in listed:
        facts["capabilities"] = ", ".join(facts.get("capabilities", ()))
        rows.append(tuple(facts[name] for name in columns))
    if args.markdown:
        rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
        rows[1:] = [(f"`{name}`", *rest, f"`{equation}`") for name, *rest, equation in rows[1:]]
        rows.insert(1, ("---",) * len(rows[0]))
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
        return 0
    print("\n".join(aligned(rows, left=len(rows[0]))))
    return 0


def _facts(name: str, mixer: "type[TokenMixer | SpatialMixer]") -> dict[str, Any]:
    return {
        "name": name,
        "equation": mixer.equation,
        "complexity": mixer.complexity,
        "paper": mixer.paper,
    }
