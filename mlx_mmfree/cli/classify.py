"""`mmfree classify`: prints the classes of texts with their probabilities."""

import argparse
import json
from collections.abc import Sequence
from typing import cast

from .parts.columns import aligned
from .parts.command import CommandParser, command
from .parts.flags import positive
from .parts.memory import add_memory_flags, limited_memory
from .parts.whole_texts import add_texts, given_texts, opened_as, texts_bar

HELP = "sort texts into classes"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree classify", description=__doc__)
    parser.add_argument(
        "--model",
        required=True,
        help="folder or Hub repository of the model, such as one that `mmfree train` made",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the Hub repository")
    add_texts(parser, "to classify")
    parser.add_argument(
        "--top-k", type=positive, default=5, help="number of classes for each text (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    texts = given_texts(args)
    from ..generation.classification import classify
    from ..models import SequenceClassifier

    opened = opened_as(SequenceClassifier, args, "classify", "sort texts into classes")
    with limited_memory(args, opened.nbytes):
        tokenizer = opened.tokenizer()
        model = cast(SequenceClassifier, opened.load())
        with texts_bar(len(texts)) as progress:
            found = classify(
                model,
                tokenizer,
                texts,
                top_k=args.top_k,
                progress=progress,
            )
    if args.json:
        listed = [
            {
                "text": text,
                "classes": [
                    {"label": label, "probability": probability}
                    for label, probability in zip(each.labels, each.probabilities, strict=True)
                ],
            }
            for text, each in zip(texts, found, strict=True)
        ]
        print(json.dumps({"texts": listed}, ensure_ascii=False))
        return 0
    rows = [("text", "class", "probability")]
    for number, each in enumerate(found, 1):
        for label, probability in zip(each.labels, each.probabilities, strict=True):
            rows.append((str(number), label, f"{probability:.3f}"))
    print("\n".join(aligned(rows, left=2)))
    return 0
