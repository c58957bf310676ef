"""`mmfree show weights`: prints and draws shares and scales of the ternary weights of a checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError
from .command import CommandParser, check_writable, command
from .loading import add_memory_flags, limited_memory, model_name, model_source
from .show_attention import require_matplotlib
from .show_model import add_checkpoint_flags
from .terminal import aligned


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="mmfree show weights",
        description=__doc__,
        epilog="Float master weights are shown as they are rounded to be used.",
    )
    add_checkpoint_flags(parser)
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="also draw them into a PNG file"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.picture is not None:
        require_matplotlib("picture")
        check_writable("[show] 'picture'", args.picture)
    from ...evaluation.trits import count_trits, draw_trits
    from ...hub.checkpoint.load import open_model

    opened = open_model(model_source(args), args.revision, latent=args.latent)
    with limited_memory(args, opened.nbytes):
        found = count_trits(opened.load())
    if not found:
        raise UsageError(
            f"[show] 'model' must have ternary matrices but '{model_name(args)}' has none."
        )
    if args.json:
        listed = [each._asdict() | {"shares": each.shares} for each in found]
        print(json.dumps({"matrices": listed}))
    else:
        rows: list[Sequence[str]] = [("matrix", "shape", "-1", "0", "+1", "scale")]
        for each in found:
            shares = [f"{share:.1%}" for share in each.shares]
            least, mean, largest = each.scales
            scale = f"{mean:.4g}" if least == largest else f"{least:.3g} to {largest:.3g}"
            rows.append((each.path, " x ".join(map(str, each.shape)), *shares, scale))
        print("\n".join(aligned(rows)))
    if args.picture is not None:
        zeros = sum(each.counts[1] for each in found) / sum(sum(each.counts) for each in found)
        title = f"Ternary weights of {model_name(args)}: {zeros:.1%} zeros"
        draw_trits(found, title, args.picture)
    return 0
