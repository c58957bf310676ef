"""The file of a picture is whole or absent."""

from pathlib import Path

import pytest

from mlx_mmfree.evaluation.picture import COLOURS, save_picture


def test_colours_differ() -> None:
    assert len(set(COLOURS)) == len(COLOURS) >= 6


@pytest.mark.plot
def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    file = tmp_path / "picture.png"
    file.write_bytes(b"old")
    figure = Figure()
    figure.text(0, 0, "$\\nonsense{$")
    with pytest.raises(ValueError):
        save_picture(figure, file)
    assert [*tmp_path.iterdir()] == [file] and file.read_bytes() == b"old"
