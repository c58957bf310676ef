"""Labels of tokens, and the sizes of the picture that they stand in."""

from pathlib import Path

import numpy as np
import pytest

from mlx_mmfree.evaluation.maps import LayerMaps, Panel, draw_maps, token_label


@pytest.mark.plot
@pytest.mark.parametrize(
    ("token", "label"),
    [
        (" cat", "cat"),
        ("▁cat", "cat"),
        ("  ", "␣␣"),
        ("", "''"),
        ("a b", "a␣b"),
        ("\n\t", "\\n\\t"),
        ("\\n", "\\\\n"),
        ("$x_1^2$", "$x_1^2$"),
        ("é", "é"),
        ("日", "\\u65e5"),
        ("👍", "\\u1f44d"),
        ("\u0301", "\\u301"),
        ("\u200b\u202e", "\\u200b\\u202e"),
        ("unbelievably", "unbelievably"),
        ("unbelievable!", "unbelievabl…"),
    ],
)
def test_labels(token: str, label: str) -> None:
    assert token_label(token) == label


@pytest.mark.plot
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(1, 1, 1), (2, 8, 200), (9, 2, 5)])
def test_pictures_have_bounds(tmp_path: Path, rows: int, columns: int, tokens: int) -> None:
    weights = np.tril(np.ones((tokens, tokens), np.float32))
    weights[-1, -1] = -1.0
    panels = tuple(Panel(f"head {n}", weights) for n in range(columns))
    maps = [LayerMaps(f"layer {n}", "GQA", "text", "text", panels[: n + 1]) for n in range(rows)]
    file = tmp_path / "maps.png"
    draw_maps(maps, {"text": ["$"] * tokens}, "$ a_b", file)
    data = file.read_bytes()
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    assert data.startswith(b"\x89PNG") and width < 5_000 and height < 16_000
