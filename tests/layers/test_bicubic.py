"""Interpolation of maps, against Pillow's, which equals PyTorch's with antialiasing."""

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from mlx_mmfree.models.parts.patch_model import resized


@pytest.mark.parametrize(
    ("old", "new"), [((14, 14), (18, 10)), ((4, 3), (9, 2)), ((7, 5), (7, 20)), ((1, 1), (3, 4))]
)
def test_pillow_computes_the_same(old: tuple[int, int], new: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal((*old, 2)).astype(np.float32)
    want = np.stack(
        [
            np.asarray(Image.fromarray(x[..., n]).resize(new[::-1], Image.Resampling.BICUBIC))
            for n in range(2)
        ],
        axis=-1,
    )
    got = np.array(resized(mx.array(x)[None], new))[0]
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
