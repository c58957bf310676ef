"""`mmfree translate`: turns texts into others, such as translations, with an encoder-decoder."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from ..errors import UsageError
from .parts.command import CommandParser, argument_errors, command
from .parts.flags import positive
from .parts.memory import add_memory_flags, limited_memory
from .parts.prompts import given_prompt, read_prompts

HELP = "translate texts with an encoder-decoder"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree translate", description=__doc__)
    parser.add_argument(
        "--model",
        required=True,
        help="folder or Hub repository of the model, such as Helsinki-NLP/opus-mt-en-de",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the Hub repository")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="text to translate; '-' reads standard input")
    source.add_argument(
        "--texts-file", type=Path, help="text file with a text on each line, or a .jsonl file"
    )
    parser.add_argument(
        "--language", help="code of the target language, for a model of several, such as fra"
    )
    parser.add_argument(
        "--num-beams",
        type=positive,
        help="number of texts to search among; 1 is greedy; default: the model's",
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        default=1.0,
        help="exponent of the length in the score of a text; 0 favours short ones (%(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, help="tokens of the longest result; default: the model's"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=16, help="texts translated together (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    texts = [given_prompt(args.text)] if args.texts_file is None else read_prompts(args.texts_file)
    from tqdm import tqdm

    from ..generation.translation import translate
    from ..hub.checkpoint.opened_model import open_model
    from ..models import EncoderDecoder, TokenModel

    opened = open_model(args.model, args.revision)
    planned: TokenModel = opened.model
    if not isinstance(planned, EncoderDecoder):
        raise UsageError(
            f"[translate] 'model' must turn one text into another but '{args.model}' is a model for "
            f"{planned.purpose}."
        )
    prefix = "" if args.language is None else f">>{args.language}<< "
    with limited_memory(args, opened.nbytes):
        tokenizer = opened.pair_tokenizer()
        model = cast(EncoderDecoder, opened.load())
        with (
            argument_errors(),
            tqdm(total=len(texts), unit="text", leave=False, disable=None, file=sys.stderr) as bar,
        ):
            found = translate(
                model,
                tokenizer,
                [prefix + text for text in texts],
                num_beams=args.num_beams,
                length_penalty=args.length_penalty,
                max_tokens=args.max_tokens,
                batch_size=args.batch_size,
                progress=lambda done: bar.update(done - bar.n),
            )
    if args.json:
        pairs = zip(texts, found, strict=True)
        listed = [{"text": text, "translation": translation} for text, translation in pairs]
        print(json.dumps({"translations": listed}, ensure_ascii=False))
    else:
        print("\n".join(found))
    return 0
