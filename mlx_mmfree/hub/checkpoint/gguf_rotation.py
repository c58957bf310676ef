"""Rotary positions in GGUF files: the metadata under `rope.` and the tensor `rope_freqs`.

`rope.scaling.type` is `linear` or `yarn`. Llama 3's scaling is a factor for each pair of dims, in
`rope_freqs.weight`. llama.cpp itself multiplies by YaRN's usual attention factor, so the file holds the
quotient. Other kinds of scaling have no form in GGUF.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...layers.attention.positions import rope_wavelengths, yarn_attention_factor
from ...models.parts.rotation import Rotation

FACTORS = "rope_freqs.weight"
KEYS = {
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
"""The metadata that `read_scaling` reads, or that changes no result."""

_WITH_FACTORS = ("llama",)
_MAX_FACTORS = 2**11


def read_scaling(
    given: Mapping[str, Any], factors: np.ndarray | None, context_length: Any
) -> dict[str, Any] | None:
    """The value of `rope_scaling` in `config.json`; `None` if positions are not scaled.

    Args:
        given: The metadata of the architecture, without its prefix.
        factors: The values of `rope_freqs.weight`.
        context_length: The length of the longest text.

    Raises:
        CheckpointError: A value is not a number.
        UnsupportedModelError: The file asks for several kinds of scaling at once.
    """
    factor = given.get("rope.scaling.factor")
    kind = given.get("rope.scaling.type", "linear" if factor else "none")
    attention = given.get("rope.scaling.attn_factor", 1.0)
    is_plain = kind == "none" or not factor
    if (factors is not None and not is_plain) or (attention != 1.0 and kind != "yarn"):
        raise UnsupportedModelError(
            f"[GGUF] 'rope.scaling.type' must be yarn for 'rope.scaling.attn_factor' and none beside "
            f"{FACTORS!r} but got {kind!r:.40}. Use another file."
        )
    if factors is not None:
        listed = [float(value) for value in factors]
        return {
            "rope_type": "longrope",
            "short_factor": listed,
            "long_factor": listed,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context_length,
        }
    if is_plain:
        return None
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    return _yarn(given, factor, attention, context_length)


def _yarn(
    given: Mapping[str, Any], factor: Any, attention: Any, context_length: Any
) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": given.get(
            "rope.scaling.original_context_length", context_length
        ),
        "beta_fast": given.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": given.get("rope.scaling.yarn_beta_slow"),
    }
    if attention != 1.0:
        if type(attention) is not float or type(factor) is not float:
            raise CheckpointError(
                "[GGUF] 'rope.scaling.attn_factor' and 'rope.scaling.factor' must be numbers but got "
                f"{attention!r:.40} and {factor!r:.40}. Fetch the file again."
            )
        scaling["attention_factor"] = attention * yarn_attention_factor(factor)
    return {key: value for key, value in scaling.items() if value is not None}


def check_factors(shape: tuple[int, ...]) -> None:
    """Refuses impossible sizes before the tensor is read.

    Raises:
        CheckpointError: The tensor is not a short list.
    """
    if len(shape) != 1 or shape[0] > _MAX_FACTORS:
        raise CheckpointError(
            f"[GGUF] tensor {FACTORS!r} must be a list of at most {_MAX_FACTORS} numbers but has shape "
            f"{shape}. Fetch the file again."
        )


def scaling_metadata(rotation: Rotation) -> dict[str, Any]:
    """The metadata of a rotation, without the architecture's prefix."""
    if rotation.scaling not in ("linear", "yarn"):
        return {}
    found: dict[str, Any] = {
        "rope.scaling.type": rotation.scaling,
        "rope.scaling.factor": rotation.factor,
    }
    if rotation.scaling == "yarn":
        usual = Rotation(scaling="yarn")
        found["rope.scaling.original_context_length"] = rotation.trained_length
        attention = rotation.attention_factor / yarn_attention_factor(rotation.factor)
        if abs(attention - 1.0) > 1e-6:
            found["rope.scaling.attn_factor"] = attention
        for name in ("beta_fast", "beta_slow"):
            if getattr(rotation, name) != getattr(usual, name):
                found[f"rope.scaling.yarn_{name}"] = getattr(rotation, name)
    return found


def scaling_factors(rotation: Rotation, head_dim: int) -> np.ndarray | None:
    """The factor for each pair of a head's dims; `None` if the scaling is not stored as factors."""
    stretched = rotation.build(head_dim).wavelengths
    if rotation.scaling not in ("llama3", "longrope") or stretched is None:
        return None
    return np.asarray(stretched / rope_wavelengths(head_dim, rotation.theta), "<f4")


def refusal(rotation: Rotation, architecture: str) -> str | None:
    """Why a GGUF file of this architecture cannot hold the rotation; `None` if it can."""
    if rotation.scaling == "dynamic":
        return "positions must not be scaled dynamically, which GGUF has no form for,"
    if rotation.scaling == "yarn" and not rotation.is_rounded:
        return "YaRN must blend from a whole pair of dims ('truncate' true)"
    if rotation.scaling == "longrope" and rotation.attention_factor != 1.0:
        return "longrope must have the attention factor 1"
    has_factors = rotation.scaling in ("llama3", "longrope")
    if has_factors and architecture not in _WITH_FACTORS:
        return f"positions must not be scaled by {rotation.scaling} in architecture {architecture}"
    return None
