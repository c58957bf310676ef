"""`mmfree run`: opens a chat with a model, or answers one prompt and ends."""

import argparse
import shlex
import sys
from collections.abc import Sequence

from ..errors import UsageError
from ..files.reading import expanded
from . import chat
from .parts.command import command
from .parts.prompts import piped_text

HELP = "talk with a model, or answer one prompt"


def build_parser() -> argparse.ArgumentParser:
    parser = chat.build_parser("mmfree run", __doc__)
    parser.usual = parser.usual.removeprefix("--model ")
    words = parser.add_argument_group("what to run")
    words.add_argument(
        "name",
        nargs="?",
        metavar="MODEL",
        help="folder or Hub repository of the model, which is downloaded first if need be; default: the "
        "model in the package",
    )
    words.add_argument(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="text to answer, after the text from a pipe if there is one; without any, a chat opens",
    )
    parser.epilog = (
        "For example: mmfree run MODEL, or cat notes.txt | mmfree run MODEL 'Sum this up.'"
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_intermixed_args(argv)
    words = [word for word in (args.name, *args.prompt) if word is not None]
    if args.model is None and words:
        _check_is_model(*words)
        args.model = words.pop(0)
    if not words and sys.stdin.isatty():
        return chat.talk(args)
    piped = "" if sys.stdin.isatty() else piped_text().strip("\n")
    prompt = "\n\n".join(filter(str.strip, (piped, " ".join(words))))
    if not prompt:
        raise UsageError(
            "[run] the prompt must hold a text but is empty, and nothing came through a pipe. Write "
            "mmfree run MODEL 'PROMPT'."
        )
    return chat.talk(args, prompt)


def _check_is_model(name: str, *prompt: str) -> None:
    """Refuses a prompt, or the name of another catalogue, in the place of the model."""
    from ..hub.remote.download import REPOSITORY_NAME
    from ..hub.remote.source import BUNDLED

    if name and (name == BUNDLED or expanded(name).exists() or REPOSITORY_NAME.match(name)):
        return
    words = shlex.quote(" ".join((name, *prompt)))
    raise UsageError(
        "[run] the first word must be a model, as a folder or as a Hub repository 'owner/name', but got "
        f"{name!r:.100}. 'mmfree models --known' lists repositories that load. For the model in the "
        f"package: mmfree generate --prompt {words:.100}"
    )
