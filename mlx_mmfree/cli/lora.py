"""`mmfree lora`: fine-tunes a model with LoRA or DoRA adapters, or all of its weights."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..platform.allocator import keep_freed_memory
from ..platform.resident_memory import BYTES_PER_GB
from ..platform.terminal import counted
from ..training.fine_tuning.settings import COMMAND_KEYS, FineTuneSettings, fine_tune_settings
from ..training.precision import precision_note
from ..training.run_settings import checked, read_mapping
from ..training.services import chosen_services, service_callbacks
from .parts import loading, source_card
from .parts.command import command
from .parts.flags import add_plugin_flag, add_report_flags, add_settings_flags
from .parts.parser import CommandParser
from .parts.process_group import add_process_flags, connected, quiet_unless_first

if TYPE_CHECKING:
    from ..hub import Tokenizer
    from ..hub.adapters.adapter import Adapter
    from ..hub.checkpoint.load import OpenedModel
    from ..hub.publish.model_card import ModelCard
    from ..images import ImageProcessor
    from ..models import Decoder
    from ..training.data_parallel import DataParallel
    from ..training.samples import Samples

HELP = "fine-tune a model with LoRA or DoRA, or all of its weights"

_USUAL = (
    "--model --config --train --test --data --output --adapter-path --fine-tune-type --learning-rate "
    "--steps --batch-size --num-layers --rank --seed --dry-run"
)
_NOTHING_LEARNED = (
    "Nothing was learned: no step was better on the validation samples than the model before the "
    "training, which is what the result is. Try more --steps, a lower --learning-rate if the training "
    "loss jumps or a higher one if it stays, more data, or validation samples that are more like it."
)


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree lora",
        usual=_USUAL,
        description=__doc__,
        epilog="Repeat the command to resume a run that was stopped.",
    )
    loading.add_source_flags(parser, "; default: the model in the package")
    parser.add_argument(
        "-c", "--config", type=Path, help="YAML file with these settings; a flag wins over the file"
    )
    parser.add_argument(
        "--train", action="store_true", default=None, help="train on the training samples"
    )
    parser.add_argument(
        "--test",
        action="store_true",
        default=None,
        help="print the loss on the test samples at the end",
    )
    add_settings_flags(parser, FineTuneSettings)
    add_report_flags(parser)
    loading.add_dry_run_flag(parser)
    parser.add_argument(
        "--rebuild-masters",
        action="store_true",
        default=None,
        help="with --fine-tune-type full: make float master weights from the ternary weights of a "
        "packed model; what had been rounded away stays lost",
    )
    loading.add_latent_flag(parser)
    add_plugin_flag(parser)
    add_process_flags(parser)
    loading.add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    settings = _settings(args)
    from ..hub.adapters.adapter_folder import read_adapter
    from ..hub.checkpoint.checkpoint import open_checkpoint
    from ..hub.checkpoint.load import OpenedModel
    from ..training.data_parallel import DataParallel
    from ..training.fine_tuning.fine_tune import check_fine_tunable, plan_fine_tune
    from ..training.first_model import load_companion
    from ..training.reports import describe_weights
    from ..training.run_folder import own_run_folder

    keep_freed_memory()
    # before work that may take one process longer than MLX waits for it
    group = connected(args, "lora")
    is_full = settings.is_full and bool(args.train)
    args.dtype = "float32" if is_full else settings.dtype
    opened = OpenedModel(
        loading.checkpoint_of(args),
        loading.dtype_of(args),
        packed=not is_full,
        rebuild_masters=bool(args.rebuild_masters),
    )
    check_fine_tunable(opened.model)
    other = settings.teacher or settings.reference_model_path
    companion = None if other is None else OpenedModel(open_checkpoint(other))
    model_bytes = opened.nbytes + (0 if companion is None else companion.nbytes)
    adapter = None
    if not args.train and not settings.is_full and settings.adapter_path:
        adapter = read_adapter(settings.adapter_path)
    processes = DataParallel(group, timeout_s=settings.process_timeout_s)
    with ExitStack() as stack:
        stack.enter_context(quiet_unless_first(processes.rank))
        if args.train and not args.dry_run:
            own = own_run_folder(Path(settings.adapter_path), is_first=processes.is_first)
            stack.enter_context(own)
        stack.enter_context(loading.limited_memory(args, model_bytes))
        processor: Any = _processor(opened, settings)
        # a fault of the data is reported before the weights take their time
        data = _read(args, settings, processor, opened.model)
        model = opened.load()
        print(describe_weights(model))
        if args.train:
            _prepare(model, settings)
        loaded = None if companion is None else load_companion(companion, processor)
        teacher = None if settings.teacher is None else loaded
        if args.train:
            plan = plan_fine_tune(model, data, settings, processes, teacher=teacher)
            if not args.dry_run:
                plan.check(args.memory_limit, {})
            loading.show_plan(plan)
        if args.dry_run:
            return 0
        if settings.train_mode == "dpo":
            reference = model if loaded is None else loaded
            data = _referenced(args, data, reference, settings, processes)
            # the training has no use for its memory
            del reference
            loaded = None
        del companion
        if args.train:
            card = _card(args, argv, opened) if settings.is_full and processes.is_first else None
            models = {"teacher" if settings.teacher is not None else "reference": loaded}
            _train(args, model, processor, data, settings, models, processes, card)
        if args.test and processes.is_first:
            _test(model, adapter, data, settings)
    return 0


def _processor(opened: "OpenedModel", settings: FineTuneSettings) -> Any:
    """The tokenizer, with the template that is given, or the template of an adapter that goes on."""
    from ..hub.adapters.adapter_folder import adapter_template

    file, begun = settings.chat_template, settings.resume_adapter_file
    template = None if file is None else loading.template_of(file)
    for folder in (settings.adapter_path, begun and Path(begun).parent):
        if template is None and folder and not settings.is_full:
            template = adapter_template(folder)
    return loading.with_template(opened.processor(), template, given=file is not None)


def _read(
    args: argparse.Namespace, settings: FineTuneSettings, processor: Any, model: Any
) -> "dict[str, Samples[Any]]":
    """The samples of each split, which must have some for what the command is to do."""
    from ..training.fine_tuning.data import describe_step, read_data

    data = read_data(settings, processor, model)
    for name, samples in data.items():
        print(f"{name}: {samples.summary()}")
    for split in ("train", "test"):
        if not getattr(args, split):
            continue
        if split not in data:
            reads_text = model.pipeline != "image-classification"
            file = (
                f"{split}.jsonl or the like" if reads_text else f"a folder {split} or {split}.npz"
            )
            raise UsageError(
                f"[lora] 'data' must hold {file} for '{split}' but '{settings.data}' has none."
            )
        data[split].check_some()
    if args.train:
        print(describe_step(data["train"], settings, _unit(model)))
    return data


def _card(
    args: argparse.Namespace, argv: Sequence[str] | None, opened: "OpenedModel"
) -> "ModelCard":
    """The model card of a fully tuned model, with its source and the command."""
    folder = opened.checkpoint.folder
    given = list(sys.argv[1:] if argv is None else argv)
    return source_card.model_card("lora", given, args.model or str(folder), args.revision, folder)


def _settings(args: argparse.Namespace) -> FineTuneSettings:
    """The settings from the YAML file and the flags. The command's own are set on `args`."""
    values: dict[str, Any] = {}
    if args.config is not None:
        read = read_mapping(args.config, "lora")
        values = FineTuneSettings.beside(read, args.config, model="model")
    try:
        own = {
            name: checked(name, values.pop(name, None), kind | None)
            for name, kind in COMMAND_KEYS.items()
        }
    except ValueError as error:
        raise UsageError(f"[lora] a value of '{args.config}' is wrong: {error}.") from error
    for name, given in own.items():
        if getattr(args, name) is None:
            setattr(args, name, given)
    names = [field.name for field in fields(FineTuneSettings)]
    values |= {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if not args.train and not args.test:
        raise UsageError("[lora] 'train' or 'test' must be given but neither was. Add --train.")
    chosen_services(args.report_to, "lora")
    if args.rebuild_masters and values.get("fine_tune_type") != "full":
        raise UsageError(
            "[lora] 'rebuild_masters' must come with 'fine_tune_type' full, which trains master "
            f"weights, but got {values.get('fine_tune_type', 'lora')!r}. Leave it out."
        )
    return fine_tune_settings(values, "the flags" if args.config is None else f"'{args.config}'")


def _prepare(model: "Decoder", settings: FineTuneSettings) -> None:
    from mlx.utils import tree_flatten

    from ..training.fine_tuning.fine_tune import prepare, trained_parameters

    names = prepare(model, settings)
    trained, total = trained_parameters(model)
    plural = "" if len(names) == 1 else "s"
    of_layers = "" if settings.is_full else f" of {len(names)} layer{plural}"
    print(
        f"Training {trained:,} of {total:,} parameters ({trained / total:.3%}) in "
        f"{len(tree_flatten(model.trainable_parameters())):,} tensors{of_layers}: "
        f"{settings.fine_tune_type}."
    )
    if settings.is_full and (note := precision_note(settings.dtype or "float32")):
        print(note)


def _referenced(
    args: argparse.Namespace,
    data: "dict[str, Samples[Any]]",
    reference: "Decoder",
    settings: FineTuneSettings,
    processes: "DataParallel",
) -> "dict[str, Samples[Any]]":
    """The pairs that the command uses, with their log-probabilities under the reference model."""
    from ..training.fine_tuning.preferences import with_reference

    used = [*(("train", "valid") if args.train else ()), *(("test",) if args.test else ())]
    return with_reference(
        {name: samples for name, samples in data.items() if name in used},
        reference,
        batch_size=settings.batch_size,
        folder=Path(settings.adapter_path) if args.train else None,
        processes=processes,
    )


def _train(
    args: argparse.Namespace,
    model: "Decoder",
    processor: "Tokenizer | ImageProcessor",
    data: "dict[str, Samples[Any]]",
    settings: FineTuneSettings,
    models: "Mapping[str, Decoder | None]",
    processes: "DataParallel",
    card: "ModelCard | None",
) -> None:
    from ..training.fine_tuning.fine_tune import fine_tune
    from ..training.reports import StepReports
    from ..training.results import write_cards

    if "valid" not in data:
        print(
            "Without samples for validation, nothing is measured during training. The last weights are "
            "kept."
        )
    folder = Path(settings.adapter_path)
    progress = fine_tune(
        model,
        processor,
        data,
        settings,
        **models,
        processes=processes,
        callbacks=[
            StepReports(settings.iters, _unit(model)),
            *service_callbacks(
                chosen_services(args.report_to, "lora"),
                *(args.project_name, folder, settings.record(), processes),
            ),
        ],
    )
    if card is not None:
        words = f"All weights were trained for {progress['step']} steps by `mmfree lora`."
        write_cards(folder, card, lambda is_ternary: f"## Training\n\n{words}")
    _print_results(model, progress, folder, settings.is_full)


def _unit(model: Any) -> str:
    """The unit of the data that a run of the model learns from."""
    return "images" if model.pipeline == "image-classification" else "tokens"


def _print_results(model: Any, progress: Mapping[str, Any], folder: Path, is_full: bool) -> None:
    import mlx.core as mx

    from ..hub.adapters.adapter_folder import why_not_in_mlx_lm
    from ..training.results import read_log, written_models
    from ..training.run_folder import LOG_FILE

    print(
        f"{counted(progress['step'], 'step')}, learned from {progress['tokens']:,} {_unit(model)}, peak "
        f"memory {mx.get_peak_memory() / BYTES_PER_GB:.3f} GB."
    )
    records = [r for r in read_log(folder / LOG_FILE) if "valid_loss" in r]
    if records:
        # of GRPO, the loss is the negative reward
        name, sign = ("reward", -1) if "valid_reward" in records[0] else ("loss", 1)
        print(
            f"Validation {name} {records[0][f'valid_{name}']:.4f} before, "
            f"{sign * progress['best_loss']:.4f} at the best step {progress['best_step']}."
        )
        if progress["best_step"] == 0:
            print(_NOTHING_LEARNED)
    print(written_models(folder) if is_full else f"Wrote the adapter to {folder}.")
    if not is_full and (reason := why_not_in_mlx_lm(model)):
        print(f"mlx-lm does not read this adapter: {reason}.")


def _test(
    model: "Decoder",
    adapter: "Adapter | None",
    data: "dict[str, Samples[Any]]",
    settings: FineTuneSettings,
) -> None:
    """Prints the metrics of the test samples; `adapter` is one that the model does not have yet."""
    from ..hub.adapters.adapter import attach
    from ..training.fine_tuning.fine_tune import held_out_metrics

    if adapter is not None:
        attach(model, adapter)
    metrics = held_out_metrics(model, data["test"], settings)
    loss = metrics["loss"]
    if settings.learns_preferences:
        print(
            f"Test loss {loss:.4f}; the chosen answer is preferred in {metrics['accuracy']:.1%} of the "
            f"pairs, with a mean margin of {metrics['margin']:.4f}."
        )
    elif "reward" in metrics:
        print(f"Test reward {metrics['reward']:.4f}.")
    elif "accuracy" in metrics:
        print(f"Test loss {loss:.4f}; {metrics['accuracy']:.1%} of the images are sorted rightly.")
    else:
        print(f"Test loss {loss:.4f}, test perplexity {math.exp(loss):.3f}.")
