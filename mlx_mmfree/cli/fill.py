"""`mmfree fill`: fills in the masks of a text with a masked language model."""

import argparse
import json
from collections.abc import Sequence
from typing import cast

from .parts.command import argument_errors, command
from .parts.flags import add_json_flag, add_plugin_flag, positive
from .parts.loading import add_memory_flags, add_source_flags, limited_memory
from .parts.parser import CommandParser
from .parts.prompts import given_prompt, opened_as
from .parts.terminal import aligned

HELP = "fill in the masked words of a text"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree fill", description=__doc__, usual="--model --text --top-k --json"
    )
    add_source_flags(parser, ", such as google/fnet-base", required=True)
    add_plugin_flag(parser)
    parser.add_argument(
        "--text",
        required=True,
        help="text with the model's mask token in place of each missing word; '-' reads standard "
        "input",
    )
    parser.add_argument(
        "--top-k", type=positive, default=5, help="number of words for each mask (%(default)s)"
    )
    add_json_flag(parser)
    add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    text = given_prompt(args.text)
    from ..generation.predictions import fill
    from ..models import MaskedLM

    opened = opened_as(["fill-mask"], args, "fill", "fill in masked tokens")
    with limited_memory(args, opened.nbytes):
        tokenizer = opened.processor()
        model = cast(MaskedLM, opened.load())
        with argument_errors():
            found = fill(model, tokenizer, text, top_k=args.top_k)
    if args.json:
        masks = [
            [
                {"word": word, "probability": probability}
                for word, probability in zip(each.words, each.probabilities, strict=True)
            ]
            for each in found
        ]
        print(json.dumps({"masks": masks}, ensure_ascii=False))
        return 0
    rows = [("mask", "word", "probability")]
    for number, each in enumerate(found, 1):
        for word, probability in zip(each.words, each.probabilities, strict=True):
            rows.append((str(number), word, f"{probability:.3f}"))
    print("\n".join(aligned(rows, left=2)))
    return 0
