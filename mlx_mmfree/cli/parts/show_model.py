"""`mmfree show model`: prints the tree of a model's parts with shapes, parameters, bits and bytes."""

import argparse
import json
from collections.abc import Sequence

from . import loading
from .command import CommandParser, command
from .flags import add_plugin_flag
from .terminal import aligned, size_text


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that name a checkpoint and how it is held in memory."""
    parser.add_argument(
        "--model", help="folder or Hub repository of the model; default: the model in the package"
    )
    parser.add_argument("--revision", help="branch, tag or commit of the Hub repository")
    loading.add_latent_flag(parser)
    add_plugin_flag(parser)


def build_parser() -> CommandParser:
    parser = CommandParser(prog="mmfree show model", description=__doc__)
    add_checkpoint_flags(parser)
    parser.add_argument(
        "--dtype",
        choices=loading.DTYPES,
        help="float type of what is not ternary; default: the checkpoint's",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object with every part instead of a tree",
    )
    loading.add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from ...evaluation.model_tree import all_parts, model_tree, tree_rows
    from ...hub.checkpoint.load import open_model

    opened = open_model(
        loading.model_source(args), args.revision, loading.dtype_of(args), latent=args.latent
    )
    with loading.limited_memory(args, opened.nbytes):
        tree = model_tree(opened.load())
    if args.json:
        parts = [
            {
                "path": part.path,
                "kind": part.kind,
                "shape": part.shape,
                "parameters": part.parameters,
                "bits": part.bits,
                "bytes": part.nbytes,
            }
            for part in all_parts(tree)
        ]
        print(json.dumps({"parts": parts}))
        return 0
    rows: list[Sequence[str]] = [("part", "kind", "shape", "parameters", "bits", "size")]
    for name, part in tree_rows(tree):
        shape = " x ".join(map(str, part.shape))
        bits = "" if part.bits is None else f"{part.bits:.2f}"
        rows.append((name, part.kind, shape, f"{part.parameters:,}", bits, size_text(part.nbytes)))
    print("\n".join(aligned(rows, left=2)))
    return 0
