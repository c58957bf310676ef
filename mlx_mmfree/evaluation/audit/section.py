"""A certificate as text, in a section of a model card, and as a picture."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..picture import COLOURS, save_picture
from .certificate import SOURCE, Certificate
from .products import Kind, MatrixProduct


class Group(NamedTuple):
    """Products that are alike but for the numbers of their blocks."""

    is_outside: bool
    path: str
    kind: Kind
    storage: str
    inputs: int
    outputs: int


def groups(products: Sequence[MatrixProduct]) -> Counter[Group]:
    """How often each kind of product is computed; those in blocks first."""
    found: Counter[Group] = Counter()
    for each in products:
        path = re.sub(r"\bblocks\.\d+\.", "blocks.*.", each.path)
        key = Group(each.is_outside, path, each.kind, each.storage, each.inputs, each.outputs)
        found[key] += each.times
    return Counter(dict(sorted(found.items(), key=lambda item: item[0].is_outside)))


def verdict(certificate: Certificate) -> str:
    """Returns whether a model is MatMul-free, why, and what is left outside its blocks."""
    dense = certificate.dense_in_blocks
    if dense:
        text = (
            f"Not MatMul-free: {_count(len(dense), 'product')} with a float matrix in the blocks, "
            f"the first of which is {dense[0].path} ({dense[0].storage})."
        )
    elif certificate.unknown:
        names = ", ".join(certificate.unknown)
        text = f"Whether it is MatMul-free is not known: no cost is declared for {names}."
    else:
        text = "MatMul-free: no product with a float matrix is left in the blocks."
    inside = [each for each in certificate.products if not each.is_outside]
    meeting = sum(each.times for each in inside if each.kind == "activations")
    if meeting:
        text += f" {_count(meeting, 'product')} of activations with activations."
    outside = [
        f"{each.path} ({each.storage})"
        for each in certificate.products
        if each.is_outside and each.kind == "dense"
    ]
    outside += [f"the lookup of {name}" for name in certificate.lookups]
    return f"{text} Outside the blocks: {', '.join(outside) or 'nothing'}."


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


Rows = list[tuple[str, ...]]


def counts(certificate: Certificate) -> Rows:
    """The cost of a token, in numbers."""
    traffic, launches = certificate.traffic, certificate.launches
    own, twin = certificate.energy, certificate.twin_energy
    rows: Rows = [
        ("multiplications of floats", f"{certificate.count('multiply'):,}"),
        ("additions of floats", f"{certificate.count('add'):,}"),
        ("other operations on floats", f"{certificate.count('other'):,}"),
        ("operations on integers", f"{certificate.count('integer'):,}"),
        ("bytes of weights read", f"{traffic.weights_read:,}"),
        ("bytes of state read and written", f"{traffic.state_read + traffic.state_written:,}"),
        ("bytes between operations", f"{traffic.near:,}"),
        ("bytes of the state, with its capacity", f"{certificate.state_bytes:,}"),
        ("bytes of tails beside it on Metal", f"{certificate.on_metal.held_tails:,}"),
        (
            "launches on a CPU",
            f"{launches['cpu_kernels']:,} kernels and {launches['cpu_mlx']:,} of MLX",
        ),
        ("launches on Metal", f"{launches['metal']:,}"),
        ("energy, estimated", f"{own.total:,.0f} µJ"),
        ("energy with float16 matrices, estimated", f"{twin.total:,.0f} µJ"),
    ]
    unknown = [f"{count} {name}" for name, count in certificate.unknown.items()]
    return [*rows, ("of unknown cost", ", ".join(unknown))] if unknown else rows


def products(certificate: Certificate) -> Rows:
    """The products, those that are alike in one row, under a heading."""
    head = ("product", "kind", "stored as", "inputs", "outputs", "count", "where")
    rows = [
        (
            each.path,
            each.kind,
            each.storage,
            f"{each.inputs:,}",
            f"{each.outputs:,}",
            f"{count:,}",
            ("blocks", "outside")[each.is_outside],
        )
        for each, count in groups(certificate.products).items()
    ]
    return [head, *rows]


def estimate_note(certificate: Certificate) -> str:
    """The parts of the estimate of energy."""
    own, twin = certificate.energy, certificate.twin_energy
    return (
        f"The energy is an estimate by {SOURCE}: {own.arithmetic:,.0f} µJ of arithmetic instead of "
        f"{twin.arithmetic:,.0f}, and {own.memory:,.0f} µJ for weights and state from DRAM instead of "
        f"{twin.memory:,.0f}. The dense twin has float16 matrices of the same shapes."
    )


def section(certificate: Certificate) -> str:
    """The certificate in Markdown, for a model card."""
    lines = [_row(cells) for cells in counts(certificate)]
    head, *rest = products(certificate)
    rule = _row(("---",) * len(head))
    return "\n\n".join(
        [
            "## Cost of a token",
            verdict(certificate),
            f"Counted by `mmfree audit` in the recorded graph of one token after "
            f"{certificate.position} others, one text alone, on the CPU.",
            "\n".join([_row(("a token takes", "")), _row(("---", "---:")), *lines]),
            "\n".join([_row(head), rule, *map(_row, rest)]),
            estimate_note(certificate),
        ]
    )


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


_KINDS = {
    "integer": "integer operations",
    "multiply": "float multiplications",
    "add": "float additions",
    "other": "other float operations",
}
_BYTES = {
    "weights_read": "weights read",
    "state_read": "state read",
    "state_written": "state written",
    "between_read": "read between operations",
    "between_written": "written between operations",
}
_PRODUCTS = {"ternary": "ternary", "dense": "dense", "activations": "of activations alone"}
_SIDES = ("in blocks", "outside")
_PARTS = {"arithmetic": "arithmetic", "memory": "weights and state", "cache": "between operations"}


def draw_certificate(certificate: Certificate, title: str, image: Path) -> None:
    """Draws operations, bytes, products and the estimated energy beside the dense twin, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.6), dpi=110, layout="constrained")
    operations, traffic, joules, products = figure.subplots(1, 4)
    counts = [
        {kind: sum(n for each, n in work.items() if each.kind == kind) for kind in _KINDS}
        for work in (certificate.work, certificate.twin_work)
    ]
    _stack(operations, _KINDS, counts, "operations")
    read = [vars(each) for each in (certificate.traffic, certificate.twin_traffic)]
    _stack(traffic, _BYTES, read, "bytes", "B")
    energies = [
        {name: microjoules / 1e6 for name, microjoules in each.to_json().items()}
        for each in (certificate.energy, certificate.twin_energy)
    ]
    _stack(joules, _PARTS, energies, "energy, estimated (ISSCC 2014)", "J")
    pairs = [dict.fromkeys(_PRODUCTS, 0) for _ in _SIDES]
    for each in certificate.products:
        pairs[each.is_outside][each.kind] += each.macs
    _stack(products, _PRODUCTS, pairs, "pairs of numbers in products", bars=_SIDES)
    figure.suptitle(title, parse_math=False)
    save_picture(figure, image)


def _stack(
    axes: Any,
    labels: Mapping[str, str],
    parts: Sequence[Mapping[str, float]],
    title: str,
    unit: str = "",
    bars: Sequence[str] = ("model", "dense twin"),
) -> None:
    """Two bars in parts, each with its sum above it."""
    from matplotlib.ticker import EngFormatter

    bottom = [0.0] * len(bars)
    for colour, (name, label) in zip(COLOURS, labels.items(), strict=False):
        heights = [float(each[name]) for each in parts]
        axes.bar(bars, heights, bottom=bottom, color=colour, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    format = EngFormatter(unit, places=2)
    for index, total in enumerate(bottom):
        axes.text(index, total, format(total), ha="center", va="bottom", fontsize=8)
    axes.yaxis.set_major_formatter(EngFormatter(unit))
    axes.set(title=title, ylim=(0, 1.15 * max(*bottom, 1e-12)))
    axes.title.set_fontsize(10)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
