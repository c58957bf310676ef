"""The composition of a decoded token as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..picture import COLOURS, save_picture
from .certificate import Certificate

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
_PLACES = ("in blocks", "outside")
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
    pairs = [dict.fromkeys(_PRODUCTS, 0) for _ in _PLACES]
    for each in certificate.products:
        pairs[each.is_outside][each.kind] += each.macs
    _stack(products, _PRODUCTS, pairs, "pairs of numbers in products", bars=_PLACES)
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
    form = EngFormatter(unit, places=2)
    for place, total in enumerate(bottom):
        axes.text(place, total, form(total), ha="center", va="bottom", fontsize=8)
    axes.yaxis.set_major_formatter(EngFormatter(unit))
    axes.set(title=title, ylim=(0, 1.15 * max(*bottom, 1e-12)))
    axes.title.set_fontsize(10)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
