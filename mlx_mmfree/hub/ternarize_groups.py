"""Ternarises a float matrix with a scale for each group of inputs."""

import mlx.core as mx

from ..ops import pack_ternary

GROUP_SIZE = 128


def ternarize_groups(weight: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Absmean ternarisation of each group, in MLX's affine form.

    `s = max(mean(|W|), 1e-5)` over 128 neighbouring inputs, in float32, rounded to the dtype of the
    weight; `t = clip(round(W / s), -1, 1)`, ties to even. The weight becomes `t * s`.

    Args:
        weight: Floats of shape `(N, D)`, D a multiple of 128.

    Returns:
        The packed codes, `uint32` `(N, D / 16)`, and the scales `s` and biases `-s` of the dtype of
        the weight, `(N, D / 128)`.
    """
    groups = weight.astype(mx.float32).reshape(weight.shape[0], -1, GROUP_SIZE)
    scales = mx.maximum(mx.mean(mx.abs(groups), axis=-1), 1e-5).astype(weight.dtype)
    trits = mx.clip(mx.round(groups / scales.astype(mx.float32)[..., None]), -1, 1)
    return pack_ternary(trits.reshape(weight.shape)), scales, -scales
