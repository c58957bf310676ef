"""The flags that name a model, and the loading of that model with the limits that other flags set."""

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...platform.allocator import keep_freed_memory
from .command import argument_errors
from .key_value_cache import note_flags_without_effect, with_key_value_cache
from .memory import limited_memory, warn_of_memory

if TYPE_CHECKING:
    import mlx.core as mx

    from ...hub import Tokenizer
    from ...hub.checkpoint.load import OpenedModel
    from ...models import Decoder

DTYPES = ("float32", "float16", "bfloat16")


def add_model_flags(parser: argparse.ArgumentParser, *, is_named: bool = True) -> None:
    """Adds the flags; unless the model `is_named`, its flag is an argument that may be left out."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model" if is_named else "model",
        nargs=None if is_named else "?",
        help="folder or Hub repository of the model; default: the model in the package",
    )
    group.add_argument("--revision", help="branch, tag or commit of the Hub repository")
    add_adapter_flag(group)
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


def add_adapter_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--adapter-path", help="folder or Hub repository of a LoRA adapter to use with the model"
    )


def with_adapter(args: argparse.Namespace, opened: "OpenedModel") -> Any:
    """Loads the weights, with the adapter that the flags name.

    Raises:
        CheckpointError: The weights or the adapter are damaged, or do not fit.
    """
    from ...hub.adapters.adapter import holds_adapter, read_adapter

    adapter = None if args.adapter_path is None else read_adapter(args.adapter_path)
    folder = opened.checkpoint.folder
    if adapter is None and not opened.keeps_adapter and holds_adapter(folder):
        print(
            "note: the model's folder also holds an adapter, which is not used. To use it: "
            f"--adapter-path {shlex.quote(str(folder))}",
            file=sys.stderr,
        )
    return opened.load(adapter)


@contextmanager
def loaded(
    args: argparse.Namespace,
    *,
    batch_size: int,
    prefill_step_size: int,
    context_length: int = 0,
    group: "mx.distributed.Group | None" = None,
    takes_images: bool = False,
) -> Iterator[tuple["Decoder", "Tokenizer"]]:
    """Loads the model and its tokenizer, with MLX's memory limits set inside the `with` block.

    Args:
        args: The values of the model flags, the memory flags and, if the command has them, the
            key-value cache flags.
        batch_size: Number of texts read at a time.
        prefill_step_size: Number of prompt tokens read at a time.
        context_length: Largest number of tokens of a text, as far as it is known.
        group: The processes over which the loaded model is split, or `None` to keep it whole.
        takes_images: Whether it may be a model of images, which comes with its image processor.

    Raises:
        UsageError: A flag has a value that does not fit.
        CheckpointError, DownloadError, UnsupportedModelError: As for `load`.
    """
    from ...hub.checkpoint.load import open_model
    from ...models import ImageClassifier, check_causal
    from ...models.parts.tensor_parallel import shard

    opened = open_model(model_source(args), args.revision, dtype_of(args), latent=args.latent)
    planned: Any = opened.model
    is_of_images = takes_images and isinstance(planned, ImageClassifier)
    if not is_of_images:
        check_causal(planned)
        # a separate model, which is freed before loading replaces the matrices of the first
        planned = with_key_value_cache(args, planned)
        note_flags_without_effect(args, planned)
        warn_of_memory(
            planned,
            opened.nbytes,
            batch_size=batch_size,
            prefill_step_size=prefill_step_size,
            context_length=context_length,
        )
    del planned
    with limited_memory(args, opened.nbytes):
        processor: Any = opened.processor()
        model = with_adapter(args, opened)
        if group is not None:
            with argument_errors():
                shard(model, group)
        # only now, so that what loading needed beside the weights has been freed
        keep_freed_memory()
        yield model if is_of_images else with_key_value_cache(args, model), processor
