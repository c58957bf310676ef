"""The labels of a roofline cover nothing."""

from itertools import combinations

import pytest
from roofline import label_points


@pytest.mark.plot
def test_labels_overlap_neither_each_other_nor_points() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=100)
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    points = [(0.5, 0.5)] * 12 + [(0.5, 0.52), (0.1, 0.9)]
    label_points(axes, points, [str(number) for number in range(1, 15)])
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 14
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    pixels = axes.transData.transform(points)
    assert not any(box.contains(x, y) for box in boxes for x, y in pixels)
