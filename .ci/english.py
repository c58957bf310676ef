"""Counts how plain the English of pages, docstrings and comments is.

python .ci/english.py [--list WORDS] [--long]

Prints the share of sentences with more than 30 words, and how often words stand that say little, or say
it in a roundabout way. `--list behind` prints where one of them stands, and `--long` the long sentences.
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

WORDS = {
    "behind": r"\bbehind\b",
    "that of, those of": r"\b(that|those) of\b",
    "docstrings that begin with What": r"\AWhat\b",
    "model of images": r"\bmodels? of (images|pictures)\b",
    "choice of tokens": r"\bchoice of (the )?tokens?\b",
    "by heart": r"\bby heart\b",
    "right answers": r"\bright answers\b",
    "comes again, read again": r"\b(comes|read) again\b",
    "as they stand, as it stands": r"\bas (they|it) stands?\b",
    "what comes of": r"\bwhat (comes|came) of\b",
}
LONG = 30
"""A sentence with more words is counted as long."""

Text = tuple[str, int, bool, str]
"""The file, the line, whether it is a docstring, and the words."""


def texts() -> Iterator[Text]:
    """The paragraphs of pages, docstrings and comments."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if name.endswith(".md"):
            yield from _paragraphs(name, Path(name).read_text())
        elif name.endswith(".py"):
            yield from _python(name, Path(name).read_text())


def _paragraphs(name: str, page: str) -> Iterator[Text]:
    """What stands between blank lines, without code, tables and headings."""
    lines: list[str] = []
    start, in_code = 0, False
    for n, line in enumerate([*page.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        if is_fence or in_code or not line.strip() or line.lstrip().startswith(("|", "#", "<")):
            if lines:
                yield name, start, False, " ".join(lines)
            lines = []
            continue
        if line.lstrip().startswith(("- ", "* ", "1. ")) and lines:
            yield name, start, False, " ".join(lines)
            lines = []
        start = start if lines else n
        lines.append(line.strip().removeprefix("- "))


def _python(name: str, source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        text = node.value.value
        if isinstance(text, str):
            for block in re.split(r"\n\s*\n|\n(?=\s+\w+: )", text):
                if ">>>" not in block:
                    yield name, node.lineno, text.startswith(block), " ".join(block.split())
    comment: list[str] = []
    line = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("# noqa", "# type:", "#!")):
            continue
        if comment and token.start[0] != line + 1:
            yield name, line, False, " ".join(comment)
            comment = []
        line = token.start[0]
        comment.append(token.string.lstrip("# "))
    if comment:
        yield name, line, False, " ".join(comment)


def sentences(text: str) -> list[str]:
    """Splits a paragraph; code in backquotes counts as one word."""
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    return [each for each in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[\"'(])", plain) if each.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", choices=WORDS, metavar="WORDS", help=f"one of {', '.join(WORDS)}")
    parser.add_argument("--long", action="store_true", help="print the long sentences")
    args = parser.parse_args()
    found, counts, long = list(texts()), dict.fromkeys(WORDS, 0), 0
    total = 0
    for name, line, is_docstring, text in found:
        for words, pattern in WORDS.items():
            if "docstrings" in words and not is_docstring:
                continue
            hits = len(re.findall(pattern, text))
            counts[words] += hits
            if hits and args.list == words:
                print(f"{name}:{line}: {text}")
        for sentence in sentences(text):
            total += 1
            if len(sentence.split()) > LONG:
                long += 1
                if args.long:
                    print(f"{name}:{line}: {sentence}")
    if not args.list and not args.long:
        print(f"{total} sentences, {100 * long / total:.1f} % of more than {LONG} words")
        for words, count in counts.items():
            print(f"{count:6} {words}")


if __name__ == "__main__":
    main()
