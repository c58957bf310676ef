"""`mmfree mixers`: lists the token mixers, with what each computes, costs and can do."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .parts.columns import aligned
from .parts.command import CommandParser, command

if TYPE_CHECKING:
    from ..layers.token_mixer import TokenMixer

HELP = "list the token mixers, with what each computes, costs and can do"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree mixers",
        description=__doc__,
        epilog="The cost counts multiplications between T positions of D dims, without projections.",
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
    from ..models.parts.mixers import capabilities, token_mixers

    mixers = token_mixers()
    if args.json:
        listed = [_facts(name, mixer, capabilities(mixer)) for name, mixer in mixers.items()]
        print(json.dumps({"mixers": listed}))
        return 0
    rows: list[tuple[str, ...]] = [("mixer", "cost", "can be", "paper", "equation")]
    for name, mixer in mixers.items():
        can = ", ".join(capabilities(mixer))
        rows.append((name, mixer.complexity, can, mixer.paper, mixer.equation))
    if args.markdown:
        rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
        rows[1:] = [(f"`{name}`", *rest, f"`{equation}`") for name, *rest, equation in rows[1:]]
        rows.insert(1, ("---",) * len(rows[0]))
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
        return 0
    print("\n".join(aligned(rows, left=len(rows[0]))))
    return 0


def _facts(name: str, mixer: "type[TokenMixer]", can: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "equation": mixer.equation,
        "complexity": mixer.complexity,
        "capabilities": can,
        "paper": mixer.paper,
    }
