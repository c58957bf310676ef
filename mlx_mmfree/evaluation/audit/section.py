"""A certificate in words: its verdict, rows of words and numbers, and a section of a model card."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

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
    """Whether a model is MatMul-free, why, and what is left outside its blocks."""
    dense = certificate.dense_in_blocks
    if dense:
        text = (
            f"Not MatMul-free: {_count(len(dense), 'product')} with a float matrix in the blocks, "
            f"the first of which is {dense[0].path} ({dense[0].storage})."
        )
    elif certificate.unknown:
        names = ", ".join(certificate.unknown)
        text = f"Whether it is MatMul-free is not known: nobody has said what {names} computes."
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
    """What a token takes, in numbers."""
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
        ("bytes of the state, with its room", f"{certificate.state_bytes:,}"),
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
    head = ("product", "kind", "held as", "inputs", "outputs", "count", "where")
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
    """What the estimate of energy is made of."""
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
            "## Certificate",
            verdict(certificate),
            f"Counted by `mmfree audit` in the recorded graph of one token behind "
            f"{certificate.position} others, one text alone, on the CPU.",
            "\n".join([_row(("a token takes", "")), _row(("---", "---:")), *lines]),
            "\n".join([_row(head), rule, *map(_row, rest)]),
            estimate_note(certificate),
        ]
    )


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
