"""`mmfree audit`: counts the products, operations and bytes that one decoded token takes."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import UsageError
from .parts import flags, loading, picture_flag, terminal
from .parts.command import command
from .parts.parser import CommandParser

if TYPE_CHECKING:
    from ..evaluation.audit import Certificate

HELP = "count the products, operations and bytes that one token takes"


class _Parser(CommandParser):
    """Names the shapes in its help alone: to know them, the architectures are imported."""

    def format_help(self) -> str:
        from ..evaluation.audit.skeleton import presets

        config = next(action for action in self._actions if action.dest == "config")
        config.help = str(config.help).format(", ".join(sorted(presets())))
        return super().format_help()


def build_parser() -> argparse.ArgumentParser:
    usual = "--model --adapter-path --config --positions --json --picture"
    parser = _Parser(prog="mmfree audit", description=__doc__, usual=usual)
    loading.add_model_flags(parser)
    parser.add_argument(
        "--config", help="published shape to count instead, without weights: {}, or a config.json"
    )
    parser.add_argument(
        "--positions",
        type=flags.non_negative,
        default=16,
        help="tokens before the one that is decoded; default: %(default)s",
    )
    flags.add_json_flag(parser)
    picture_flag.add_picture_flag(parser, what="draw the composition")
    loading.add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    _check(args)
    certificate = _certificate(args)
    name = args.config or loading.model_name(args)
    if args.json:
        from ..evaluation.audit.certificate import to_json

        print(json.dumps({"model": name} | to_json(certificate)))
    else:
        print(_text(certificate))
    if args.picture is not None:
        from ..evaluation.audit.section import draw_certificate

        draw_certificate(certificate, f"One token of {name}", args.picture)
    return 0


def _check(args: argparse.Namespace) -> None:
    of_weights = (args.model, args.revision, args.adapter_path, args.latent)
    if args.config is not None and any(value is not None for value in of_weights):
        raise UsageError(
            "[audit] 'config' must come without a model, 'revision', 'adapter-path' and 'latent', since "
            "a shape has no weights. Leave those out."
        )
    picture_flag.check_picture("audit", args.picture)


def _certificate(args: argparse.Namespace) -> "Certificate":
    from ..evaluation.audit import certify
    from ..evaluation.audit.skeleton import read_config, skeleton
    from ..hub.checkpoint.load import OpenedModel

    if args.config is not None:
        return certify(
            skeleton(read_config("audit", args.config), loading.dtype_of(args)), args.positions
        )
    opened = OpenedModel(loading.checkpoint_of(args), loading.dtype_of(args))
    with loading.limited_memory(args, opened.nbytes):
        return certify(loading.with_adapter(args, opened), args.positions)


def _text(certificate: "Certificate") -> str:
    from ..evaluation.audit.section import counts, estimate_note, products, verdict

    head = ("a token takes", "")
    return "\n".join(
        [
            verdict(certificate),
            "",
            *terminal.aligned([head, *counts(certificate)]),
            "",
            *terminal.aligned(products(certificate), left=3),
            "",
            estimate_note(certificate),
        ]
    )
