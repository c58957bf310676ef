"""`mmfree fuse`: merges an adapter into its model, or writes both into one folder."""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files.checkpoint_files import ADAPTER_CONFIG_FILE
from ..files.reading import expanded, read_json_object, real_path
from ..training.corpus.rows import KINDS, kind_of_file
from .parts import flags, held_out_text, loading, source_card
from .parts.command import command
from .parts.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..hub import Tokenizer
    from ..hub.publish.model_card import ModelCard
    from ..models import Decoder

HELP = "merge an adapter into its model, or put both into one folder"

_ADAPTED = "base + adapter"
_DATA = "[fuse] 'data'"

_FORMATS = """\
The sum of a ternary matrix and an adapter is not ternary. --format keep loses nothing: the folder holds
the packed base model and the adapter, and every command uses both, such as 'mmfree generate --model
DIR'. Other programs see the base model alone, and mlx-lm takes the same folder as its --adapter-path.
--format dense merges the adapter into float matrices of the checkpoint's float type. In 16 bits they
take 8 times the memory, and their activations are no longer rounded to 8 bits. MatMul-free models have
no dense variant, because their linear layers contain a norm. --format ternary rounds the sum to ternary
again, which loses part of what was learned. It needs --data, and prints the loss before and after. Both
formats merge the adapters of layers that are not ternary into dense layers. --format peft writes the
adapter alone, in the files of PEFT. Without --adapter-path, the adapter is the one beside the base
model, or else the one in the folder 'adapters'."""


def build_parser() -> argparse.ArgumentParser:
    usual = "--model --adapter-path --output --format --data --overwrite --upload-repo"
    parser = CommandParser(prog="mmfree fuse", description=__doc__, usual=usual, epilog=_FORMATS)
    loading.add_model_flags(parser)
    group = parser.add_argument_group("result")
    flags.add_output_flag(group, "--save-path", default="fused_model")
    group.add_argument(
        "--format",
        "--form",
        choices=("keep", "dense", "ternary", "peft"),
        default="keep",
        help="keep the adapter beside its base model, merge it into dense or into ternary layers, or "
        "write it alone in PEFT's files (%(default)s)",
    )
    group.add_argument(
        "--data",
        "--data-path",
        type=Path,
        metavar="FILE",
        help="UTF-8 text on which the loss is measured before and after, or data as for 'mmfree "
        "lora': a folder, whose test or else validation samples count, or a file of samples; keys and "
        "columns have the names that they had in the training",
    )
    group.add_argument(
        "--mask-prompt",
        action="store_true",
        help="with samples as --data: measure the loss on completions or last messages alone",
    )
    group.add_argument(
        "--sequence-length",
        type=flags.positive,
        default=512,
        help="number of tokens predicted in a window of the text, as in 'mmfree perplexity' "
        "(%(default)s)",
    )
    flags.add_upload_flag(group)
    loading.add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    args.data = None if args.data is None else expanded(args.data)
    _check(args)
    from ..hub.checkpoint.save import check_target
    from ..hub.conversion.fuse import check_format, fuse, save_peft_adapter, save_with_adapter
    from ..hub.publish.upload import check_repository, plan_upload, upload

    if args.upload_repo is not None:
        check_repository(args.upload_repo)
    if args.adapter_path is None:
        opened = loading.checkpoint_of(args)
        args.adapter_path = None if opened.keeps_adapter else "adapters"
    read = [expanded(name) for name in (args.model, args.adapter_path) if name]
    check_target(real_path(args.output), args.overwrite, "fuse", read)
    sizes = {"batch_size": 8, "prefill_step_size": args.sequence_length}
    losses: dict[str, float] = {}
    with loading.loaded(args, **sizes, also=["image-classification"]) as (model, processor):
        reads_text = model.pipeline != "image-classification"
        if args.format == "peft":
            base = None if args.model is None or Path(args.model).exists() else args.model
            template = processor.given_template if reads_text else None
            save_peft_adapter(
                args.output, model, base=base, chat_template=template, overwrite=args.overwrite
            )
            print(f"Wrote the adapter alone to {args.output}, for PEFT and for --adapter-path.")
            return 0
        if args.format != "keep":
            check_format(model, args.format)
        measure = _measure(args, processor, model)
        if measure is not None:
            losses |= _losses_before(model, measure)
        if args.format != "keep":
            fuse(model, args.format)
            if measure is not None:
                losses[args.format] = measure(model, args.format)
        tokenizer = processor if reads_text else None
        folder = expanded(args.model) if tokenizer is None else tokenizer.folder
        card = _card(args, arguments, losses, folder)
        save_with_adapter(args.output, model, tokenizer, card=card, overwrite=args.overwrite)
    print(_result(args, losses, reads_text=reads_text))
    if args.upload_repo is not None:
        print(f"Uploaded to {upload(plan_upload(args.output, args.upload_repo))}")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.format == "ternary" and args.data is None:
        raise UsageError(
            "[fuse] 'data' must be given with '--format ternary', which loses part of what was "
            "learned, so that the loss can be measured before and after. Give a text like the "
            "training data."
        )
    if args.format == "peft" and (args.data is not None or args.upload_repo is not None):
        raise UsageError(
            "[fuse] 'data' and 'upload_repo' must be left out with '--format peft', which writes the "
            "adapter as it is. Upload it with 'hf upload'."
        )


def _measure(
    args: argparse.Namespace, processor: Any, model: Any
) -> "Callable[[Decoder, str], float] | None":
    """A function that measures a model and prints its loss under a name; `None` without --data."""
    if args.data is None:
        return None
    is_of_images = model.pipeline == "image-classification"
    if args.data.is_dir() or is_of_images or kind_of_file(args.data) in KINDS:
        loss_of = _loss_on_samples(args, processor, model)
    else:
        loss_of = _loss_on_text(args, processor, model.vocab_size)

    def measure(model: "Decoder", name: str) -> float:
        loss = loss_of(model)
        unit = "an image" if is_of_images else f"a token, perplexity {math.exp(loss):.3f}"
        print(f"{name}: {loss:.4f} nats {unit}", flush=True)
        return loss

    return measure


def _loss_on_text(
    args: argparse.Namespace, tokenizer: "Tokenizer", vocab_size: int
) -> "Callable[[Decoder], float]":
    from ..evaluation import is_recurrent, measure_perplexity

    text = held_out_text.read_text(args.data, _DATA)
    tokens, size_bytes = held_out_text.text_tokens(tokenizer, text, vocab_size, _DATA)
    length = args.sequence_length
    return lambda model: (
        measure_perplexity(
            model, tokens, size_bytes, length=length, carries_state=is_recurrent(model)
        ).loss
    )


def _loss_on_samples(
    args: argparse.Namespace, processor: Any, model: Any
) -> "Callable[[Decoder], float]":
    from ..training.fine_tuning.data import read_data
    from ..training.fine_tuning.fine_tune import held_out_loss
    from ..training.fine_tuning.settings import FineTuneSettings

    settings = FineTuneSettings(
        data=str(args.data),
        mask_prompt=args.mask_prompt,
        test_batches=-1,
        **_names_of_training(args.adapter_path),
    )
    splits = read_data(settings, processor, model)
    names = ("train",) if args.data.is_file() else ("test", "valid")
    samples = next((splits[name] for name in names if name in splits), None)
    if samples is None:
        raise UsageError(
            "[fuse] 'data' must hold samples for a test or for validation, such as test.jsonl or "
            f"valid.csv, or labelled images of one of these names, but '{args.data}' has neither."
        )
    samples.check_some()
    return lambda model: held_out_loss(model, samples, settings)


def _names_of_training(adapter_path: str | None) -> dict[str, Any]:
    """The names of keys and columns with which an adapter was trained, as its configuration has them."""
    from ..training.fine_tuning.settings import FineTuneSettings

    if adapter_path is None:
        return {}
    config = read_json_object(expanded(adapter_path) / ADAPTER_CONFIG_FILE, is_optional=True)
    names = [each.name for each in FineTuneSettings.declared() if each.name.endswith("_feature")]
    return {name: config[name] for name in names if isinstance(config.get(name), str)}


def _losses_before(
    model: "Decoder", measure: "Callable[[Decoder, str], float]"
) -> dict[str, float]:
    from ..hub.adapters.adapter import adapter_of, attach

    adapter = adapter_of(model)
    base = measure(attach(model, None), "base")
    attach(model, adapter).eval()
    return {"base": base, _ADAPTED: measure(model, _ADAPTED)}


def _card(
    args: argparse.Namespace, arguments: Sequence[str], losses: dict[str, float], folder: Path
) -> "ModelCard":
    return replace(
        source_card.model_card("fuse", arguments, args.model or str(folder), args.revision, folder),
        name=args.upload_repo or Path(args.output).name,
        relation="adapter" if args.format == "keep" else "finetune",
        losses=losses,
    )


def _result(args: argparse.Namespace, losses: dict[str, float], *, reads_text: bool) -> str:
    folder = shlex.quote(args.output)
    if args.format == "keep":
        use = f"generate --model {folder}"
        if not reads_text:
            use = f"classify --model {folder} picture.jpg"
        return f"Wrote the base model and the adapter to {args.output}. To use both: mmfree {use}"
    if losses:
        change = losses[args.format] - losses[_ADAPTED]
        unit = "a token" if reads_text else "an image"
        return f"Wrote {args.output}. Merging changed the loss by {change:+.4f} nats {unit}."
    return (
        f"Wrote {args.output}. The effect of merging was not measured. With --data FILE, the loss "
        "is printed before and after."
    )
