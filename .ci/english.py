"""Counts how plain the English of pages, docstrings, comments, messages and identifiers is.

python .ci/english.py [--list WORDS] [--long]

Prints the share of sentences with more than 30 words, the number of roundabout phrases, and how often
words are used in a sense that the field has another word for, as the glossary in .github/CONTRIBUTING.md
lists them. `--list behind` prints each use of one of them, and `--long` the long sentences.
"""

import argparse
import ast
import io
import itertools
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

PHRASES = {
    "that of, those of": r"\b(that|those) of\b",
    "docstrings that begin with What": r"\AWhat\b",
    "docstrings that begin with Whether": r"\AWhether\b",
    "docstrings that begin with As or Those of": r"\A(As|Those of|The common part)\b",
    "model of images": r"\bmodels? of (images|pictures)\b",
    "choice of tokens": r"\bchoice of (the )?tokens?\b",
    "by heart": r"\bby heart\b",
    "right answers": r"\bright answers\b",
    "comes again, read again": r"\b(comes|read) again\b",
    "as they stand, as it stands": r"\bas (they|it) stands?\b",
    "what comes of": r"\bwhat (comes|came) of\b",
}
"""Roundabout phrases, looked for in pages, docstrings and comments."""

COINED = {
    "place": (
        "places?",
        # in, into or take the place of something, and put in place
        r"(?<!\bin )(?<!\binto )(?<!\bin the )(?<!\bin its )(?<!\bin their )(?<!\btake the )"
        r"(?<!\btakes the )(?<!\btake its )(?<!\btakes its )(?<!\btake their )(?<!\btakes their )"
        r"\bplaces?\b",
    ),
    "form": ("forms?", r"(?<!closed )(?<!\bto )(?<!\bthat )\bforms?\b(?! (?:a|an|one|the)\b)"),
    "beginning, marks": ("beginnings?|marks", r"\bbeginnings?\b|\bmarks\b"),
    "kept, held, leave": (
        # a tree has leaves
        "kept|held|leave",
        r"\b(?:kept|held) (?:texts?|states?|responses?|sessions?|answers?|tokens?|results?|keys)\b",
    ),
    "room": ("rooms?", r"\brooms?\b"),
    "piece": ("pieces?", r"\bpieces?\b"),
    "thought": ("thoughts?", r"\bthoughts?\b"),
    "said, told": (
        "said|told|says|tells",
        r"\b(?:is|are|was|were|be|been|not) (?:said|told)\b(?! apart)",
    ),
    "joined": ("joined", r"\bjoined\b"),
    # a name such as `check_once` has the plain sense of the word
    "handed, once": ("handed|(?<!_)once(?!_)", r"\bhanded (?:on|out|over|down)\b"),
    "way out, figures, words": (
        "figures|way_out|in_words",
        r"\bway out\b|\bfigures\b|\bin words\b",
    ),
    "behind": ("behind", r"\bbehind\b"),
}
"""For each word, patterns of it in identifiers and in texts, without the senses of the field."""

FIELD = re.compile(
    r"(?<![a-z])held[ _-]out|\bsentence[ _]?pieces?|\bwrite[ _-]behind|\bwave ?forms?"
    r"|\btree[_ ]leaves"
    # a node of Python's syntax
    r"|\bjoined_str\b"
    # methods of SentencePiece
    r"|\b(?:id_to_piece|piece_to_id|get_piece_size|decode_pieces)\b"
    # what users write: flags of `mmfree serve`, and a setting of `mmfree ternarize`
    r"|\bkept_response(?:s|_[a-z]+)\b|\bscale_of_kept\b"
    r"|\b(?:quotation|combining) marks\b",
    re.IGNORECASE,
)
"""The senses of the field."""

ELSEWHERE = {"marks", "leave"}
"""Keywords of pytest and tqdm, which do not count where a value is given to them."""

VOCABULARIES = re.compile(r"(mlx_mmfree|tests)/tokenizer/")
"""In these files a piece is an entry of a vocabulary, as SentencePiece calls it."""

CODE = re.compile(r";\n|;$|\w\[\w|<<|>>|\+\+|^\w+ <|\w [*%] \w|==|\w \+ \w+ [*<]")
"""Of the strings, texts of kernels, whole or in part, which are code in another language."""

LONG = 30
"""A sentence with more words is counted as long."""

Text = tuple[str, int, bool, str]
"""The file, the line, whether it is a docstring, and the words."""


def files(suffix: str) -> Iterator[tuple[str, str]]:
    """The names and contents of the files of the repository with a suffix."""
    listed = subprocess.run(
        ["git", "ls-files", f"*{suffix}"], capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        # this file spells what it looks for
        if name != ".ci/english.py":
            yield name, Path(name).read_text()


def texts() -> Iterator[Text]:
    """The paragraphs of pages, docstrings and comments."""
    for name, page in files(".md"):
        yield from _paragraphs(name, page)
    for name, source in files(".py"):
        yield from _python(name, source)


def messages() -> Iterator[Text]:
    """The other strings of more than one word, and the names of tests, which are sentences too."""
    for name, source in files(".py"):
        tree = ast.parse(source)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield name, node.lineno, False, node.name.replace("_", " ")
            elif not isinstance(node, ast.Constant) or id(node) in docstrings:
                continue
            elif isinstance(node.value, str) and " " in node.value and not CODE.search(node.value):
                yield name, node.lineno, False, node.value


def identifiers() -> Iterator[Text]:
    """The names in the code, the words of each between underscores."""
    for name, source in files(".py"):
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        for token, after in itertools.pairwise(tokens):
            # the formatter puts no space between a keyword and its value
            is_keyword = after.string == "=" and after.start == token.end
            if is_keyword and token.string in ELSEWHERE:
                continue
            if token.type == tokenize.NAME and not token.string.startswith("test_"):
                spelled = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", token.string).lower()
                yield name, token.start[0], False, spelled


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


def uses(pattern: str, found: list[Text]) -> Iterator[Text]:
    """Each use of a pattern in texts."""
    for text in found:
        for _ in re.finditer(pattern, text[3]):
            yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [*PHRASES, *COINED]
    parser.add_argument("--list", choices=known, metavar="WORDS", help=f"one of {', '.join(known)}")
    parser.add_argument("--long", action="store_true", help="print the long sentences")
    args = parser.parse_args()
    prose = list(texts())
    spoken = [(*head, FIELD.sub("", text)) for *head, text in [*prose, *messages()]]
    names = [(*head, FIELD.sub("", text)) for *head, text in identifiers()]
    found: dict[str, list[Text]] = {}
    for words, pattern in PHRASES.items():
        of_docstrings = [text for text in prose if text[2] or "docstrings" not in words]
        found[words] = list(uses(pattern, of_docstrings))
    counts = {}
    for words, (in_names, in_texts) in COINED.items():
        pattern = rf"(?<![^_])(?:{in_names})(?![^_])"
        found[words] = [*uses(pattern, names), *uses(f"(?i){in_texts}", spoken)]
        if words == "piece":
            found[words] = [text for text in found[words] if not VOCABULARIES.match(text[0])]
        in_code = sum(" " not in text for *_, text in found[words])
        counts[words] = f"{in_code:5} in identifiers, {len(found[words]) - in_code:4} in texts"
    long, total = [], 0
    for name, line, _, text in prose:
        for sentence in sentences(text):
            total += 1
            if len(sentence.split()) > LONG:
                long.append(f"{name}:{line}: {sentence}")
    if args.long:
        print(*long, sep="\n")
    elif args.list:
        print(*(f"{name}:{line}: {text}" for name, line, _, text in found[args.list]), sep="\n")
    else:
        print(f"{total} sentences, {100 * len(long) / total:.1f} % of more than {LONG} words")
        for words, uses_of in found.items():
            print(f"{len(uses_of):6} {words:42} {counts.get(words, '')}".rstrip())


if __name__ == "__main__":
    main()
