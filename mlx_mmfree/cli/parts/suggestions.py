"""Suggestions for a command or a flag that does not exist."""

import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches

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
    "epochs": "steps",
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
    "max-steps": "steps",
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
