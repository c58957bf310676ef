"""`mmfree embed`: prints the vectors of texts, or how alike the texts are."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files.reading import read_text
from .parts import flags, loading, prompts, terminal
from .parts.command import command
from .parts.parser import CommandParser

HELP = "turn texts into vectors, or tell how alike texts are"

_MOST_BYTES = 8_000_000


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree embed",
        usual="--model --text --data --prompt-name --similarity --json",
        description=__doc__,
        epilog="Each line of the output is a JSON object with a text, or the name of its file, and its "
        "vector of length 1.",
    )
    loading.add_source_flags(parser, ", such as microsoft/bitnet-embedding-0.6b", required=True)
    flags.add_plugin_flag(parser)
    group = parser.add_argument_group("texts")
    group.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="text files, each of which is one text"
    )
    group.add_argument("--text", nargs="+", help="texts to embed; '-' reads standard input")
    prompts.add_texts_file(group)
    parser.add_argument(
        "--pooling",
        choices=("first", "last", "mean"),
        help="which tokens give the vector of a text (default: as the model's files say)",
    )
    parser.add_argument(
        "--prompt-name",
        help="name of the model's prompt that comes before each text, such as query (default: as the "
        "model's files say)",
    )
    parser.add_argument(
        "--similarity",
        action="store_true",
        help="print a table of the cosine similarity of each pair of texts instead of vectors",
    )
    flags.add_json_flag(parser)
    loading.add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    names, texts = _given(args)
    from ..generation import embed

    opened = prompts.opened_as(
        ["feature-extraction", "text-generation"], args, "embed", "embed or continue texts"
    )
    with loading.limited_memory(args, opened.nbytes):
        tokenizer, model = opened.processor(), opened.load()
        with prompts.texts_bar(len(texts)) as progress:
            vectors = embed(
                model,
                tokenizer,
                texts,
                pooling=args.pooling,
                prompt_name=args.prompt_name,
                progress=progress,
            )
    kind = "file" if args.files else "text"
    if args.similarity:
        cosines: Any = (vectors @ vectors.T).tolist()
        if args.json:
            print(json.dumps({f"{kind}s": names, "similarity": cosines}, ensure_ascii=False))
            return 0
        numbers = list(map(str, range(1, len(texts) + 1)))
        rows = [("", *numbers, kind)]
        for number, name, row in zip(numbers, names, cosines, strict=True):
            rows.append((number, *(f"{cosine:.3f}" for cosine in row), f"  {_short(name)}"))
        print("\n".join(line.rstrip() for line in terminal.aligned(rows)))
        return 0
    values: Any = vectors.tolist()
    listed = [{kind: name, "embedding": vector} for name, vector in zip(names, values, strict=True)]
    if args.json:
        print(json.dumps({"embeddings": listed}, ensure_ascii=False))
        return 0
    for each in listed:
        print(json.dumps(each, ensure_ascii=False))
    return 0


def _given(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The names of the texts, and the texts."""
    given = [name for name in ("files", "text", "data") if getattr(args, name)]
    if len(given) != 1:
        raise UsageError(
            "[embed] the input must be text files, --text or --data, one of them, but got "
            f"{' and '.join(given) or 'none'}. See 'mmfree embed --help'."
        )
    if args.files:
        return list(map(str, args.files)), list(map(_text_of, args.files))
    texts = (
        prompts.read_prompts(args.data, ("prompt", "text"))
        if args.data
        else list(map(prompts.given_prompt, args.text))
    )
    return texts, texts


def _text_of(file: Path) -> str:
    try:
        return read_text(file, _MOST_BYTES)
    except OSError as error:
        raise UsageError(
            f"[embed] 'files' must be UTF-8 text files but '{file}' cannot be read: {error}."
        ) from error


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 40 else f"{words[:39]}…"
