"""The README files, taken apart: headings, sections, commands and links."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "README.md"
BENCHMARKS = ROOT / "examples" / "benchmarks"
FOLDERS = (
    *sorted((ROOT / "mlx_mmfree").rglob("README.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
    ROOT / "tests" / "README.md",
)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_PROGRAMS = ("mmfree ", "python ", "python3 ", "eval ", "pip ")


@dataclass(frozen=True)
class Section:
    """The text under one heading.

    Attributes:
        file: The README.
        level: How deep the heading lies, 1 for the title of the page.
        title: The heading.
        text: What follows, up to the next heading.
    """

    file: Path
    level: int
    title: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.file.relative_to(ROOT).parent.as_posix()}: {self.title}"

    def blocks(self, language: str) -> list[str]:
        return [code for kind, code in _BLOCK.findall(self.text) if kind == language]

    def commands(self) -> list[str]:
        """The commands of its shell blocks; the main page has some in sentences and tables too."""
        blocks = [re.sub(r"\\\n *", "", block) for block in self.blocks("sh")]
        lines = [line for block in blocks for line in block.splitlines()]
        if self.file == MAIN:
            spans = _SPAN.findall(_BLOCK.sub("", self.text))
            lines += [span for span in spans if span.startswith(_PROGRAMS)]
        return lines


def sections(file: Path) -> list[Section]:
    """The sections of a README; the first one stands below its title."""
    parts = re.split(r"(\A#|^##+) (.*)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    triples = zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    return [Section(file, len(hashes), title, text) for hashes, title, text in triples]


def anchors(file: Path) -> list[str]:
    """The anchors of the headings of a README, as links name them."""
    titles = (section.title.lower() for section in sections(file))
    return [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]


def links(file: Path) -> list[str]:
    """The targets of a README's links and pictures."""
    text = _BLOCK.sub("", file.read_text(encoding="utf-8"))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def table(section: Section) -> list[list[str]]:
    """The cells of a section's tables without their heads."""
    rows = [line for line in section.text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    rules = [number for number, row in enumerate(rows) if set(row) <= set("|-")]
    return [row for n, row in enumerate(cells) if n not in rules and n + 1 not in rules]
