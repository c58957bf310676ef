"""The flags that name a model and limit what it takes, and the loading of that model."""

import argparse
import shlex
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...platform.allocator import keep_freed_memory, return_freed_memory
from .command import argument_errors
from .flags import add_plugin_flag, gigabytes, non_negative, positive

if TYPE_CHECKING:
    import mlx.core as mx

    from ...generation.memory import MemoryNeed
    from ...hub import Tokenizer
    from ...hub.checkpoint.checkpoint import Checkpoint
    from ...hub.checkpoint.load import OpenedModel
    from ...models import Decoder
    from ...training.memory import MemoryPlan


_NAMES = ("max_kv_size", "kv_bits", "kv_group_size")


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
    names = (*_NAMES, "quantized_kv_start")
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def adopt_key_value_settings(args: argparse.Namespace, settings: dict[str, int | None]) -> None:
    """Sets the key-value cache flags to the settings with which a prompt was cached.

    Raises:
        UsageError: A flag was given another value, or a setting is unknown.
    """
    is_known = settings.keys() <= key_value_settings(args).keys()
    if not is_known or settings.get("quantized_kv_start", 0) is None:
        raise UsageError(
            "[prompt cache] the settings must be this version's but are "
            f"{list(settings)!r:.200}. Cache the prompt again."
        )
    for name, value in settings.items():
        given = getattr(args, name)
        if name in _NAMES and given is not None and given != value:
            raise UsageError(
                f"[prompt cache] '{name}' must be as when the prompt was cached, {value}, but got "
                f"{given}. Leave it out, or cache the prompt again."
            )
        setattr(args, name, value)


def with_key_value_cache(args: argparse.Namespace, model: "Decoder") -> "Decoder":
    """The model with the key-value cache that the flags ask for, if the command has them."""
    from ...generation import with_key_values

    settings: dict[str, Any] = key_value_settings(args)
    with argument_errors():
        return with_key_values(model, **settings) if settings else model


def note_flags_without_effect(args: argparse.Namespace, model: "Decoder") -> None:
    """Says on stderr which of the flags have no effect, because the model has no attention."""
    from ...generation import keeps_key_values

    unused = [name for name in _NAMES if getattr(args, name, None) is not None]
    if unused and not keeps_key_values(model):
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        print(
            "note: the model has no attention, and its state has a constant size. These flags have no "
            f"effect: {flags}.",
            file=sys.stderr,
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


def add_dry_run_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print what memory the run would take, and end"
    )


def show_plan(plan: "MemoryPlan") -> None:
    """Prints the memory that a run will take, and warns if that is too much."""
    print(plan)
    if warning := plan.warning():
        print("warning:", warning, file=sys.stderr)


def hours_text(hours: float) -> str:
    """Hours with as many digits as an estimate has."""
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


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
    from ...ops.inspection import slow_cpu

    if reason := slow_cpu():
        print("warning:", reason, file=sys.stderr)


DTYPES = ("float32", "float16", "bfloat16")


def add_model_flags(
    parser: argparse.ArgumentParser,
    *,
    takes_adapter: bool = True,
    takes_dtype: bool = True,
    **options: Any,
) -> None:
    """Adds the flags of a model, without those that the command does not take.

    `options` are the options of `--model` for argparse.
    """
    group = parser.add_argument_group("model")
    more = "; may be given again" if options.get("action") == "append" else ""
    add_source_flags(group, f"; default: the model in the package{more}", **options)
    if takes_adapter:
        add_adapter_flag(group)
    add_latent_flag(group)
    add_plugin_flag(group)
    if takes_dtype:
        group.add_argument(
            "--dtype", choices=DTYPES, help="float type to compute in; default: the checkpoint's"
        )


def add_source_flags(group: argparse._ActionsContainer, more: str, **options: Any) -> None:
    """Adds the flags that say where a model lies; `more` is what else its users must know.

    `options` are the options of `--model` for argparse.
    """
    group.add_argument(
        "--model",
        help=f"folder or Hub repository of the model, or a folder or .gguf file in one{more}",
        **options,
    )
    group.add_argument("--revision", help="branch, tag or commit of the Hub repository")


def model_source(args: argparse.Namespace) -> str | Path:
    """The folder or Hub repository of the model; without `--model`, the bundled one.

    Raises:
        UsageError: `--revision` came without `--model`.
    """
    from ... import demo

    check_revision(args)
    return demo.path() if args.model is None else str(args.model)


def checkpoint_of(args: argparse.Namespace) -> "Checkpoint":
    """The checkpoint that the model flags name.

    Raises:
        UsageError: As for `model_source`.
        CheckpointError, DownloadError, UnsupportedModelError: As for `open_checkpoint`.
    """
    from ...hub.checkpoint.checkpoint import open_checkpoint

    return open_checkpoint(model_source(args), args.revision, args.latent)


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


def processor_of(args: argparse.Namespace, opened: "OpenedModel") -> Any:
    """The tokenizer or image processor of a model.

    A tokenizer has the chat template that `--chat-template` names, or else the adapter's.

    Raises:
        UsageError: The template cannot be read, or the model reads no conversations.
        CheckpointError, UnsupportedModelError: The files of the model are missing or damaged.
    """
    from ...hub.adapters.adapter_folder import adapter_template

    file, adapter = getattr(args, "chat_template", None), getattr(args, "adapter_path", None)
    template = None if file is None else template_of(file)
    if template is None and adapter is not None:
        template = adapter_template(adapter)
    return with_template(opened.processor(), template, given=file is not None)


def template_of(file: str) -> str:
    """The chat template in a file that the user named.

    Raises:
        UsageError: The file cannot be read, is too large or is not UTF-8.
    """
    from ...files.reading import expanded, read_text
    from ...tokenizer.vocabulary import MAX_TEMPLATE_BYTES

    try:
        return read_text(expanded(file), MAX_TEMPLATE_BYTES)
    except OSError as error:
        raise UsageError(
            f"[chat template] 'chat_template' must be a file with a template in Jinja but '{file}' "
            f"cannot be read: {error}."
        ) from error


def with_template(processor: Any, template: str | None, *, given: bool = False) -> Any:
    """A tokenizer with another chat template, or the processor as it is.

    Raises:
        UsageError: The template was given to a model that reads no conversations.
    """
    from ...hub import Tokenizer

    if template is None:
        return processor
    if isinstance(processor, Tokenizer):
        return processor.with_chat_template(template)
    if given:
        raise UsageError(
            "[chat template] 'chat_template' must come with a model that writes text but this one does "
            "not. Leave it out."
        )
    return processor


def with_adapter(args: argparse.Namespace, opened: "OpenedModel") -> Any:
    """Loads the weights, with the adapter that the flags name.

    Raises:
        CheckpointError: The weights or the adapter are damaged, or do not fit.
    """
    from ...hub.adapters.adapter_folder import holds_adapter, read_adapter

    adapter = None if args.adapter_path is None else read_adapter(args.adapter_path)
    folder = opened.checkpoint.folder
    if adapter is None and not opened.keeps_adapter and holds_adapter(folder):
        print(
            "note: the model's folder also holds an adapter, which is not used. To use it: "
            f"--adapter-path {shlex.quote(str(folder))}",
            file=sys.stderr,
        )
    return opened.load(adapter)


def planned(
    args: argparse.Namespace,
    *,
    also: Collection[str] = (),
    **sizes: int,
) -> "tuple[OpenedModel, MemoryNeed | None]":
    """Opens the model, and warns on stderr if it needs more memory than there is.

    Args:
        args, also: As for `loaded`.
        sizes: The sizes of its work, as for `memory_need`.

    Returns:
        The model without its weights, and what it needs; `None` of one of images.

    Raises:
        UsageError, CheckpointError, DownloadError, UnsupportedModelError: As for `loaded`.
    """
    from ...generation import check_memory, memory_need
    from ...hub.checkpoint.load import OpenedModel
    from ...models import check_causal

    opened = OpenedModel(checkpoint_of(args), dtype_of(args))
    model: Any = opened.model
    is_allowed = model.pipeline in also
    if is_allowed and model.pipeline == "image-classification":
        return opened, None
    if not is_allowed:
        check_causal(model)
    # a separate model, which is freed before loading replaces the matrices of the first
    model = with_key_value_cache(args, model)
    note_flags_without_effect(args, model)
    need = memory_need(model, opened.nbytes, **sizes)
    if warning := check_memory(need):
        print("warning:", warning, file=sys.stderr)
    return opened, need


@contextmanager
def loaded(
    args: argparse.Namespace,
    *,
    batch_size: int,
    prefill_step_size: int,
    context_length: int = 0,
    group: "mx.distributed.Group | None" = None,
    also: Collection[str] = (),
) -> Iterator[tuple["Decoder", "Tokenizer"]]:
    """Loads the model and its tokenizer, with MLX's memory limits set inside the `with` block.

    Args:
        args: The values of the model flags, the memory flags and, if the command has them, the
            key-value cache flags.
        batch_size: Number of texts read at a time.
        prefill_step_size: Number of prompt tokens read at a time.
        context_length: Largest number of tokens of a text, as far as it is known.
        group: The processes over which the loaded model is split, or `None` to keep it whole.
        also: The tasks of a model that need not continue texts, as the Hub names them. An image model
            comes with its image processor.

    Raises:
        UsageError: A flag has a value that does not fit.
        CheckpointError, DownloadError, UnsupportedModelError: As for `load`.
    """
    from ...models.parts.tensor_parallel import shard

    opened, _ = planned(
        args,
        batch_size=batch_size,
        prefill_step_size=prefill_step_size,
        context_length=context_length,
        also=also,
    )
    reads_images = opened.model.pipeline == "image-classification"
    with limited_memory(args, opened.nbytes):
        # before the weights come, so that they lie in large pages
        keep_freed_memory()
        processor = processor_of(args, opened)
        model = with_adapter(args, opened)
        if group is not None:
            with argument_errors():
                shard(model, group)
        # what loading needed beside the weights; then large pages for what comes after them
        return_freed_memory()
        keep_freed_memory()
        yield model if reads_images else with_key_value_cache(args, model), processor


def add_draft_flags(group: Any, reads: str, **options: Any) -> None:
    """Adds the flags for drafts, by a model or from the text.

    Args:
        group: The parser or a group of it.
        reads: What users must know of a draft model's use, after what it does.
        options: The options of `--draft-model` for argparse.
    """
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        "--draft-model",
        help="folder or Hub repository of a smaller model with the same tokens; it proposes tokens "
        f"that the model then checks, {reads}",
        **options,
    )
    add_ngram_flags(kinds, group)


def add_ngram_flags(kinds: Any, group: Any) -> None:
    """Adds the flag for drafts from the text, and the one for their number.

    Args:
        kinds, group: The parser or groups of it.
    """
    kinds.add_argument(
        "--ngram-drafts",
        action="store_true",
        help="propose what followed the same tokens earlier in the text (prompt lookup); edits and code "
        "come faster, and texts stay the same",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=positive,
        default=3,
        help="number of tokens that are proposed at a time (%(default)s)",
    )


def draft_of(
    args: argparse.Namespace, model: "Decoder", tokenizer: "Tokenizer"
) -> "Decoder | None":
    """The draft model that the flags name, if they name one.

    Raises:
        ValueError: It has other tokens than the model.
        MMFreeError: It cannot be loaded.
    """
    from ...generation import with_key_values
    from ...generation.speculative import check_draft, check_draft_tokenizer
    from ...hub import load

    if args.draft_model is None:
        return None
    draft, draft_tokenizer = load(args.draft_model, dtype=dtype_of(args))
    check_draft_tokenizer(tokenizer, draft_tokenizer)
    check_draft(model, draft)
    return with_key_values(draft, max_kv_size=args.max_kv_size)
