"""Loads the model that the flags name, after a look at the memory, and sets MLX's limits."""

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...platform.allocator import keep_freed_memory
from .console import argument_errors
from .flags import gigabytes, positive, whole

if TYPE_CHECKING:
    import mlx.core as mx

    from ...hub import Tokenizer
    from ...hub.checkpoint.opened_model import OpenedModel
    from ...models import Decoder

_KEY_VALUE_NAMES = ("max_kv_size", "kv_bits", "kv_group_size")

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


def dtype_of(args: argparse.Namespace) -> "mx.Dtype | None":
    """The value of `--dtype`."""
    import mlx.core as mx

    dtype: mx.Dtype | None = getattr(mx, args.dtype) if args.dtype else None
    return dtype


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


def add_key_value_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("keys and values of attention")
    group.add_argument(
        "--max-kv-size",
        type=positive,
        help="tokens that attention keeps at most: the first 4 and the last ones; default: all",
    )
    group.add_argument(
        "--kv-bits", type=positive, help="bits of each number kept, 2 to 8; default: exact"
    )
    group.add_argument(
        "--kv-group-size",
        type=positive,
        help="numbers that share a scale, 32, 64 or 128; default: 64, or 32 where heads need it",
    )
    group.add_argument(
        "--quantized-kv-start",
        type=whole,
        default=5000,
        help="tokens kept exactly before --kv-bits takes effect (%(default)s)",
    )


def key_value_settings(args: argparse.Namespace) -> dict[str, int | None]:
    """The values of the flags for keys and values; empty if the command has none."""
    names = (*_KEY_VALUE_NAMES, "quantized_kv_start")
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def adopt_key_value_settings(args: argparse.Namespace, settings: dict[str, int | None]) -> None:
    """Sets the flags to what a prompt was cached with.

    Raises:
        UsageError: A flag was given with another value, or a setting is not known.
    """
    is_known = settings.keys() <= key_value_settings(args).keys()
    if not is_known or settings.get("quantized_kv_start", 0) is None:
        raise UsageError(
            f"[prompt cache] settings must be those of this version but got {list(settings)!r:.200}. "
            "Cache the prompt again."
        )
    for name, value in settings.items():
        given = getattr(args, name)
        if name in _KEY_VALUE_NAMES and given is not None and given != value:
            raise UsageError(
                f"[prompt cache] '{name}' must be as when the prompt was cached, {value}, but got "
                f"{given}. Leave it out or cache the prompt again."
            )
        setattr(args, name, value)


def _with_key_values(args: argparse.Namespace, model: "Decoder") -> "Decoder":
    """The model as the flags for keys and values ask, if the command has them."""
    from ...generation import with_key_values

    settings: dict[str, Any] = key_value_settings(args)
    with argument_errors():
        return with_key_values(model, **settings) if settings else model


def _note_unused_flags(args: argparse.Namespace, model: "Decoder") -> None:
    from ...generation import keeps_key_values

    unused = [name for name in _KEY_VALUE_NAMES if getattr(args, name, None) is not None]
    if unused and not keeps_key_values(model):
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        print(
            f"note: without effect: {flags}. The model has no attention; what it keeps of a text "
            "has a constant size.",
            file=sys.stderr,
        )


@contextmanager
def limits(args: argparse.Namespace, model_bytes: int) -> Iterator[None]:
    """MLX's memory limits inside the `with` block, as the memory flags ask."""
    from ...generation import memory_limits

    _warn_of_slow_cpu()
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
        yield


@cache
def _warn_of_slow_cpu() -> None:
    """Says once in a process that the compiled kernels are missed."""
    from ...ops.backend.inspection import slow_cpu

    if reason := slow_cpu():
        print("warning:", reason, file=sys.stderr)


def _look_at_memory(args: argparse.Namespace, opened: "OpenedModel", **sizes: int) -> None:
    """Says on stderr what the model's weights and the flags let one expect."""
    from ...generation import check_memory, memory_need

    # of its own, since it goes before matrices arrive that loading replaces
    model = _with_key_values(args, opened.model)
    _note_unused_flags(args, model)
    if warning := check_memory(memory_need(model, opened.nbytes, **sizes)):
        print("warning:", warning, file=sys.stderr)


@contextmanager
def loaded(
    args: argparse.Namespace,
    *,
    batch_size: int,
    prefill_step_size: int,
    context_length: int = 0,
    group: "mx.distributed.Group | None" = None,
) -> Iterator[tuple["Decoder", "Tokenizer"]]:
    """The model and its tokenizer, under memory limits inside the `with` block.

    Args:
        args: The values of the model and memory flags, and of those for keys and values if the
            command has them: the model keeps what they say.
        batch_size: Texts at a time.
        prefill_step_size: Positions of the prompt read at a time.
        context_length: The most tokens of a text, as far as known.
        group: The processes over which the model is split, once loaded; `None` keeps it whole.
    """
    from ... import demo
    from ...hub.adapters.adapter import attach, holds_adapter, read_adapter
    from ...hub.checkpoint.opened_model import open_model
    from ...models import check_causal
    from ...models.parts.tensor_parallel import shard

    if args.model is None and args.revision is not None:
        raise UsageError("[load] 'revision' must come with 'model' but came alone.")
    source = demo.path() if args.model is None else args.model
    opened = open_model(source, args.revision, dtype_of(args), latent=args.latent)
    check_causal(opened.model)
    _look_at_memory(
        args,
        opened,
        batch_size=batch_size,
        prefill_step_size=prefill_step_size,
        context_length=context_length,
    )
    with limits(args, opened.nbytes):
        tokenizer = opened.tokenizer()
        model = opened.load()
        if args.adapter_path is not None:
            attach(model, read_adapter(args.adapter_path)).eval()
        elif holds_adapter(opened.checkpoint.folder):
            folder = shlex.quote(str(opened.checkpoint.folder))
            print(
                "note: an adapter lies in the model's folder and is not used. To put it on the model: "
                f"--adapter-path {folder}",
                file=sys.stderr,
            )
        if group is not None:
            with argument_errors():
                shard(model, group)
        # only now: what loading needed beside the weights has been handed back
        keep_freed_memory()
        yield _with_key_values(args, model), tokenizer
