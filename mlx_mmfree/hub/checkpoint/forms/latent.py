"""Tells whether the float weights of a BitNet-style checkpoint are masters or are meant as stored.

Fine-tuning needs the masters, so they are published too, sometimes with a configuration that does not
say so. A model that uses them without ternarising them writes gibberish.
"""

from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx

from ....errors import CheckpointError, UnsupportedModelError
from ....models import architectures
from . import bitnet_format
from .packed_format import PACKED_DTYPES

_MASTERS, _AS_STORED = "prequantized", "bfloat16"


def with_latent(
    config: Mapping[str, Any],
    dtypes: Collection[mx.Dtype],
    revision: str | None,
    latent: bool | None,
) -> dict[str, Any]:
    """The configuration with the answer in its `quantization_config`.

    Args:
        config: The content of `config.json`.
        dtypes: The dtypes of the checkpoint's tensors.
        revision: The branch of the repository. Falcon-E has `prequantized` and `bfloat16`.
        latent: The caller's answer; `None` if there is none.

    Raises:
        CheckpointError: The files do not tell, or the caller's answer contradicts them.
        UnsupportedModelError: The architecture leaves no such question.
    """
    described = config.get("quantization_config")
    described = described if isinstance(described, Mapping) else {}
    has_method = described.get("quant_method") == bitnet_format.QUANT_METHOD
    has_floats = not any(dtype in PACKED_DTYPES for dtype in dtypes)
    if latent is not None:
        _check_answer(config, has_floats, latent)
    elif not _may_hold_masters(config) or not has_floats:
        return dict(config)
    elif revision == _MASTERS:
        latent = True
    elif has_method:
        # floats cannot be a packed form
        if not bitnet_format.is_packed(described):
            return dict(config)
    elif config.get("is_bitnet_config") is not True:
        return dict(config)
    if latent is None and revision == _AS_STORED:
        latent = False
    if latent is None:
        raise CheckpointError(
            "[load] 'latent' must be given for this checkpoint: its configuration is that of a "
            "BitNet model but its weights are floats. Give True if they are masters to be "
            "ternarised, False if they are meant as stored."
        )
    if not latent:
        return {key: value for key, value in config.items() if key != "quantization_config"}
    online = {
        **(described if has_method else {}),
        "quant_method": bitnet_format.QUANT_METHOD,
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
    }
    return {**config, "quantization_config": online}


def _may_hold_masters(config: Mapping[str, Any]) -> bool:
    known = architectures().get(str(config.get("model_type")))
    return known is not None and known.may_hold_masters


def _check_answer(config: Mapping[str, Any], has_floats: bool, latent: bool) -> None:
    if not _may_hold_masters(config):
        raise UnsupportedModelError(
            f"[load] 'latent' must be left out for 'model_type' {config.get('model_type')!r:.80}, "
            f"which decides it, but got {latent}. Leave it out."
        )
    if not has_floats:
        raise CheckpointError(
            f"[load] 'latent' must be left out for packed weights but got {latent}. Leave it out."
        )
