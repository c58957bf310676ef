"""The parser of a command, whose help explains the usual flags first."""

import argparse
import textwrap
from functools import partial
from itertools import chain
from typing import Any, NoReturn

from ...errors import UsageError
from .suggestions import meant_flags

_THEIRS = (
    "adapter-path allowed-origins apply-chat-template batch-size chat-template-args "
    "chat-template chat-template-config clear-cache-threshold config confirm-run-unsafe-code data "
    "data-path decode-concurrency draft-model dtype extra-eos-token fewshot-as-multiturn fine-tune-type "
    "grad-accumulation-steps grad-checkpoint hf-path host ignore-chat-template iters kv-bits "
    "kv-group-size learning-rate limit mask-prompt max-kv-size max-seq-length max-tokens min-p "
    "min-tokens-to-keep mlx-path model num-draft-tokens num-layers num-samples num-shots optimizer "
    "output-dir port prefill-response prefill-step-size project-name prompt prompt-cache-file "
    "quantized-kv-start report-to resume-adapter-file save-every save-path seed sequence-length "
    "steps-per-eval steps-per-report system-prompt tasks temp test test-batches top-k top-p train "
    "upload-repo val-batches verbose xtc-probability xtc-threshold"
)

MLX_LM = frozenset(f"--{name}" for name in _THEIRS.split())
"""The names of flags that mlx-lm's commands have too. `--help` shows them, if only by name."""


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. It takes no shortened flags, and a mistake raises `UsageError`.

    `--help` explains the usual flags, `--help-all` all of them.

    Args:
        prog: The name of the command, such as `mmfree chat`.
        description: The docstring of its file. The name that it begins with is left out of the help.
        usual: The names of the usual flags, with a space between them; the required ones are usual too.
            Without any, all are.
        options: Further options of `argparse.ArgumentParser`.
    """

    def __init__(self, *, prog: str, description: str | None, usual: str = "", **options: Any):
        sentence = (description or "").removeprefix(f"`{prog}`: ").replace("`", "'")
        self.usual = usual
        self.explains_all = False
        defaults: dict[str, Any] = {"allow_abbrev": False, "formatter_class": partial(_Help, self)}
        super().__init__(
            prog=prog,
            description=sentence[:1].upper() + sentence[1:],
            **defaults | options,
        )
        if self.add_help:
            words = "explain all flags, with the rare ones"
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help=words)

    def is_explained(self, action: argparse.Action) -> bool:
        """Returns whether the help explains what an argument does."""
        usual = {"--help", "--help-all", *self.usual.split()}
        names = action.option_strings
        is_usual = not (names and self.usual) or action.required or not usual.isdisjoint(names)
        return action.help != argparse.SUPPRESS and (self.explains_all or is_usual)

    def format_help(self) -> str:
        rare = [each.option_strings for each in self._actions if not self.is_explained(each)]
        names = sorted(MLX_LM.intersection(chain(*rare)))
        if not names:
            return super().format_help()
        more = self._get_formatter()
        more.add_text(f"More flags, named as in mlx-lm: {', '.join(names)}. See --help-all.")
        return f"{super().format_help()}\n{more.format_help()}"

    def error(self, message: str) -> NoReturn:
        start, colon, unknown = message.partition("unrecognized arguments: ")
        meant = meant_flags(unknown, self._flag_names()) if colon and not start else ""
        raise UsageError(
            " ".join(filter(None, (f"{message}.", meant, f"See '{self.prog} --help'.")))
        )

    def _flag_names(self) -> list[str]:
        """All names of its flags, and of the parsers below it."""
        below = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        parsers = [self, *chain(*(action.choices.values() for action in below))]
        return [name for parser in parsers for name in parser._option_string_actions]

    def print_help(self, file: Any = None) -> None:
        """Prints the help. Unlike the method of argparse, this one reports a failed write."""
        print(self.format_help(), end="", file=file)


class _HelpAll(argparse.Action):
    """Prints the help of all flags, and ends the process."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.explains_all = True
        parser.print_help()
        parser.exit()


class _Help(argparse.HelpFormatter):
    """Lays out the help of a command: the flags that it explains, by the names that it shows."""

    def __init__(self, parser: CommandParser, **options: Any):
        super().__init__(**options)
        self._parser = parser

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        words = ["%(prog)s", "[flags]"]
        for action in filter(self._parser.is_explained, actions):
            value = self._format_args(action, action.dest.upper())
            if not action.option_strings:
                words.append(value)
            elif action.required:
                words.insert(-1, f"{action.option_strings[0]} {value}")
        super().add_usage(usage or " ".join(words), actions, groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        if self._parser.is_explained(action):
            super().add_argument(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = textwrap.wrap(" ".join(text.split()), width - len(indent), break_on_hyphens=False)
        return textwrap.indent("\n".join(lines), indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        if action.nargs == 0:
            return names
        return f"{names} {self._format_args(action, action.dest.upper())}"
