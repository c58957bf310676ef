"""The products of a certificate, those that are alike together, and its verdict in a sentence."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .certificate import Certificate
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
