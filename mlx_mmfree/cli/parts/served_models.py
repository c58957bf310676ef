"""The models that a server offers, as the flags name them."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from .loading import model_name

if TYPE_CHECKING:
    from ...generation.sessions import Sessions
    from ...hub import Tokenizer
    from ...models import Decoder
    from ...server.settings import ServedModel


def named_adapter(text: str) -> tuple[str, str]:
    """A name and a folder from `NAME=FOLDER`."""
    name, _, folder = text.partition("=")
    if not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII) or not folder:
        raise argparse.ArgumentTypeError(
            f"must be NAME=FOLDER, with a name of letters, digits, '.', '_' and '-', but got "
            f"{text[:80]!r}"
        )
    return name, folder


def served_models(
    args: argparse.Namespace,
    model: "Decoder",
    tokenizer: "Tokenizer",
    sessions: "Sessions | None",
    draft: "Decoder | None" = None,
) -> "list[ServedModel]":
    """The model and, sharing its weights, the model with each adapter of `--adapter`.

    Args:
        args: The values of the flags.
        model: The model.
        tokenizer: Belongs to it.
        sessions: Those of the model, whose limits hold for all; `None` to keep none.
        draft: Proposes tokens to all of them; `None` for none.

    Raises:
        UsageError: Two adapters have one name, or `--adapter-path` is given too.
        CheckpointError: An adapter does not fit the model.
    """
    from ...hub.adapters.adapter import read_adapter, with_adapter
    from ...server.settings import ServedModel

    names = [name for name, _ in args.adapter]
    if len(set(names)) < len(names):
        raise UsageError(
            f"[serve] 'adapter' must have a name of its own each time but got {', '.join(names)}."
        )
    if names and args.adapter_path is not None:
        raise UsageError(
            "[serve] 'adapter' must come without 'adapter_path', which changes the model itself, but "
            "both are given. Give that folder a name with --adapter too."
        )
    base = _name(args)
    models = [ServedModel(base, model, tokenizer, sessions, draft)]
    for name, folder in args.adapter:
        adapted = with_adapter(model, read_adapter(folder))
        adapted.eval()
        own = None if sessions is None else sessions.for_model(adapted)
        models.append(ServedModel(f"{base}:{name}", adapted, tokenizer, own, draft))
    return models


@contextmanager
def opened_sessions(args: argparse.Namespace, model: "Decoder") -> "Iterator[Sessions | None]":
    """The sessions that the flags ask for, written to the end when the `with` block is left.

    Raises:
        UsageError: No memory is given for what must be kept.
        CheckpointError: The folder or the prompt cache cannot be used.
    """
    from ...generation.sessions import Sessions

    if not args.session_memory:
        for name in ("session_dir", "prompt_cache_file"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"[serve] '{name}' must come with memory for sessions but --session-memory is 0."
                )
        yield None
        return
    with Sessions(
        model,
        memory_bytes=args.session_memory,
        folder=args.session_dir,
        disk_bytes=args.session_disk,
    ) as sessions:
        if args.prompt_cache_file is not None:
            sessions.preload(args.prompt_cache_file)
        yield sessions


def _name(args: argparse.Namespace) -> str:
    """What requests call the model: its repository, or the last part of a path of this machine."""
    name = model_name(args)
    return Path(name).resolve().name if Path(name).expanduser().exists() else name
