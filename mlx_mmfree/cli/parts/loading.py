"""Loads the model that the flags name, checks that memory suffices and sets MLX's memory limits."""

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...platform.allocator import keep_freed_memory
from .command import argument_errors
from .flags import gigabytes, non_negative, positive

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
        "--model", help="folder or Hub repository of the model; default: the model in the package"
    )
    group.add_argument("--revision", help="branch, tag or commit of the Hub repository")
    group.add_argument("--adapter-path", help="folder of a LoRA adapter to use with the model")
    add_latent_flag(group)
    group.add_argument(
        "--dtype", choices=DTYPES, help="float type to compute in; default: the checkpoint's"
    )


def model_source(args: argparse.Namespace) -> str | Path:
    """The folder or Hub repository of the model; without `--model`, that of the package.

    Raises:
        UsageError: `--revision` came without `--model`.
    """
    from ... import demo

    check_revision(args)
    return demo.path() if args.model is None else str(args.model)


def check_revision(args: argparse.Namespace) -> None:
    """Refuses `--revision` without `--model`."""
    if args.model is None and args.revision is not None:
        raise UsageError(
            "[load] 'revision' must come with 'model' but came alone. Name the Hub repository too."
        )


def model_name(args: argparse.Namespace) -> str:
    """The model as records of results name it."""
    return args.model or "demo"


def dtype_of(args: argparse.Namespace) -> "mx.Dtype | None":
    """The MLX dtype that `--dtype` names, or `None`."""
    import mlx.core as mx

    dtype: mx.Dtype | None = getattr(mx, args.dtype) if args.dtype else None
    return dtype


def add_latent_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--latent",
        action=argparse.BooleanOptionalAction,
        help="whether the float weights of a ternary Llama are master weights, which are rounded to "
        "ternary, or are used as they are; default: as its configuration and revision say",
    )


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    sizes: dict[str, Any] = {"type": gigabytes, "metavar": "GB"}
    group.add_argument(
        "--memory-margin",
        **sizes,
        help="how much the wired and the cache limit exceed the size of the model (4.29)",
    )
    group.add_argument(
        "--wired-limit", **sizes, help="set the wired limit to this instead; 0 wires no memory"
    )
    group.add_argument(
        "--cache-limit", **sizes, help="set the limit of MLX's cache to this instead"
    )
    group.add_argument("--memory-limit", **sizes, help="limit of all memory that MLX uses")


def add_key_value_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("key-value cache")
    group.add_argument(
        "--max-kv-size",
        type=positive,
        help="largest number of tokens kept: the first 4 and the latest; default: no limit",
    )
    group.add_argument(
        "--kv-bits",
        type=positive,
        help="bits of each key and value, 2 to 8; default: not quantised",
    )
    group.add_argument(
        "--kv-group-size",
        type=positive,
        help="numbers that share a scale: 32, 64 or 128; default: 64, or 32 for heads that need it",
    )
    group.add_argument(
        "--quantized-kv-start",
        type=non_negative,
        default=5000,
        help="number of tokens after which --kv-bits takes effect (%(default)s)",
    )


def key_value_settings(args: argparse.Namespace) -> dict[str, int | None]:
    """The values of the key-value cache flags, or an empty dict if the command has none."""
    names = (*_KEY_VALUE_NAMES, "quantized_kv_start")
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def adopt_key_value_settings(args: argparse.Namespace, settings: dict[str, int | None]) -> None:
    """Sets the key-value cache flags to the settings with which a prompt was cached.

    Raises:
        UsageError: A flag was given another value, or a setting is unknown.
    """
    is_known = settings.keys() <= key_value_settings(args).keys()
    if not is_known or settings.get("quantized_kv_start", 0) is None:
        raise UsageError(
            "[prompt cache] the settings must be those of this version but are "
            f"{list(settings)!r:.200}. Cache the prompt again."
        )
    for name, value in settings.items():
        given = getattr(args, name)
        if name in _KEY_VALUE_NAMES and given is not None and given != value:
            raise UsageError(
                f"[prompt cache] '{name}' must be as when the prompt was cached, {value}, but got "
                f"{given}. Leave it out, or cache the prompt again."
            )
        setattr(args, name, value)


def _with_key_values(args: argparse.Namespace, model: "Decoder") -> "Decoder":
    """The model with the key-value cache that the flags ask for, if the command has them."""
    from ...generation import with_key_values

    settings: dict[str, Any] = key_value_settings(args)
    with argument_errors():
        return with_key_values(model, **settings) if settings else model


def _note_flags_without_effect(args: argparse.Namespace, model: "Decoder") -> None:
    from ...generation import keeps_key_values

    unused = [name for name in _KEY_VALUE_NAMES if getattr(args, name, None) is not None]
    if unused and not keeps_key_values(model):
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        print(
            "note: the model has no attention, and its state has a constant size. These flags have no "
            f"effect: {flags}.",
            file=sys.stderr,
        )


@contextmanager
def limited_memory(args: argparse.Namespace, model_bytes: int) -> Iterator[None]:
    """Sets MLX's memory limits inside the `with` block as the memory flags ask."""
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
    """Warns, once in a process, that the compiled CPU kernels are missing."""
    from ...ops.backend.inspection import slow_cpu

    if reason := slow_cpu():
        print("warning:", reason, file=sys.stderr)


def _warn_of_memory(args: argparse.Namespace, opened: "OpenedModel", **sizes: int) -> None:
    """Warns on stderr if weights and flags need more memory than there is."""
    from ...generation import check_memory, memory_need

    # a separate model, which is freed before loading replaces the matrices of the first
    model = _with_key_values(args, opened.model)
    _note_flags_without_effect(args, model)
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
    """Loads the model and its tokenizer, with MLX's memory limits set inside the `with` block.

    Args:
        args: The values of the model flags, the memory flags and, if the command has them, the
            key-value cache flags.
        batch_size: Number of texts read at a time.
        prefill_step_size: Number of prompt tokens read at a time.
        context_length: Largest number of tokens of a text, as far as it is known.
        group: The processes over which the loaded model is split, or `None` to keep it whole.

    Raises:
        UsageError: A flag has a value that does not fit.
        CheckpointError, DownloadError, UnsupportedModelError: As for `load`.
    """
    from ...hub.adapters.adapter import attach
    from ...hub.adapters.adapter_folder import holds_adapter, read_adapter
    from ...hub.checkpoint.opened_model import open_model
    from ...models import check_causal
    from ...models.parts.tensor_parallel import shard

    opened = open_model(model_source(args), args.revision, dtype_of(args), latent=args.latent)
    check_causal(opened.model)
    _warn_of_memory(
        args,
        opened,
        batch_size=batch_size,
        prefill_step_size=prefill_step_size,
        context_length=context_length,
    )
    with limited_memory(args, opened.nbytes):
        tokenizer = opened.tokenizer()
        model = opened.load()
        if args.adapter_path is not None:
            attach(model, read_adapter(args.adapter_path)).eval()
        elif holds_adapter(opened.checkpoint.folder):
            folder = shlex.quote(str(opened.checkpoint.folder))
            print(
                "note: the model's folder also holds an adapter, which is not used. To use it: "
                f"--adapter-path {folder}",
                file=sys.stderr,
            )
        if group is not None:
            with argument_errors():
                shard(model, group)
        # only now, so that what loading needed beside the weights has been freed
        keep_freed_memory()
        yield _with_key_values(args, model), tokenizer
