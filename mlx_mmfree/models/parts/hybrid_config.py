"""The description of a transformer with other token mixers in place of its attention."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from .architecture import find
from .mixers import MixerChoice, MixerPositions, read_choices
from .rotation import Rotation
from .ternary_linears import TernaryLinears
from .transformer import LINEARS, TransformerConfig

ATTENTION = "attention"
"""Names the attention of the base, which stays as it is."""

_BASES = ("bitnet", "llama", "qwen3")


@dataclass(frozen=True)
class Config:
    """The description of one hybrid.

    A `config.json` has the keys of the base, whose `model_type` and `architectures` stand under
    `base_model_type` and `base_architectures`, and `token_mixer`: a mixer as in a `metaformer`, or a
    list of them, which repeats from layer to layer.

    Attributes:
        base: The transformer.
        token_mixers: For each layer its mixer, or "attention" for that of the base.
    """

    base: TransformerConfig
    token_mixers: tuple[MixerChoice, ...]

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> "Config":
        """Reads the keys of a `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for what is not implemented.
        """
        name = config.get("base_model_type")
        if name not in _BASES:
            raise UnsupportedModelError(
                f"[config.json] 'base_model_type' must be one of {', '.join(_BASES)} but got "
                f"{name!r:.100}."
            )
        if "token_mixer" not in config:
            raise CheckpointError("[config.json] 'token_mixer' must be given but is missing.")
        of_base = {"model_type": name, "architectures": config.get("base_architectures")}
        base = find(name).config.from_hub({**config, **of_base})
        return cls.of(base, read_choices("token_mixer", config["token_mixer"]))

    @classmethod
    def of(cls, base: TransformerConfig, token_mixers: tuple[MixerChoice, ...]) -> "Config":
        """A description with mixers that repeat from layer to layer.

        Raises:
            CheckpointError: There are more mixers than layers.
        """
        layers = base.num_hidden_layers
        if len(token_mixers) > layers:
            raise CheckpointError(
                f"[config.json] 'token_mixer' must name at most one mixer for each of the {layers} "
                f"layers but names {len(token_mixers)}."
            )
        count = len(token_mixers)
        return cls(base, tuple(token_mixers[n % count] for n in range(layers)))

    def to_hub(self) -> dict[str, Any]:
        """The `config.json`, read back by `from_hub`."""
        base = self.base.to_hub()
        # transformers, which mlx-lm takes tokenizers from, fails at `rope_scaling` of an unknown model
        theta, scaling = base.pop("rope_theta"), base.pop("rope_scaling") or {}
        return {
            **base,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling},
            "model_type": "hybrid",
            "architectures": ["HybridForCausalLM"],
            "base_model_type": base["model_type"],
            "base_architectures": base["architectures"],
            "token_mixer": [choice.plain() for choice in self.token_mixers],
        }

    def with_dense(self, names: Iterable[str]) -> "Config":
        """The same with these ternary linears dense, by their Hub names.

        Those of the base's attention are kept by the names that they have in the base.
        """
        of_base: dict[str, str] = {}
        for number, choice in enumerate(self.token_mixers):
            if choice.name == ATTENTION:
                layer = f"model.layers.{number}"
                of_base |= {f"{layer}.{ours}": f"{layer}.{hub}" for hub, ours in LINEARS.items()}
        return replace(self, base=self.base.with_dense(of_base.get(name, name) for name in names))

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.base.max_position_embeddings

    @property
    def rotation(self) -> Rotation:
        """That of the base, if some layer rotates queries and keys."""
        rope = MixerPositions("rope")
        rotates = any(each.name == ATTENTION or each.takes(rope) for each in self.token_mixers)
        return self.base.rotation if rotates else Rotation(theta=self.base.rotation.theta)

    @property
    def linears(self) -> TernaryLinears | None:
        return self.base.linears
