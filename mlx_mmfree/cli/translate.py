"""`mmfree translate`: translates texts with an encoder-decoder."""

import argparse
import json
from collections.abc import Sequence
from typing import cast

from .parts.command import command
from .parts.flags import add_json_flag, add_plugin_flag, positive
from .parts.loading import add_memory_flags, add_source_flags, limited_memory
from .parts.parser import CommandParser
from .parts.prompts import add_texts, given_texts, opened_as, texts_bar

HELP = "translate texts with an encoder-decoder"


def build_parser() -> argparse.ArgumentParser:
    usual = "--model --text --data --language --num-beams --max-tokens --batch-size --json"
    parser = CommandParser(prog="mmfree translate", description=__doc__, usual=usual)
    add_source_flags(parser, ", such as Helsinki-NLP/opus-mt-en-de", required=True)
    add_plugin_flag(parser)
    add_texts(parser, "to translate")
    parser.add_argument(
        "--language", help="code of the target language, for a model of several, such as fra"
    )
    parser.add_argument(
        "--num-beams",
        type=positive,
        help="number of beams; 1 is greedy; default: the model's",
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        help="exponent of the length in the score of a text; 0 favours short ones; default: the model's",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        help="largest number of tokens of a result; default: the model's",
    )
    parser.add_argument(
        "--batch-size", type=positive, default=16, help="texts translated together (%(default)s)"
    )
    add_json_flag(parser)
    add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    texts = given_texts(args)
    from ..generation.translation import translate
    from ..models import EncoderDecoder

    opened = opened_as(["translation"], args, "translate", "turn one text into another")
    prefix = "" if args.language is None else f">>{args.language}<< "
    with limited_memory(args, opened.nbytes):
        tokenizer = opened.translation_tokenizer()
        model = cast(EncoderDecoder, opened.load())
        with texts_bar(len(texts)) as progress:
            found = translate(
                model,
                tokenizer,
                [prefix + text for text in texts],
                num_beams=args.num_beams,
                length_penalty=args.length_penalty,
                max_tokens=args.max_tokens,
                batch_size=args.batch_size,
                progress=progress,
            )
    if args.json:
        pairs = zip(texts, found, strict=True)
        listed = [{"text": text, "translation": translation} for text, translation in pairs]
        print(json.dumps({"translations": listed}, ensure_ascii=False))
    else:
        print("\n".join(found))
    return 0
