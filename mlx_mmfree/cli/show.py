"""`mmfree show`: draws how a model mixes the tokens of a text, draws its weights, or lists its parts."""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import UsageError
from .parts import loading, show_attention
from .parts.command import command
from .parts.flags import add_json_flag
from .parts.parser import CommandParser
from .parts.picture_flag import add_picture_flag, check_picture
from .parts.terminal import aligned, size_text

HELP = "draw how a model mixes a text, draw its weights, or list its parts"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree show", description=__doc__)
    kinds = parser.add_subparsers(
        title="what is shown",
        prog=parser.prog,
        metavar=", ".join(_KINDS),
        parser_class=CommandParser,
    )
    for name, kind in _KINDS.items():
        one = kinds.add_parser(name, help=kind.what, description=kind.description, usual=kind.usual)
        kind.add_flags(one)
        one.set_defaults(show=kind.show)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if "show" not in args:
        raise UsageError(
            f"[show] what is shown must be one of {', '.join(_KINDS)} but none is named. See 'mmfree "
            "show --help'."
        )
    args.show(args)
    return 0


def _add_weights_flags(parser: argparse.ArgumentParser) -> None:
    loading.add_model_flags(parser, takes_adapter=False, takes_dtype=False)
    add_picture_flag(parser, what="also draw them")
    add_json_flag(parser)
    loading.add_memory_flags(parser)


def _show_weights(args: argparse.Namespace) -> None:
    check_picture("show", args.picture)
    from ..evaluation.model_tree import count_trits, draw_trits
    from ..hub.checkpoint.load import OpenedModel

    opened = OpenedModel(loading.checkpoint_of(args))
    with loading.limited_memory(args, opened.nbytes):
        found = count_trits(opened.load())
    if not found:
        raise UsageError(
            f"[show] 'model' must have ternary matrices but '{loading.model_name(args)}' has none."
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
        title = f"Ternary weights of {loading.model_name(args)}: {zeros:.1%} zeros"
        draw_trits(found, title, args.picture)


def _add_tree_flags(parser: argparse.ArgumentParser) -> None:
    loading.add_model_flags(parser, takes_adapter=False)
    add_json_flag(parser)
    loading.add_memory_flags(parser)


def _show_tree(args: argparse.Namespace) -> None:
    from ..evaluation.model_tree import all_parts, model_tree, tree_rows
    from ..hub.checkpoint.load import OpenedModel

    opened = OpenedModel(loading.checkpoint_of(args), loading.dtype_of(args))
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
        return
    rows: list[Sequence[str]] = [("part", "kind", "shape", "parameters", "bits", "size")]
    for name, part in tree_rows(tree):
        shape = " x ".join(map(str, part.shape))
        bits = "" if part.bits is None else f"{part.bits:.2f}"
        rows.append((name, part.kind, shape, f"{part.parameters:,}", bits, size_text(part.nbytes)))
    print("\n".join(aligned(rows, left=2)))


class _Kind(NamedTuple):
    """A subject: in a few words and in a sentence, its usual flags, all its flags, and how."""

    what: str
    description: str
    usual: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    show: Callable[[argparse.Namespace], None]


_KINDS = {
    "attention": _Kind(
        "the weights by which layers and heads mix a text, as a picture",
        str(show_attention.__doc__),
        show_attention.USUAL,
        show_attention.add_flags,
        show_attention.show_attention,
    ),
    "weights": _Kind(
        "shares and scales of ternary weights, as a table and a picture",
        "Prints and draws shares and scales of the ternary weights of a checkpoint. Float master "
        "weights are shown as they are rounded to be used.",
        "--model --picture --json",
        _add_weights_flags,
        _show_weights,
    ),
    "model": _Kind(
        "the tree of parts with shapes, parameters, bits and bytes",
        "Prints the tree of a model's parts with shapes, parameters, bits and bytes.",
        "--model --dtype --json",
        _add_tree_flags,
        _show_tree,
    ),
}
