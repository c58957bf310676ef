"""`mmfree lora`: fine-tunes a model with LoRA or DoRA adapters, or in full."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..platform.allocator import keep_freed_memory
from ..training.fine_tune_settings import KINDS, FineTuneSettings, fine_tune_settings
from ..training.optimizer import OPTIMIZERS
from ..training.yaml_values import read_mapping
from .console import CommandParser, command
from .flags import descriptions, integer, seed, size_bytes
from .loading import DTYPES, add_latent_flag, add_memory_flags, dtype_of, limits
from .process_group import one_voice

if TYPE_CHECKING:
    from ..hub import Tokenizer
    from ..models import Decoder
    from ..training.callbacks import Callback
    from ..training.data_parallel import DataParallel
    from ..training.samples import Samples

HELP = "fine-tune a model with LoRA, DoRA or in full"

_KINDS: dict[Any, Any] = {int: integer, int | None: integer, float | None: float, str | None: str}
_NOT_FLAGS = (
    "optimizer_config lr_schedule prompt_feature completion_feature chat_feature text_feature"
)
_COMMAND_KEYS = ("model", "train", "test", "report_to", "project_name")


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree lora",
        description=__doc__,
        allow_abbrev=False,
        epilog="A run that was stopped goes on when the command is repeated.",
    )
    parser.add_argument(
        "--model", help="folder or Hub repository; default: the model in the package"
    )
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument(
        "-c", "--config", type=Path, help="YAML file with these settings; flags win over it"
    )
    parser.add_argument("--train", action="store_true", default=None, help="train")
    parser.add_argument(
        "--test", action="store_true", default=None, help="print the loss on test.jsonl at the end"
    )
    _add_settings(parser)
    parser.add_argument("--report-to", help="also send the records to: wandb")
    parser.add_argument("--project-name", help="project of the reports")
    add_latent_flag(parser)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="float type of the base; default: the checkpoint's, float32 for full fine-tuning",
    )
    add_memory_flags(parser)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of `FineTuneSettings` that a flag can hold."""
    described = descriptions(FineTuneSettings)
    choices = {"fine_tune_type": KINDS, "optimizer": tuple(OPTIMIZERS)}
    for field in fields(FineTuneSettings):
        if field.name in _NOT_FLAGS.split():
            continue
        options: dict[str, Any] = {"help": described[field.name].rstrip(".").replace("%", "%%")}
        if field.type is bool:
            options |= {"action": "store_true", "default": None}
        elif field.name == "keys":
            options |= {"nargs": "+", "metavar": "KEY"}
        elif field.name == "clear_cache_threshold":
            options |= {"type": size_bytes, "metavar": "SIZE"}
        elif field.name == "seed":
            options |= {"type": seed}
        else:
            options |= {"type": _KINDS.get(field.type, field.type)}
            if field.name in choices:
                options |= {"choices": choices[field.name]}
            if field.default not in (None, MISSING):
                options["help"] += f" ({field.default})"
        parser.add_argument("--" + field.name.replace("_", "-"), **options)


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    settings = _settings(args)
    from ..hub import load, needed_bytes, open_checkpoint
    from ..training.data_parallel import DataParallel
    from ..training.fine_tune import read_data

    keep_freed_memory()
    is_full = settings.fine_tune_type == "full" and bool(args.train)
    dtype = dtype_of(args)
    checkpoint = open_checkpoint(_source(args), args.revision, args.latent)
    model_bytes = needed_bytes(checkpoint, dtype, packed=not is_full)
    if settings.teacher is not None:
        model_bytes += needed_bytes(open_checkpoint(settings.teacher))
    processes = DataParallel()
    with one_voice(processes.rank), limits(args, model_bytes):
        model, tokenizer = load(checkpoint, dtype=dtype, packed=not is_full)
        data = read_data(settings, tokenizer)
        for name, samples in data.items():
            print(f"{name}: {samples.summary()}")
        if args.train:
            _train(args, model, tokenizer, data, settings, processes)
        if args.test and processes.is_first:
            _test(args, model, data, settings)
    return 0


def _settings(args: argparse.Namespace) -> FineTuneSettings:
    """The settings of YAML file and flags; sets the command's own on `args`."""
    values: dict[str, Any] = {} if args.config is None else read_mapping(args.config)
    for name in _COMMAND_KEYS:
        given = values.pop(name, None)
        if getattr(args, name) is None:
            setattr(args, name, given)
    names = [field.name for field in fields(FineTuneSettings)]
    values |= {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if not args.train and not args.test:
        raise UsageError("[lora] 'train' or 'test' must be given but neither was. Add --train.")
    if args.report_to not in (None, "wandb"):
        raise UsageError(f"[lora] 'report_to' must be wandb but got {args.report_to!r}.")
    if args.dtype is None and args.train and values.get("fine_tune_type") == "full":
        args.dtype = "float32"
    return fine_tune_settings(values, "the flags" if args.config is None else f"'{args.config}'")


def _source(args: argparse.Namespace) -> str | Path:
    from .. import demo

    if args.model is None and args.revision is not None:
        raise UsageError("[load] 'revision' must come with 'model' but came alone.")
    return demo.path() if args.model is None else args.model


def _train(
    args: argparse.Namespace,
    model: "Decoder",
    tokenizer: "Tokenizer",
    data: "dict[str, Samples]",
    settings: FineTuneSettings,
    processes: "DataParallel",
) -> None:
    import mlx.core as mx

    from ..training.callbacks import WandbReport
    from ..training.distillation import teacher_loss
    from ..training.fine_tune import fine_tune, prepare
    from ..training.log import read_log
    from ..training.trainable import trained_parameters

    names = prepare(model, settings)
    trained, total = trained_parameters(model)
    is_full = settings.fine_tune_type == "full"
    print(
        f"Training {trained:,} of {total:,} parameters ({trained / total:.3%}) in {len(names)} "
        f"{'tensors' if is_full else 'layers'}: {settings.fine_tune_type}."
    )
    if "valid" not in data:
        print("There is no valid.jsonl: nothing is measured on the way, the last weights are kept.")
    folder = Path(settings.adapter_path)
    callbacks: list[Callback] = []
    if args.report_to == "wandb" and processes.is_first:
        callbacks.append(WandbReport(args.project_name, folder, settings.record()))
    loss = teacher_loss(settings, model, tokenizer)
    progress = fine_tune(
        model, tokenizer, data, settings, loss=loss, processes=processes, callbacks=callbacks
    )
    print(
        f"{progress['step']} steps, {progress['tokens']:,} tokens learned, peak memory "
        f"{mx.get_peak_memory() / 1e9:.3f} GB."
    )
    losses = [r["valid_loss"] for r in read_log(folder / "log.jsonl") if "valid_loss" in r]
    if losses:
        print(
            f"Validation loss {losses[0]:.4f} before, {progress['best_loss']:.4f} at the best step "
            f"{progress['best_step']}."
        )
    print(f"Kept in {folder / 'model' if is_full else folder}.")


def _test(
    args: argparse.Namespace,
    model: "Decoder",
    data: "dict[str, Samples]",
    settings: FineTuneSettings,
) -> None:
    from ..hub.adapters import attach, read_adapter
    from ..training.fine_tune import held_out_loss

    if "test" not in data:
        raise UsageError(f"[lora] '{settings.data}' must have a test.jsonl for 'test'.")
    if not args.train and settings.adapter_path and settings.fine_tune_type != "full":
        attach(model, read_adapter(settings.adapter_path))
    loss = held_out_loss(model, data["test"], settings)
    print(f"Test loss {loss:.4f}, test perplexity {math.exp(loss):.3f}.")
