"""Loads the model that the flags name, after a look at the memory, and sets MLX's limits."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .console import argument_errors
from .flags import gigabytes

if TYPE_CHECKING:
    from ..hub import Tokenizer
    from ..models import Decoder

DTYPES = ("float32", "float16", "bfloat16")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", help="folder or Hub repository; default: the model in the package"
    )
    group.add_argument("--revision", help="branch, tag or commit of the repository")
    group.add_argument("--adapter-path", help="folder of a LoRA adapter to put on the model")
    add_latent_flag(group)
    group.add_argument(
        "--dtype", choices=DTYPES, help="float type to compute in; default: the checkpoint's"
    )


def add_latent_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--latent",
        action=argparse.BooleanOptionalAction,
        help="float weights of a ternary Llama are masters to be ternarised, or are meant as stored; "
        "default: as its configuration and revision say",
    )


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    sizes: dict[str, Any] = {"type": gigabytes, "metavar": "GB"}
    group.add_argument(
        "--memory-margin", **sizes, help="wired and cache limit are the model plus this (4.29)"
    )
    group.add_argument("--wired-limit", **sizes, help="wired limit instead; 0 wires nothing")
    group.add_argument("--cache-limit", **sizes, help="cache limit instead")
    group.add_argument("--memory-limit", **sizes, help="limit of all of MLX's memory")


@contextmanager
def loaded(
    args: argparse.Namespace, *, batch_size: int, prefill_step_size: int
) -> Iterator[tuple["Decoder", "Tokenizer"]]:
    """The model and its tokenizer, under memory limits inside the `with` block.

    Args:
        args: The values of the model and memory flags.
        batch_size: Texts at a time.
        prefill_step_size: Positions of the prompt read at a time.
    """
    import mlx.core as mx

    from .. import demo
    from ..generation import check_memory, memory_limits, memory_need
    from ..hub import load, needed_bytes, open_checkpoint
    from ..hub.adapters import attach, read_adapter
    from ..hub.skeleton import build_skeleton

    if args.model is None and args.revision is not None:
        raise UsageError("[load] 'revision' must come with 'model' but came alone.")
    source = demo.path() if args.model is None else args.model
    checkpoint = open_checkpoint(source, args.revision, args.latent)
    dtype = getattr(mx, args.dtype) if args.dtype else None
    model_bytes = needed_bytes(checkpoint, dtype)
    need = memory_need(
        build_skeleton(checkpoint).model,
        model_bytes,
        batch_size=batch_size,
        prefill_step_size=prefill_step_size,
    )
    if warning := check_memory(need):
        print("warning:", warning, file=sys.stderr)
    sizes = {
        "margin_bytes": args.memory_margin,
        "wired_bytes": args.wired_limit,
        "cache_bytes": args.cache_limit,
        "memory_bytes": args.memory_limit,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    with ExitStack() as stack:
        with argument_errors():
            stack.enter_context(memory_limits(model_bytes, **given))
        model, tokenizer = load(checkpoint, dtype=dtype)
        if args.adapter_path is not None:
            attach(model, read_adapter(args.adapter_path)).eval()
        yield model, tokenizer
