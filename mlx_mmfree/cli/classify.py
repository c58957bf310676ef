"""`mmfree classify`: prints the classes of texts with their probabilities."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from ..errors import UsageError
from .parts.columns import aligned
from .parts.command import CommandParser, argument_errors, command
from .parts.flags import positive
from .parts.memory import add_memory_flags, limited_memory
from .parts.prompts import given_prompt, read_prompts

HELP = "sort texts into classes"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree classify", description=__doc__)
    parser.add_argument(
        "--model",
        required=True,
        help="folder or Hub repository of the model, such as one that `mmfree train` made",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the Hub repository")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="text to classify; '-' reads standard input")
    source.add_argument(
        "--texts-file", type=Path, help="text file with a text on each line, or a .jsonl file"
    )
    parser.add_argument(
        "--top-k", type=positive, default=5, help="number of classes for each text (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    texts = [given_prompt(args.text)] if args.texts_file is None else read_prompts(args.texts_file)
    from tqdm import tqdm

    from ..generation.classification import classify
    from ..hub.checkpoint.opened_model import open_model
    from ..models import SequenceClassifier, TokenModel

    opened = open_model(args.model, args.revision)
    planned: TokenModel = opened.model
    if not isinstance(planned, SequenceClassifier):
        raise UsageError(
            f"[classify] 'model' must sort texts into classes but '{args.model}' is a model for "
            f"{planned.purpose}."
        )
    with limited_memory(args, opened.nbytes):
        tokenizer = opened.tokenizer()
        model = cast(SequenceClassifier, opened.load())
        with (
            argument_errors(),
            tqdm(total=len(texts), unit="text", leave=False, disable=None, file=sys.stderr) as bar,
        ):
            found = classify(
                model,
                tokenizer,
                texts,
                top_k=args.top_k,
                progress=lambda done: bar.update(done - bar.n),
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
