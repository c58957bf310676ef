"""`mmfree convert`: writes a checkpoint in another format and compares it with its source."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .parts import flags, held_out_text, loading, source_card, terminal
from .parts.command import command
from .parts.parser import CommandParser

if TYPE_CHECKING:
    from ..hub import Checkpoint, Report
    from ..hub.conversion.to_folder import FloatFormats
    from ..hub.publish.model_card import ModelCard

HELP = "write a checkpoint in the format of MLX, transformers or GGUF"

_USUAL = (
    "--model --revision --output --to --gguf-type --dtype --keep-masters --overwrite --upload-repo "
    "--ternarize --data"
)
_BITS = (4, 6, 8)
_TEXT = "[convert] 'data'"
_UNITS = {"M": 10**6, "G": 10**9}


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree convert", description=__doc__, usual=_USUAL)
    _add_source_flags(parser.add_argument_group("source"))
    _add_target_flags(parser.add_argument_group("target"))
    _add_ternarize_flags(parser.add_argument_group("dense to ternary"))
    return parser


def _add_source_flags(group: Any) -> None:
    group.add_argument(
        "--model",
        "--hf-path",
        required=True,
        help="folder, Hub repository or .gguf file of the model to convert",
    )
    group.add_argument("--revision", help="branch, tag or commit of the Hub repository")
    loading.add_latent_flag(group)
    flags.add_plugin_flag(group)


def _add_target_flags(group: Any) -> None:
    flags.add_output_flag(group, "--mlx-path", default="mlx_model")
    group.add_argument(
        "--to",
        choices=("mlx", "hf", "gguf"),
        default="mlx",
        help="format to write: mlx, which mlx-lm runs too; hf for transformers (for MatMul-free models "
        "only with --keep-masters); gguf for llama.cpp (not for MatMul-free models) (%(default)s)",
    )
    group.add_argument(
        "--gguf-type",
        choices=("tq2_0", "tq1_0", "q2_0", "pq2_0", "q1_0", "i2_s"),
        help="with --to gguf: type of the ternary tensors; q2_0 can hold a scale for each 64 inputs, "
        "q1_0 holds signs with one for each 128, and both need llama.cpp from June 2026 or later; "
        "pq2_0 has one for each 128, for PrismML's llama.cpp; i2_s is for bitnet.cpp (i2_s for BitNet's "
        "own architecture; pq2_0 for rotated weights; else tq2_0, or what holds the scales of groups)",
    )
    group.add_argument(
        "--trits-per-byte",
        type=int,
        choices=(4, 5),
        help="with --to mlx: ternary weights in a byte: 4 take 2 bits each, 5 take 1.6 and are unpacked "
        "when they are read (4)",
    )
    group.add_argument(
        "--split-max-size",
        type=_size,
        metavar="SIZE",
        help="with --to gguf: write several files with at most this many bytes of tensors each, such "
        "as 500M or 4G",
    )
    group.add_argument(
        "--dtype",
        choices=loading.DTYPES,
        help="float type of the tensors that are not packed; default: the checkpoint's",
    )
    for module, what in (("embed", "embedding"), ("head", "output head")):
        group.add_argument(
            f"--{module}-bits",
            type=int,
            choices=_BITS,
            help=f"quantise a float {what} to this many bits",
        )
    group.add_argument(
        "--keep-masters",
        action="store_true",
        help="with --to hf: write float master weights, which can be trained further, and do not "
        "pack them",
    )
    group.add_argument(
        "--unrotate",
        nargs="?",
        const="dense",
        type=_unrotated,
        metavar="BITS",
        help="undo the rotation of rotated weights, for programs without it: as floats, or with --to "
        "mlx as codes of 4, 5, 6 or 8 bits (floats)",
    )
    group.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="skip the check, which reads the result and compares its tensors and logits with those "
        "of the source; it loads one model after the other",
    )
    flags.add_upload_flag(group)


def _add_ternarize_flags(group: Any) -> None:
    group.add_argument(
        "--ternarize",
        nargs="?",
        const="tensor",
        choices=("tensor", "group"),
        help="make a dense Llama, Qwen3 or image model ternary, which then needs fine-tuning: "
        "tensor, as in BitNet, has one scale for each matrix and 8-bit activations; group has a scale "
        "for each 128 inputs and float activations (tensor)",
    )
    group.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="with --ternarize: UTF-8 text on which both models are measured",
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    _check(args)
    text = None if args.data is None else held_out_text.read_text(args.data, _TEXT)
    from ..hub import convert, open_checkpoint
    from ..hub.adapters.adapter_folder import holds_adapter
    from ..hub.conversion.to_folder import check_dense, ternarized
    from ..hub.publish.upload import check_repository, plan_upload, upload

    if args.upload_repo is not None:
        check_repository(args.upload_repo)
    source = checkpoint = open_checkpoint(args.model, args.revision, args.latent)
    if args.ternarize is not None:
        check_dense(checkpoint)
    if args.ternarize == "tensor":
        source = ternarized(checkpoint)
    report = convert(
        source,
        args.output,
        to=args.to,
        gguf_type=args.gguf_type,
        trits_per_byte=args.trits_per_byte or 4,
        formats=_float_formats(args),
        max_part_bytes=args.split_max_size,
        check=args.verify,
        overwrite=args.overwrite,
        show_progress=True,
        card=_card(args, arguments, checkpoint),
    )
    print(_table(report))
    if args.ternarize is not None:
        _warn_of_losses(args.output, checkpoint, text)
    print(f"Wrote {args.output}. Programs that open it:")
    print("\n".join(f"  {line}" for line in _openings(report)))
    if holds_adapter(checkpoint.folder):
        print(
            "note: the model's folder also holds an adapter, which was not converted. Merge it first "
            "with 'mmfree fuse'.",
            file=sys.stderr,
        )
    if args.upload_repo is not None:
        print(f"Uploaded to {upload(plan_upload(args.output, args.upload_repo))}")
    return 0


def _float_formats(args: argparse.Namespace) -> "FloatFormats":
    from ..hub.conversion.to_folder import FloatFormats

    return FloatFormats(
        dtype=loading.dtype_of(args),
        embed_bits=args.embed_bits,
        head_bits=args.head_bits,
        ternarize_groups=args.ternarize == "group",
        keep_masters=args.keep_masters,
        unrotate=args.unrotate,
    )


def _check(args: argparse.Namespace) -> None:
    if args.data is not None and args.ternarize is None:
        raise UsageError(
            "[convert] 'data' must come with 'ternarize' but came alone. Leave it out."
        )
    formats = {
        "trits_per_byte": "mlx",
        "gguf_type": "gguf",
        "split_max_size": "gguf",
        "keep_masters": "hf",
    }
    for name, target in formats.items():
        if getattr(args, name) and args.to != target:
            raise UsageError(
                f"[convert] '{name}' must come with '--to {target}' but got {args.to!r}. Leave it out."
            )


def _unrotated(text: str) -> int | str:
    """The bits of codes, or "dense" for floats."""
    if text == "dense":
        return text
    if text not in ("4", "5", "6", "8"):
        raise argparse.ArgumentTypeError(
            f"must be 4, 5, 6 or 8, or be given without a number, but got {text[:40]!r}"
        )
    return int(text)


def _size(text: str) -> int:
    """A number of bytes, given in millions (M) or in billions (G)."""
    number, unit = text[:-1], text[-1:].upper()
    if (
        unit not in _UNITS
        or not number.isascii()
        or not number.isdigit()
        or not 0 < int(number) < 10**6
    ):
        raise argparse.ArgumentTypeError(
            f"must be a whole number followed by M or G, such as 500M, but got {text[:40]!r}"
        )
    return int(number) * _UNITS[unit]


def _card(
    args: argparse.Namespace, arguments: Sequence[str], checkpoint: "Checkpoint"
) -> "ModelCard":
    return replace(
        source_card.model_card("convert", arguments, args.model, args.revision, checkpoint.folder),
        name=args.upload_repo or Path(args.output).name,
        format=args.to,
    )


def _table(report: "Report") -> str:
    heads = ("", "tensors", "weights", "bits/weight", "bytes before", "bytes after", "difference")
    rows = [heads]
    for name, group in {**report.groups, "total": report.total}.items():
        if group.tensors:
            difference = "" if group.difference is None else f"{group.difference:.3g}"
            rows.append(
                (
                    name,
                    f"{group.tensors}",
                    f"{group.weights:,}",
                    f"{group.bits_per_weight:.3f}",
                    f"{group.source_bytes:,}",
                    f"{group.target_bytes:,}",
                    difference,
                )
            )
    lines = terminal.aligned(rows)
    if report.logits_difference is None:
        return "\n".join([*lines, "The result was not compared with the source."])
    return "\n".join(
        [
            *lines,
            "The result was read and compared with the source. Every tensor is as expected, and the "
            "codes of ternary matrices are equal. The logits of a fixed input differ by at most "
            f"{report.logits_difference:.3g} of the largest logit.",
        ]
    )


def _openings(report: "Report") -> list[str]:
    """A line for each program that may open the result."""
    width = max(len(each.runtime) for each in report.openings)
    return [f"{each.runtime.ljust(width)}  {each}" for each in report.openings]


def _warn_of_losses(target: str, checkpoint: "Checkpoint", text: str | None) -> None:
    """Says what ternarisation costs, in numbers if there is a text to measure on."""
    print(
        "The model was made ternary without fine-tuning. It will be much worse than the source "
        "until it is trained further."
    )
    if text is None:
        return
    import mlx.core as mx

    from ..evaluation import measure_perplexity
    from ..hub import load_model
    from ..hub.checkpoint.load import load_text_tokenizer

    tokenizer = load_text_tokenizer(checkpoint.folder)
    for name, path in (("source", checkpoint), ("ternary", target)):
        model = load_model(path)
        tokens, size_bytes = held_out_text.text_tokens(tokenizer, text, model.vocab_size, _TEXT)
        measured = measure_perplexity(model, tokens, size_bytes)
        del model
        mx.clear_cache()
        print(
            f"{name}: {measured.loss:.4f} nats a token, perplexity {measured.perplexity:.2f}, "
            f"{measured.bits_per_byte:.4f} bits a byte"
        )
