"""Bonsai 2 27B: Qwen3.5 whose packed weights are rotated, in the format of PrismML.

Without the rotation such weights give results of the right shape that mean nothing. So whatever the
description says that is not known is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ..errors import CheckpointError, UnsupportedModelError
from . import qwen3_5_text
from .parts.architecture import Published

_NAMESPACES = {1: "mlx-lm-text", 2: "mlx-vlm-qwen3_5"}
_KNOWN = {
    "gdn_activation_layout": "grouped",
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "base_model_type": "qwen3_5",
}


@dataclass(frozen=True)
class Config(qwen3_5_text.Config):
    """The description of the text model, after its rotation has been checked."""

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        schema, namespace = config.get("schema_version"), config.get("tensor_namespace")
        if type(schema) is not int or _NAMESPACES.get(schema) != namespace:
            raise UnsupportedModelError(
                "[config.json] 'schema_version' and 'tensor_namespace' of rotated weights must be "
                f"{' or '.join(f'{n} and {name}' for n, name in _NAMESPACES.items())} but got "
                f"{schema!r:.40} and {namespace!r:.60}. Without the right rotation the model would "
                "write nonsense."
            )
        for key, value in _KNOWN.items():
            if config.get(key, value if key == "base_model_type" else None) != value:
                raise UnsupportedModelError(
                    f"[config.json] '{key}' of rotated weights must be {value!r} but got "
                    f"{config.get(key)!r:.100}. Without the right rotation the model would write "
                    "nonsense."
                )
        if not config.get("modules"):
            raise CheckpointError(
                "[config.json] 'modules' must list the packed modules with their rotation but is "
                "missing. Without it the model would write nonsense. Fetch the checkpoint again."
            )
        return super().from_hub(config)


ARCHITECTURE = replace(
    qwen3_5_text.ARCHITECTURE,
    name="prism_hadamard_qwen35",
    config=Config,
    layouts=qwen3_5_text.layouts_of_mlx,
    tiny={
        **qwen3_5_text.ARCHITECTURE.tiny,
        **_KNOWN,
        "schema_version": 1,
        "tensor_namespace": _NAMESPACES[1],
        "modules": [{"path": "lm_head", "embedding": False, "block": 0}],
    },
    gguf={},
    published={
        "prism-ml/Ternary-Bonsai-2-27B-mlx-2bit": Published(
            "MLX affine, 2 bits, rotated", "reference, transformers, mlx-lm"
        ),
        "prism-ml/Ternary-Bonsai-2-27B-gguf": Published(
            "GGUF PTQ1_0, PQ2_0 or F16, rotated", "reference, transformers"
        ),
        "prism-ml/Ternary-Bonsai-2-27B-gguf-dev": Published("GGUF Q2_0, rotated", "transformers"),
    },
)
