"""Replaces argument names by a command's flags in the messages of the library."""

import argparse
import re
from collections.abc import Sequence
from itertools import pairwise

# Names of arguments in the library, and the flags that their values may come from.
_FLAGS_OF_ARGUMENT = {
    "bits": ("kv_bits",),
    "carries_state": ("carry_state",),
    "data": ("data_path",),
    "group_size": ("kv_group_size",),
    "max_size": ("max_kv_size",),
    "path_or_repo": ("model", "draft_model", "teacher", "data"),
    "path": ("mlx_path", "save_path", "output"),
    "repository": ("repo", "upload_repo"),
    "top_k": ("teacher_top_k",),
}


def with_flags(message: str, parser: argparse.ArgumentParser | None, argv: Sequence[str]) -> str:
    """A message of the library in which the flags of a command replace the arguments' names.

    Args:
        message: A message of the form `[place] 'argument' must be … but got ….`
        parser: The parser of the command, or `None` to leave the message as it is.
        argv: The arguments that the command was given.
    """
    if parser is None:
        return message
    flags = {
        action.dest: next(text for text in action.option_strings if text.startswith("--"))
        for action in parser._actions
        if action.option_strings
    }
    # what follows "but" are values, which may be quoted too
    rule, but, given = message.partition(" but ")

    def flag(match: re.Match[str]) -> str:
        names = (match[1].replace("-", "_"), *_FLAGS_OF_ARGUMENT.get(match[1], ()))
        fitting = [flags[name] for name in names if name in flags]
        told = [flag for flag in fitting if any(repr(v) in given for v in _values(flag, argv))]
        return next(iter([*told, *fitting]), match[0])

    rule = re.sub(r"'([a-z][a-z_-]*)'", flag, rule)
    return re.sub(r"\w+=\w+ \((--[a-z-]+)\)", r"\1", rule + but + given)


def _values(flag: str, argv: Sequence[str]) -> list[str]:
    """The values that directly follow a flag."""
    follows = [after for word, after in pairwise(argv) if word == flag]
    return follows + [word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}=")]
