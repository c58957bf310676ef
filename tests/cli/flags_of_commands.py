"""Counts the flags of all commands: `python -m tests.cli.flags_of_commands`."""

import argparse
import importlib
from collections.abc import Iterator

from mlx_mmfree.cli.parts.parser import CommandParser
from mlx_mmfree.cli.parts.registry import command_names


def parsers() -> Iterator[CommandParser]:
    """The parsers of all commands, and of what `mmfree show` shows."""
    for name in command_names():
        parser = importlib.import_module(f"mlx_mmfree.cli.{name}").build_parser()
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()


def flags(parser: CommandParser) -> list[argparse.Action]:
    """Its flags, without those that ask for help."""
    return [a for a in parser._actions if a.option_strings and not a.dest.startswith("help")]


def first_name(flag: argparse.Action) -> str:
    return next(name for name in flag.option_strings if name.startswith("--"))


def counts() -> dict[str, int]:
    """How many flags there are, how many of them `--help` explains, and how many names they have.

    `mmfree run` takes the flags of `mmfree chat`, which count once.
    """
    counted = [parser for parser in parsers() if parser.prog != "mmfree run"]
    found = [(parser, flag) for parser in counted for flag in flags(parser)]
    usual = [flag for parser, flag in found if parser.is_explained(flag)]
    return {
        "flags": len(found),
        "distinct": len({first_name(flag) for _, flag in found}),
        "usual": len(usual),
        "distinct usual": len({first_name(flag) for flag in usual}),
    }


if __name__ == "__main__":
    for parser in parsers():
        usual = sum(map(parser.is_explained, flags(parser)))
        print(f"{parser.prog:24}{len(flags(parser)):4} flags, {usual:3} of them usual")
    print(counts())
