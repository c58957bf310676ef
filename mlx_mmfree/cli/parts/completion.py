"""Completes commands, flags and models for a shell."""

import argparse
import os
from typing import Any

from .registry import command_module, command_names

ENVIRONMENT_VARIABLE = "_ARGCOMPLETE"
"""The shell sets this variable when it asks for completions."""


def complete() -> None:
    """If a shell asks for completions, answers it and ends the process."""
    if ENVIRONMENT_VARIABLE not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    line = os.environ.get("COMP_LINE", "")
    argcomplete.autocomplete(whole_parser(line))


def whole_parser(line: str) -> argparse.ArgumentParser:
    """A parser of all commands. It knows the flags of those commands that `line` names."""
    parser = argparse.ArgumentParser(prog="mmfree", allow_abbrev=False)
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    names = command_names()
    commands.add_parser("help").add_argument("command", choices=names)
    typed = line.split()
    for name in names:
        parents = []
        if name in typed:
            parents = [_with_models(command_module(name).build_parser())]
        commands.add_parser(name, parents=parents, add_help=not parents, allow_abbrev=False)
    return parser


def _with_models(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser, in which the models in the caches complete the values that name a model."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _with_models(below)
        elif action.dest in ("model", "draft_model", "teacher"):
            vars(action)["completer"] = _models_and_files
        elif action.dest in ("name", "remove"):
            vars(action)["completer"] = _cached_names
    return parser


def _cached_names(prefix: str, **_: Any) -> list[str]:
    from ...hub.checkpoint.pack_cache import cached_models

    return [model.name for model in cached_models() if model.name.startswith(prefix)]


def _models_and_files(prefix: str, **options: Any) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return [*_cached_names(prefix), *FilesCompleter()(prefix, **options)]
