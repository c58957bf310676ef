"""The program `mmfree`, which finds commands by their file names, and a command: parser, errors, status.

What goes wrong is reported by one line and an exit status. A shell completes commands and their flags.
"""

import argparse
import ast
import importlib
import importlib.util
import io
import os
import pkgutil
import re
import shlex
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial, wraps
from itertools import chain, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from ...errors import MMFreeError, TrainingStopped, UsageError
from ...files import plugins
from ...platform.terminal import clean_terminal
from ...version import __version__

# Names of arguments in the library, and the flags that their values may come from.
_FLAGS_OF_ARGUMENT = {
    "bits": ("kv_bits",),
    "carries_state": ("carry_state",),
    "group_size": ("kv_group_size",),
    "max_size": ("max_kv_size",),
    "path_or_repo": ("model", "draft_model", "teacher", "data"),
    "path": ("output",),
    "repository": ("upload_repo",),
    "top_k": ("teacher_top_k",),
}


def with_flags(message: str, parser: argparse.ArgumentParser | None, argv: Sequence[str]) -> str:
    """A message of the library in which the flags of a command replace the arguments' names.

    Args:
        message: A message of the form `[place] 'argument' must be … but got ….`
        parser: The parser of the command, or `None` to leave the message as it is.
        argv: The arguments that the command was given.
    """
    # what a file says is no argument
    if parser is None or re.match(r"\[[\w-]+\.json\]", message):
        return message
    actions = _chosen(parser, argv)._actions
    flags = {action.dest: _spelled(action, argv) for action in actions if action.option_strings}
    # what follows "but" are values, which may be quoted too
    rule, but, given = message.partition(" but ")

    def flag(match: re.Match[str]) -> str:
        names = (match[1].replace("-", "_"), *_FLAGS_OF_ARGUMENT.get(match[1], ()))
        fitting = [flags[name] for name in names if name in flags]
        told = [flag for flag in fitting if any(repr(v) in given for v in _values(flag, argv))]
        return next(iter([*told, *fitting]), match[0])

    rule = re.sub(r"'([a-z][a-z_-]*)'", flag, rule)
    return re.sub(r"\w+=\w+ \((--[a-z-]+)\)", r"\1", rule + but + given)


def _chosen(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of what is named first, where a command has several."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and argv:
            chosen: argparse.ArgumentParser = action.choices.get(argv[0], parser)
            return chosen
    return parser


def _spelled(action: argparse.Action, argv: Sequence[str]) -> str:
    """A flag as it was typed, or else under mlx-lm's name of its setting, or under its first name."""
    names = [text for text in action.option_strings if text.startswith("--")]
    typed = {word.partition("=")[0] for word in argv}
    known = [name for name in names if name in typed]
    own = [name for name in names if name in MLX_LM and name[2:].replace("-", "_") == action.dest]
    return [*known, *own, *names][0]


def _values(flag: str, argv: Sequence[str]) -> list[str]:
    """The values that directly follow a flag."""
    follows = [after for word, after in pairwise(argv) if word == flag]
    return follows + [word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}=")]


def check_writable(place: str, file: Path, *, makes_folder: bool = False) -> None:
    """Refuses a file that cannot be created or replaced.

    Args:
        place: The command in brackets and the argument that names the file in quotes.
        file: The file that will be written.
        makes_folder: Whether missing folders will be created too.

    Raises:
        UsageError: The file's folder is missing or not writable, or the file is a folder itself.
    """
    file = file.expanduser()
    folder = file.parent
    while makes_folder and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if file.is_dir():
        reason = "is a folder"
    elif not folder.is_dir():
        reason = f"cannot be made: there is no folder '{folder}'"
    elif not os.access(folder, os.W_OK):
        reason = f"cannot be made: '{folder}' may not be written to"
    else:
        return
    raise UsageError(f"{place} must be a file that can be written but '{file}' {reason}.")


class Command(Protocol):
    """Runs with the given arguments, or with the process's, and returns an exit status."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


_THEIRS = (
    "adapter-path allowed-origins apply-chat-template batch-size chat-template-args "
    "chat-template-config clear-cache-threshold config confirm-run-unsafe-code data data-path "
    "decode-concurrency draft-model dtype extra-eos-token fewshot-as-multiturn fine-tune-type "
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
        """Whether the help explains what an argument does."""
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


@contextmanager
def argument_errors() -> Iterator[None]:
    """Raises `UsageError` for a `ValueError` of the library, whose argument came from the user."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def command(main: Callable[[Sequence[str] | None], int]) -> Command:
    """Makes a command report what the user can mend: by one line on stderr and an exit status.

    This covers the library's own errors, errors of the system (a full disk, a file without write
    permission, a closed pipe), sizes beyond memory, errors in a plug-in and Ctrl-C. Other errors keep
    their traceback.
    """

    @clean_terminal()
    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        presses: list[int] = []
        try:
            _prepare_streams()
            try:
                with _counted_interrupts(presses):
                    return main(argv)
            finally:
                sys.stdout.flush()
        except MMFreeError as error:
            build_parser = getattr(sys.modules[main.__module__], "build_parser", None)
            given = sys.argv[1:] if argv is None else argv
            _report(with_flags(str(error), build_parser() if build_parser else None, given))
            return USER_ERROR
        except TrainingStopped as stop:
            print(stop, file=sys.stderr)
            return stop.status
        except KeyboardInterrupt:
            _discard_output()
            print(file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            _discard_output()
            return BROKEN_PIPE
        except OSError as error:
            _discard_output()
            _report(str(MMFreeError(f"the system refused: {error}.")))
            return USER_ERROR
        except (MemoryError, OverflowError) as error:
            _discard_output()
            _report(
                str(
                    MMFreeError(
                        "what was asked for must fit into memory, and its sizes into 32 bits, but does "
                        f"not: {error or 'there is no memory left'}."
                    )
                )
            )
            return USER_ERROR
        except Exception as error:
            if presses and _happened_in_import(error):
                print(file=sys.stderr)
                return INTERRUPTED
            if (said := plugins.failure(error)) is None:
                raise
            _report(str(MMFreeError(f"[plugin] a plug-in must run without errors but {said}.")))
            return USER_ERROR

    return run


@contextmanager
def _counted_interrupts(presses: list[int]) -> Iterator[None]:
    """Records each Ctrl-C inside the `with` block in `presses`, and raises `KeyboardInterrupt`."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        presses.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _happened_in_import(error: BaseException) -> bool:
    """Whether an import failed: some packages turn Ctrl-C during their import into another error."""
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ImportError) or any(
        frame.f_code.co_name == "<module>" for frame, _ in frames
    )


def _report(message: str) -> None:
    with suppress(OSError):
        print("error:", " ".join(message.split()), file=sys.stderr)


def _prepare_streams() -> None:
    """Makes the standard streams accept any text, and replaces those that are closed.

    Raises:
        UsageError: Standard output is closed.
    """
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise UsageError(
            "[mmfree] standard output must be open but is closed. Send it to /dev/null to see nothing."
        )
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # a stream that was already read from cannot be reconfigured
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "replace":
            with suppress(io.UnsupportedOperation):
                # a terminal that is not UTF-8 shows '?' for characters that it lacks
                stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """Discards output that cannot be written, which would make the interpreter fail at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
            parents = [_with_models(_module(name).build_parser())]
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


_PACKAGE = "mlx_mmfree.cli"
"""Each file of this package, or of a folder on its search path, is a command."""


def command_names() -> list[str]:
    """The names of all commands: the files of their package, and what installed packages add."""
    return sorted({*_own_names(), *(each.name for each in plugins.installed("commands"))})


def _own_names() -> list[str]:
    search = importlib.import_module(_PACKAGE).__path__
    return [entry.name for entry in pkgutil.iter_modules(search) if not entry.ispkg]


def _module(name: str) -> Any:
    """The module of a command, or `None`. Those of the package keep their names."""
    if name in _own_names():
        return importlib.import_module(f"{_PACKAGE}.{name}")
    return next(
        (plugins.entry_module(each) for each in plugins.installed("commands") if each.name == name),
        None,
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `mmfree <command> ...` and returns its exit status."""
    complete()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "--help-all"):
        print(_overview())
    elif name == "--version":
        print(f"mmfree {__version__}")
    elif (module := _module(name)) is not None:
        status: int = module.main(arguments[1:])
        return status
    else:
        names = command_names()
        meant = meant_command(name, arguments[1:], names)
        known = "those that 'mmfree --help' lists" if meant else ", ".join(names)
        raise UsageError(
            f"[mmfree] the command must be one of {known} but got {name!r}. "
            + (meant or "See 'mmfree --help'.")
        )
    return 0


def _help(name: str) -> str:
    """The text of `HELP` in a command's file, read without the half second that imports would take."""
    if name not in _own_names():
        return str(getattr(_module(name), "HELP", "a command of an installed package"))
    source = importlib.util.find_spec(f"{_PACKAGE}.{name}")
    text = Path(str(source and source.origin)).read_text(encoding="utf-8")
    return next(
        str(ast.literal_eval(line.value))
        for line in ast.parse(text).body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "HELP"
    )


def _overview() -> str:
    lines = [
        "usage: mmfree <command> [flags]",
        "",
        "To begin: 'mmfree chat' talks with the model in the package, 'mmfree run MODEL' with another.",
        "",
    ]
    for name in command_names():
        lines.append(f"  {name:14}{_help(name)}")
    lines += [
        "",
        "'mmfree <command> --help' explains the usual flags of a command, and --help-all all of them.",
    ]
    return "\n".join(lines)


_COMMANDS = {
    "benchmark": "bench",
    "create": "convert --model MODEL",
    "delete": "models --remove MODEL",
    "download": "run MODEL",
    "finetune": "lora --train",
    "info": "show model --model MODEL",
    "list": "models",
    "ls": "models",
    "manage": "models",
    "merge": "fuse",
    "ps": "models",
    "pull": "run MODEL",
    "push": "upload --model MODEL",
    "quantize": "convert --model MODEL",
    "remove": "models --remove MODEL",
    "rm": "models --remove MODEL",
    "server": "serve",
    "share": "upload --model MODEL",
    "version": "--version",
}
"""Commands of ollama, mlx-lm and others, with what they are here. A model may follow them there."""

_NOTES = {word: " It downloads the model first." for word in ("download", "pull")}

_FLAGS = {
    "adapter": "adapter-path",
    "ctx-size": "max-kv-size",
    "dataset": "data",
    "draft": "draft-model",
    "file": "data",
    "force": "overwrite",
    "format": "json",
    "iterations": "steps",
    "lora": "adapter-path",
    "lora-layers": "num-layers",
    "lora-rank": "rank",
    "lr": "learning-rate",
    "max-length": "max-tokens",
    "max-new-tokens": "max-tokens",
    "n-predict": "max-tokens",
    "num-ctx": "max-kv-size",
    "num-predict": "max-tokens",
    "out": "output",
    "repeat-last-n": "repetition-context-size",
    "repeat-penalty": "repetition-penalty",
    "system": "system-prompt",
    "temperature": "temp",
    "think": "reasoning-budget",
}
"""Flags of ollama, llama.cpp, transformers and others, with what they are here."""


def meant_command(name: str, arguments: Sequence[str], known: Collection[str]) -> str:
    """A question that names the command that was meant, or an empty text.

    Args:
        name: What was typed as the command.
        arguments: What was typed after it.
        known: The names of the commands.
    """
    close = get_close_matches(name.lower().replace("-", "_"), [*known, *_COMMANDS], n=1)
    if not close:
        return ""
    meant = _COMMANDS.get(close[0], close[0])
    if arguments and not arguments[0].startswith("-"):
        meant = meant.replace("MODEL", shlex.quote(arguments[0]))
    return f"Did you mean 'mmfree {meant}'?{_NOTES.get(close[0], '')}"


def meant_flags(unknown: str, known: Collection[str]) -> str:
    """A question that names the flags that were meant, or an empty text.

    Args:
        unknown: The arguments that no flag takes, as they were typed.
        known: The names of the flags of the command.
    """
    names = {flag.lstrip("-"): flag for flag in known if flag.startswith("--")}
    meant = []
    for word in unknown.split():
        if word.startswith("-") and word.strip("-"):
            name = word.strip("-").partition("=")[0].lower().replace("_", "-")
            close = get_close_matches(name, [*names, *_FLAGS], n=1)
            found = (_FLAGS.get(each, each) for each in close)
            meant += [names[each] for each in found if each in names]
    if meant:
        return f"Did you mean {' and '.join(dict.fromkeys(meant))}?"
    if unknown.startswith("-"):
        return ""
    # only a model's name has a slash, and only a text has a space
    texts = () if "/" in unknown and " " not in unknown else ("--prompt", "--text")
    models = () if " " in unknown else ("--model",)
    words = [f"{flag} {shlex.quote(unknown)}" for flag in (*texts, *models) if flag in known]
    return f"Did you mean {' or '.join(words)}?" if words else ""
