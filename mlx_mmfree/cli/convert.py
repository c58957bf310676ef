"""`mmfree convert`: writes a checkpoint in another form and compares it with its source."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files.paths import expanded
from .parts.console import CommandParser, command
from .parts.loading import DTYPES, add_latent_flag
from .perplexity import read_text

if TYPE_CHECKING:
    from ..hub import Checkpoint, Report
    from ..hub.publish.model_card import ModelCard

HELP = "write a checkpoint in the form of MLX, transformers or GGUF"

_BITS = (4, 6, 8)
_UNITS = {"M": 10**6, "G": 10**9}


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree convert", description=__doc__, allow_abbrev=False)
    _add_source_flags(parser.add_argument_group("source"))
    _add_target_flags(parser.add_argument_group("target"))
    _add_ternarize_flags(parser.add_argument_group("dense to ternary"))
    return parser


def _add_source_flags(group: Any) -> None:
    group.add_argument(
        "--model", "--hf-path", required=True, help="folder, Hub repository or .gguf file to read"
    )
    group.add_argument("--revision", help="branch, tag or commit of the repository")
    add_latent_flag(group)


def _add_target_flags(group: Any) -> None:
    group.add_argument("--mlx-path", default="mlx_model", help="new folder to write (%(default)s)")
    group.add_argument(
        "--to",
        choices=("mlx", "hf", "gguf"),
        default="mlx",
        help="the form to write: MLX's, which mlx-lm runs too; transformers', of MatMul-free models "
        "only with --keep-masters; or GGUF, not for MatMul-free models (%(default)s)",
    )
    group.add_argument(
        "--gguf-type",
        choices=("tq2_0", "tq1_0", "q2_0", "i2_s"),
        help="type of ternary tensors in GGUF; q2_0 may have a scale for each 64 inputs and needs "
        "llama.cpp of June 2026 or newer, i2_s is for bitnet.cpp (tq2_0)",
    )
    group.add_argument(
        "--split-max-size",
        type=_size,
        metavar="SIZE",
        help="with --to gguf, write several files with at most so many bytes of tensors, such as 500M "
        "or 4G",
    )
    group.add_argument(
        "--dtype", choices=DTYPES, help="type of the float tensors; default: the checkpoint's"
    )
    for place, what in (("embed", "embedding"), ("head", "output head")):
        group.add_argument(
            f"--{place}-bits",
            type=int,
            choices=_BITS,
            help=f"quantise a float {what} to this many bits",
        )
    group.add_argument(
        "--keep-masters",
        action="store_true",
        help="with --to hf, leave float master weights unpacked, to be trained on",
    )
    group.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not read the result again and compare every tensor, and the logits, with the "
        "source's; comparing logits loads one after the other",
    )
    group.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    group.add_argument("--upload-repo", help="Hub repository to upload the result to")


def _add_ternarize_flags(group: Any) -> None:
    group.add_argument(
        "--ternarize",
        nargs="?",
        const="tensor",
        choices=("tensor", "group"),
        help="make a dense Llama or Qwen3 ternary: one scale a matrix and 8-bit activations, as "
        "BitNet, or a scale for each group of 128 inputs and float activations; needs fine-tuning",
    )
    group.add_argument("--text-file", type=Path, help="text on which both models are measured")


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    _check(args)
    import mlx.core as mx

    from ..hub import convert, open_checkpoint
    from ..hub.adapters.adapter import CONFIG_FILE as ADAPTER_CONFIG
    from ..hub.conversion.plan import FloatForms
    from ..hub.conversion.ternarize import check_dense, ternarized
    from ..hub.publish.upload import check_repository, plan_upload, upload

    if args.upload_repo is not None:
        check_repository(args.upload_repo)
    source = checkpoint = open_checkpoint(args.model, args.revision, args.latent)
    if args.ternarize is not None:
        check_dense(checkpoint)
    if args.ternarize == "tensor":
        source = ternarized(checkpoint)
    forms = FloatForms(
        dtype=getattr(mx, args.dtype) if args.dtype else None,
        embed_bits=args.embed_bits,
        head_bits=args.head_bits,
        ternarize_groups=args.ternarize == "group",
        keep_masters=args.keep_masters,
    )
    report = convert(
        source,
        args.mlx_path,
        to=args.to,
        gguf_type=args.gguf_type or "tq2_0",
        forms=forms,
        max_part_bytes=args.split_max_size,
        check=args.verify,
        overwrite=args.overwrite,
        show_progress=sys.stderr.isatty(),
        card=_card(args, arguments, checkpoint),
    )
    print(_table(report))
    if args.ternarize is not None:
        _warn_of_losses(args, checkpoint)
    print(f"Wrote {args.mlx_path}. Programs that open it:")
    width = max(len(each.runtime) for each in report.openings)
    for each in report.openings:
        print(f"  {each.runtime.ljust(width)}  {each}")
    if (checkpoint.folder / ADAPTER_CONFIG).exists():
        print(
            "note: the adapter that lies beside the model was not converted. 'mmfree fuse' merges it.",
            file=sys.stderr,
        )
    if args.upload_repo is not None:
        print(f"Uploaded to {upload(plan_upload(args.mlx_path, args.upload_repo))}")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.text_file is not None and args.ternarize is None:
        raise UsageError("[convert] 'text-file' must come with 'ternarize' but came alone.")
    if args.gguf_type is not None and args.to != "gguf":
        raise UsageError(f"[convert] 'gguf-type' must come with '--to gguf' but got {args.to!r}.")
    if args.split_max_size is not None and args.to != "gguf":
        raise UsageError(
            f"[convert] 'split-max-size' must come with '--to gguf' but got {args.to!r}."
        )
    if args.keep_masters and args.to != "hf":
        raise UsageError(f"[convert] 'keep-masters' must come with '--to hf' but got {args.to!r}.")
    if args.text_file is not None and not args.text_file.is_file():
        raise UsageError(f"[convert] 'text-file' must be a file but got '{args.text_file}'.")


def _size(text: str) -> int:
    """Bytes, given in millions or in thousands of millions."""
    number, unit = text[:-1], text[-1:].upper()
    if (
        unit not in _UNITS
        or not number.isascii()
        or not number.isdigit()
        or not 0 < int(number) < 10**6
    ):
        raise argparse.ArgumentTypeError(
            f"must be a whole number with M or G behind it, such as 500M, but got {text[:40]!r}"
        )
    return int(number) * _UNITS[unit]


def _card(
    args: argparse.Namespace, arguments: Sequence[str], checkpoint: "Checkpoint"
) -> "ModelCard":
    return replace(
        model_card("convert", arguments, args.model, args.revision, checkpoint.folder),
        name=args.upload_repo or Path(args.mlx_path).name,
        format=args.to,
    )


def model_card(
    name: str, arguments: Sequence[str], model: str, revision: str | None, folder: Path
) -> "ModelCard":
    """What a card says of a source.

    Args:
        name: The command.
        arguments: Those of the command.
        model: Folder or Hub repository of the source.
        revision: Of the repository.
        folder: Where the source lies.
    """
    from ..hub.publish.model_card import CARD_FILE, CARD_PATTERNS, ModelCard, read_source_card
    from ..hub.remote.download import local_folder

    is_local = expanded(model).exists()
    if not is_local:
        folder = local_folder(model, revision, patterns=CARD_PATTERNS)
    source = read_source_card(folder)
    if source.problem is not None:
        print(
            f"note: '{folder / CARD_FILE}' is not read in full: {' '.join(source.problem.split())}. "
            "Add its licence, languages and datasets to the new card by hand.",
            file=sys.stderr,
        )
    # a card is public, local folders are not
    shown = [Path(text).name if Path(text).is_absolute() else text for text in arguments]
    return ModelCard(
        name=folder.name,
        format="mlx",
        command=shlex.join(["mmfree", name, *shown]),
        base_model=None if is_local else model,
        base_revision=revision,
        source=source,
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    if report.logits_difference is None:
        return "\n".join([*lines, "Not compared with the source."])
    return "\n".join(
        [
            *lines,
            "Read again and compared: every tensor is what the source gives, codes of ternary "
            "matrices are equal; the logits of a fixed sequence differ by at most "
            f"{report.logits_difference:.3g} of the largest.",
        ]
    )


def _warn_of_losses(args: argparse.Namespace, checkpoint: "Checkpoint") -> None:
    """Says what ternarisation costs, in numbers if there is a text."""
    print(
        "Ternarised without fine-tuning: expect much worse text than the source's until the model "
        "is trained on."
    )
    if args.text_file is None:
        return
    import mlx.core as mx
    import numpy as np

    from ..evaluation import measure_perplexity
    from ..hub import load_model, load_tokenizer

    text = read_text(args.text_file, "text-file")
    tokens = np.array(load_tokenizer(checkpoint.folder).encode(text), np.int32)
    if len(tokens) < 2:
        raise UsageError(f"[convert] 'text-file' must hold text but got '{args.text_file}'.")
    for name, place in (("source", checkpoint), ("ternary", args.mlx_path)):
        model = load_model(place)
        measured = measure_perplexity(model, tokens, len(text.encode()))
        del model
        mx.clear_cache()
        print(
            f"{name}: {measured.loss:.4f} nats a token, perplexity {measured.perplexity:.2f}, "
            f"{measured.bits_per_byte:.4f} bits a byte"
        )
