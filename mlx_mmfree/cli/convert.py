"""`mmfree convert`: writes a checkpoint with its ternary weights packed to 2 bits."""

import argparse
from collections.abc import Sequence

from .console import CommandParser, command
from .loading import DTYPES, add_latent_flag

HELP = "write a checkpoint with packed ternary weights"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree convert", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--model", "--hf-path", required=True, help="folder or Hub repository to read"
    )
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    add_latent_flag(parser)
    parser.add_argument("--mlx-path", default="mlx_model", help="new folder to write (%(default)s)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of the float tensors; default: the checkpoint's"
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    import mlx.core as mx

    from ..hub import load_model, open_checkpoint, save_model

    checkpoint = open_checkpoint(args.model, args.revision, args.latent)
    model = load_model(checkpoint, dtype=getattr(mx, args.dtype) if args.dtype else None)
    save_model(args.mlx_path, model, checkpoint.folder)
    print(f"Wrote {args.mlx_path}.")
    return 0
