"""`mmfree tokenize`: writes token files, from which `mmfree train` reads corpora of any size."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..platform.terminal import counted
from ..platform.threads import thread_count
from .parts.command import command
from .parts.flags import positive
from .parts.loading import check_revision, model_source
from .parts.parser import CommandParser

HELP = "turn texts into token files for training"

_METHOD = """\
The folder gets train.tokens, valid.tokens if documents are held out, and the tokenizer. A text file
holds documents separated by <|endoftext|>, JSON lines and parquet have one in each line or row, and
.txt and .jsonl files may be compressed with .gz or .xz. Special tokens in a text count as plain text.
The files do not depend on the number of processes."""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree tokenize",
        description=__doc__,
        usual="--data --output --model --vocab-size --valid-fraction",
        epilog=_METHOD,
    )
    source = parser.add_argument_group("source")
    source.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="SOURCE",
        help="files, folders with .txt, .jsonl or .parquet files, or datasets 'owner/name' of the Hub, "
        "whose files are read one by one",
    )
    source.add_argument(
        "--include",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="read only files of folders and datasets that match a pattern such as 'data/train-*'",
    )
    source.add_argument(
        "--data-revision", help="branch, tag or commit of the datasets; default: the newest"
    )
    source.add_argument(
        "--text-column",
        default="text",
        help="key or column of the text in JSON lines and parquet (%(default)s)",
    )
    target = parser.add_argument_group("tokens")
    target.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="a new folder for the token files"
    )
    target.add_argument(
        "--model",
        help="folder or Hub repository with the tokenizer; default: the model in the package",
    )
    target.add_argument("--revision", help="branch, tag or commit of the Hub repository")
    target.add_argument(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="train a vocabulary of N tokens on the data instead of a model's",
    )
    target.add_argument(
        "--valid-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="part of the documents that goes to valid.tokens, chosen by a hash of each text "
        "(%(default)s)",
    )
    target.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="number of processes; default: one for each core",
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from ..hub.checkpoint.load import load_text_tokenizer
    from ..training.corpus.tokenize import find_sources, tokenize

    check_revision(args)
    sources = find_sources(args.data, args.include, args.data_revision)
    if args.vocab_size is not None and args.model is not None:
        raise UsageError(
            "[tokenize] 'vocab_size' must come without 'model', which brings a vocabulary, but both are "
            "given. Leave one out."
        )
    headers = tokenize(
        sources,
        args.output,
        None if args.vocab_size else load_text_tokenizer(model_source(args), args.revision).folder,
        vocab_size=args.vocab_size,
        text_column=args.text_column,
        held_out=args.valid_fraction,
        processes=args.processes or thread_count(),
    )
    files = "1 file" if len(sources) == 1 else f"{len(sources):,} files"
    print(f"Read {files}.")
    for name, header in headers.items():
        print(
            f"Wrote '{args.output / name}': {header.tokens:,} tokens of "
            f"{counted(header.documents, 'document')}, "
            f"{header.size_bytes:,} bytes of text, in {header.bits} bits each."
        )
    return 0
