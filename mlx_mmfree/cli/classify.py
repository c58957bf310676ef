"""`mmfree classify`: prints the classes of texts or images with their probabilities."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .parts.columns import aligned, share_bar
from .parts.command import CommandParser, command
from .parts.flags import positive
from .parts.image_classes import add_images, check_map, image_classes
from .parts.loading import add_adapter_flag, with_adapter
from .parts.memory import add_memory_flags, limited_memory
from .parts.whole_texts import add_texts, given_texts, opened_as, texts_bar

if TYPE_CHECKING:
    from ..generation.predictions import Classes
    from ..hub.checkpoint.load import OpenedModel

HELP = "sort texts or images into classes"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree classify", description=__doc__)
    parser.add_argument(
        "--model",
        required=True,
        help="folder or Hub repository of the model, such as timm/edgenext_xx_small.in1k or one that "
        "`mmfree train` made",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the Hub repository")
    add_adapter_flag(parser)
    add_images(parser)
    add_texts(parser, "to classify", is_required=False)
    parser.add_argument(
        "--top-k", type=positive, default=5, help="number of classes for each input (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    has_texts = args.text is not None or args.texts_file is not None
    if has_texts == bool(args.images):
        raise UsageError(
            "[classify] the input must be files of images, --text or --texts-file but got "
            f"{'both' if has_texts else 'none of them'}. See 'mmfree classify --help'."
        )
    texts = given_texts(args) if has_texts else []
    check_map(args)
    from ..models import ImageClassifier, SequenceClassifier

    kinds = (SequenceClassifier, ImageClassifier)
    opened = opened_as(kinds, args, "classify", "sort texts or images into classes")
    planned: Any = opened.model
    if isinstance(planned, ImageClassifier) == has_texts:
        raise UsageError(
            f"[classify] the input must be {'images' if has_texts else 'texts'} but '{args.model}' is a "
            f"model for {planned.purpose}."
        )
    with limited_memory(args, opened.nbytes):
        found = _text_classes(args, opened, texts) if has_texts else image_classes(args, opened)
    kind, inputs = ("text", texts) if has_texts else ("image", [str(file) for file in args.images])
    if args.json:
        listed = [
            {
                kind: text,
                "classes": [
                    {"label": label, "probability": probability}
                    for label, probability in zip(each.labels, each.probabilities, strict=True)
                ],
            }
            for text, each in zip(inputs, found, strict=True)
        ]
        print(json.dumps({f"{kind}s": listed}, ensure_ascii=False))
        return 0
    # a name of a file says which, a text is too long
    names = [str(number) for number in range(1, len(found) + 1)] if has_texts else inputs
    _print_table(kind, names, found)
    return 0


def _text_classes(
    args: argparse.Namespace, opened: "OpenedModel", texts: Sequence[str]
) -> "list[Classes]":
    from ..generation.predictions import classify

    tokenizer = opened.tokenizer()
    model = with_adapter(args, opened)
    with texts_bar(len(texts)) as progress:
        return classify(model, tokenizer, texts, top_k=args.top_k, progress=progress)


def _print_table(kind: str, names: Sequence[str], found: "Sequence[Classes]") -> None:
    rows = [(kind, "class", "probability")]
    bars = [""]
    for name, each in zip(names, found, strict=True):
        for label, probability in zip(each.labels, each.probabilities, strict=True):
            rows.append((name, " ".join(label.split()), f"{probability:.3f}"))
            bars.append(share_bar(probability))
    for line, bar in zip(aligned(rows, left=2), bars, strict=True):
        print(f"{line}  {bar}".rstrip())
