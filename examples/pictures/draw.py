"""Draws the pictures of the architecture as SVG: a block, a packed matrix, and the packages.

python examples/pictures/draw.py [FOLDER]

Sizes, numbers and packages come from the library: a published shape, its own functions, and the
import contract in `pyproject.toml`.
"""

import sys
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_mmfree.models import find
from mlx_mmfree.ops import pack_ternary, rms_norm_quantize, ternarize

HERE = Path(__file__).parent
COLOURS = {
    "ternary": ("#dbe9ff", "#2f5fb3"),
    "float": ("#f1f1f1", "#777777"),
    "kept": ("#ffe8c7", "#c07a12"),
    "outside": ("#ffffff", "#aaaaaa"),
}
"""Fill and line of a box: a ternary matrix, an operation on floats, what is kept, another program."""
PACKAGES = {
    "cli": "the commands",
    "server": "HTTP, a page, sessions",
    "training": "one loop for all tasks",
    "evaluation": "perplexity, audits, speed",
    "generation": "decoding, chats, caches",
    "hub": "checkpoints in every format",
    "tokenizer": "text and tokens",
    "images": "pixels",
    "models": "a file for each architecture",
    "token_mixers": "along a text",
    "channel_mixers": "at a position",
    "spatial_mixers": "over a map",
    "layers": "BitLinear, norms, states, attention",
    "ops": "definitions, Metal kernels",
    "native": "C++ kernels",
    "arguments": "checks of arguments",
    "platform": "threads, memory, BLAS",
    "files": "safetensors, GGUF, JSON",
    "demo": "the bundled model",
    "errors": "what users read",
    "version": "one number",
}
NEIGHBOURS = {
    "cli": ["terminal"],
    "server": ["clients", "a browser"],
    "hub": ["Hub", "mlx-lm"],
    "ops": ["MLX", "Metal"],
    "platform": ["OpenBLAS"],
}


class Picture:
    """Boxes, arrows and words on a white ground; positions are in pixels from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" '
            f'font-size="14" role="img"><title>{escape(title)}</title>',
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, lines: Sequence[str], kind: str) -> None:
        """A box whose height follows from its lines, the first of which is bold."""
        fill, line = COLOURS[kind]
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height_of(lines)}" rx="5" '
            f'fill="{fill}" stroke="{line}"/>'
        )
        for number, words in enumerate(lines):
            weight = "bold" if number == 0 else "normal"
            self.words(x + width / 2, y + 20 + 17 * number, words, weight=weight)

    def words(
        self, x: float, y: float, text: str, anchor: str = "middle", weight: str = "normal"
    ) -> None:
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="#222">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(
            f'<path d="M{path}" fill="none" stroke="#444" stroke-width="1.4" '
            'marker-end="url(#tip)"/>'
        )

    def sum(self, x: float, y: float) -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="11" fill="#fff" stroke="#444"/>')
        self.words(x, y + 5, "+", weight="bold")

    def row(self, y: float, cells: Sequence[str], kind: str) -> None:
        """Equal cells from the left edge on."""
        for number, cell in enumerate(cells):
            self.box(20 + 55 * number, y, 50, [cell], kind)

    def text(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def height_of(lines: Sequence[str]) -> int:
    return 13 + 17 * len(lines)


def block() -> str:
    """A token in one block of MMfreeLM-370M."""
    shape = find("hgrn_bit").presets["mmfreelm-370m"]
    config = find("hgrn_bit").config.from_hub(shape)
    dims, hidden = config.hidden_size, config.intermediate_size
    picture = Picture(480, 862, "A token in one block of a MatMul-free model")
    spine, left, middle = 30, 80, 265
    picture.words(spine - 15, 24, f"the token: {dims:,} numbers", anchor="start")

    picture.arrow((spine, 34), (spine, 399))
    picture.arrow((spine, 60), (middle, 60), (middle, 72))
    picture.box(left + 60, 74, 250, ["RMSNorm"], "float")
    for number, (name, after) in enumerate(
        [("forget", "sigmoid: f"), ("input", "silu: i"), ("gate", "RMSNorm: g")]
    ):
        centre = left + 60 + 125 * number
        picture.arrow((centre, 104), (centre, 123))
        picture.box(centre - 58, 125, 116, [name, f"{dims:,} x {dims:,}"], "ternary")
        picture.arrow((centre, 172), (centre, 191))
        picture.box(centre - 58, 193, 116, [after], "float")
    picture.arrow((left + 60, 223), (left + 60, 252))
    picture.arrow((left + 185, 223), (left + 185, 252))
    picture.box(
        left + 2,
        254,
        241,
        ["h = f h + (1 - f) i", f"{dims:,} numbers, the state"],
        "kept",
    )
    picture.arrow((left + 122, 301), (left + 122, 322))
    picture.arrow((left + 310, 223), (left + 310, 339), (left + 245, 339))
    picture.box(left + 2, 324, 241, ["g silu(h)"], "float")
    picture.arrow((left + 122, 354), (left + 122, 385))
    picture.box(left + 2, 387, 241, [f"output, {dims:,} x {dims:,}"], "ternary")
    picture.arrow((left + 2, 410), (spine + 13, 410))
    picture.sum(spine, 410)

    picture.arrow((spine, 421), (spine, 684))
    picture.arrow((spine, 446), (middle, 446), (middle, 458))
    picture.box(left + 60, 460, 250, ["RMSNorm"], "float")
    for centre, name in ((left + 92, "gate"), (left + 278, "up")):
        picture.arrow((centre, 490), (centre, 509))
        picture.box(centre - 78, 511, 156, [name, f"{dims:,} x {hidden:,}"], "ternary")
        picture.arrow((centre, 558), (centre, 577))
    picture.box(left + 14, 579, 342, ["silu(gate) up"], "float")
    picture.arrow((middle, 609), (middle, 634))
    picture.box(left + 14, 636, 342, ["down", f"{hidden:,} x {dims:,}"], "ternary")
    picture.arrow((left + 185, 683), (left + 185, 695), (spine + 13, 695))
    picture.sum(spine, 695)
    picture.arrow((spine, 706), (spine, 735))
    picture.words(
        spine + 14, 732, f"to the next of {config.num_hidden_layers} blocks", anchor="start"
    )

    _legend(
        picture,
        752,
        ("ternary", "ternary matrix: norm, 8-bit codes, their sums, a scale"),
        ("float", "number by number, in floats"),
        ("kept", "the state: as many bytes for any length of text"),
    )
    return picture.text()


def packed() -> str:
    """From eight weights of a file to their product with a token."""
    weights = mx.array([[0.61, -0.08, -0.72, 0.55, 0.02, -0.64, 0.48, -0.59]])
    inputs = mx.array([[0.40, -1.10, 0.75, 0.20, -0.05, 0.90, 1.30, -0.60]])
    trits, scale = ternarize(weights)
    word = int(_numbers(pack_ternary(trits))[0]) & 0xFFFF
    codes, unit = rms_norm_quantize(inputs)
    signed = [int(product) for product in _numbers(trits * codes)]
    m, s, total = _numbers(scale)[0], _numbers(unit)[0], sum(signed)
    picture = Picture(480, 738, "From a file to a packed matrix, and its product with a token")
    picture.box(20, 10, 435, ["model.safetensors", "one row of a matrix, in floats"], "outside")
    _step(picture, 57, "sizes are checked against config.json, then it is read")
    picture.row(88, [f"{w:.2f}" for w in _numbers(weights)], "float")
    _step(picture, 118, f"m = mean of |w| = {m:.3f};  t = round(w / m), within -1 and 1")
    picture.row(149, [f"{int(t)}" for t in _numbers(trits)], "ternary")
    _step(picture, 179, "t + 1 in 2 bits, the first one lowest; 16 fill a word")
    stored = [f"0b{word:016b}", f"kept in memory and on disk, with m = {m:.3f} once"]
    picture.box(20, 210, 435, stored, "kept")
    picture.words(20, 296, "A token comes, as floats:", anchor="start", weight="bold")
    picture.row(308, [f"{x:.2f}" for x in _numbers(inputs)], "float")
    _step(picture, 338, f"s = 127 / largest |x| = {s:.1f};  c = round(s x), an 8-bit code")
    picture.row(369, [f"{c:.0f}" for c in _numbers(codes)], "float")
    _step(picture, 399, "t says of each: add it, take it off, or leave it out")
    picture.row(430, [f"{each:+d}" if each else "" for each in signed], "ternary")
    _step(picture, 460, "one sum of integers, for each row of the matrix")
    picture.box(20, 491, 435, [f"{total}"], "ternary")
    _step(picture, 521, "one multiplication, by m / s")
    exact = _numbers(weights @ inputs.T)[0]
    words = f"instead of {exact:.3f}, of the weights before they were rounded"
    picture.box(20, 552, 435, [f"{total * m / s:.3f}", words], "float")
    _legend(
        picture,
        625,
        ("float", "floats, or codes of a token"),
        ("ternary", "what the ternary matrix decides"),
        ("kept", "what is kept: 2 bits a weight"),
    )
    return picture.text()


def house() -> str:
    """The packages from the command line down, as the import contract orders them."""
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (floors,) = (each["layers"] for each in contracts if each["id"] == "layers")
    floors = [floor.split(" | ") for floor in floors if floor != "__main__"]
    picture = Picture(480, 20 + 58 * len(floors), "The packages, which import downwards only")
    for number, names in enumerate(floors):
        y, width = 10 + 58 * number, (350 - 8 * (len(names) - 1)) / len(names)
        for index, name in enumerate(names):
            x = 10 + (width + 8) * index
            picture.box(x, y, width, [name, PACKAGES[name]], "ternary")
        for name in names:
            if name in NEIGHBOURS:
                picture.box(385, y, 88, NEIGHBOURS[name], "outside")
                picture.arrow((385, y + 23), (362, y + 23))
        if number + 1 < len(floors):
            picture.arrow((185, y + 47), (185, y + 57))
    return picture.text()


def _numbers(array: mx.array) -> list[float]:
    return np.array(array).ravel().tolist()


def _legend(picture: Picture, y: float, *entries: tuple[str, str]) -> None:
    for number, (kind, words) in enumerate(entries):
        picture.box(20, y + 34 * number, 28, [""], kind)
        picture.words(58, y + 20 + 34 * number, words, anchor="start")


def _step(picture: Picture, y: float, words: str) -> None:
    """An arrow down, with what happens there."""
    picture.arrow((40, y), (40, y + 26))
    picture.words(54, y + 19, words, anchor="start")


def main(argv: Sequence[str]) -> None:
    folder = Path(argv[0]) if argv else HERE
    for drawn in (block, house, packed):
        (folder / f"{drawn.__name__}.svg").write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
