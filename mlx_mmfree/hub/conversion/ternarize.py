"""Makes BitNet-style models of dense ones by absmean ternarisation (Ma et al., arXiv 2402.17764).

The rounding loses most of each weight. Without fine-tuning, the model is much worse or useless.
"""

from dataclasses import replace

import mlx.core as mx

from ...errors import UnsupportedModelError
from ...models import architectures, find_described
from ...models.parts.ternary_linears import TernaryLinears
from ...ops import pack_ternary
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.forms.packed_format import PACKED_DTYPES

GROUP_SIZE = 128


def check_dense(checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint that is not a dense model of an architecture with a ternary form.

    Raises:
        UnsupportedModelError: The model has another architecture, or is quantised already.
    """
    config = checkpoint.config
    architecture = find_described(config)
    if not architecture.can_be_ternary:
        known = sorted(name for name, each in architectures().items() if each.is_ternarizable)
        raise UnsupportedModelError(
            f"[convert] 'ternarize' must be left out for 'model_type' {architecture.name!r:.80} but "
            f"was given. It is for {', '.join(known)} and models of images."
        )
    is_described = any(config.get(key) for key in ("quantization", "quantization_config"))
    is_packed = any(entry.dtype in PACKED_DTYPES for entry in checkpoint.tensors.values())
    if is_described or is_packed or "BitnetForCausalLM" in config.get("architectures", ()):
        raise UnsupportedModelError(
            f"[convert] 'ternarize' must be left out for '{checkpoint.folder}', which is quantised "
            "already, but was given. Convert the float model that it was made from."
        )


def ternarized(checkpoint: Checkpoint) -> Checkpoint:
    """A dense checkpoint as the master weights of a BitNet model, with one scale for each matrix.

    Raises:
        UnsupportedModelError: As for `check_dense`.
    """
    check_dense(checkpoint)
    described = TernaryLinears().to_hub()
    return replace(checkpoint, config={**checkpoint.config, "quantization_config": described})


def ternarize_groups(weight: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    r"""Absmean ternarisation of each group of 128 neighbouring inputs, in MLX's affine form.

    .. math::
        s = \max(\operatorname{mean}(|W|),\ 10^{-5}), \qquad
        t = \operatorname{clip}(\operatorname{round}(W / s),\ -1,\ 1)

    The scale is computed in float32 and rounded to the dtype of the weight. Ties are rounded to even.
    The weight becomes :math:`t s`.

    Args:
        weight: Floats of shape `(N, D)`, D a multiple of 128.

    Returns:
        The packed codes, `uint32` `(N, D / 16)`, and the scales `s` and biases `-s` in the dtype of the
        weight, `(N, D / 128)`.
    """
    groups = weight.astype(mx.float32).reshape(weight.shape[0], -1, GROUP_SIZE)
    scales = mx.maximum(mx.mean(mx.abs(groups), axis=-1), 1e-5).astype(weight.dtype)
    trits = mx.clip(mx.round(groups / scales.astype(mx.float32)[..., None]), -1, 1)
    return pack_ternary(trits.reshape(weight.shape)), scales, -scales
