"""What a Hub configuration says about rotary positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import UnsupportedModelError
from ..layers.rope import (
    DynamicRoPE,
    RoPE,
    linear_wavelengths,
    llama3_wavelengths,
    rope_wavelengths,
)
from .fields import integer, number, refuse_unless, section

Scaling = Literal["default", "linear", "dynamic", "llama3"]

_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Keys of other ways to stretch positions, with the value that changes nothing.
_FIXED = {"alpha": None, "attention_factor": 1.0, "partial_rotary_factor": 1.0}


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of one model.

    Attributes:
        theta: Base of the wavelengths.
        scaling: How the wavelengths are stretched.
        factor: By how much.
        low_freq_factor: Of llama3 scaling, see `llama3_wavelengths`.
        high_freq_factor: Of llama3 scaling.
        trained_length: Of llama3 and dynamic scaling, the longest text before it was stretched.
    """

    theta: float = 10000.0
    scaling: Scaling = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    trained_length: int = 8192

    def __post_init__(self) -> None:
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise UnsupportedModelError(
                f"[config.json] 'high_freq_factor' must be larger than 'low_freq_factor' but got "
                f"{self.high_freq_factor} and {self.low_freq_factor}."
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> "Rotation":
        """Reads `rope_theta` and `rope_scaling`, or both in `rope_parameters`.

        Dynamic scaling begins at `max_position_embeddings`.

        Raises:
            CheckpointError: A value is of the wrong type or out of bounds.
            UnsupportedModelError: The scaling is not implemented.
        """
        key = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
        scaling = section(config, key)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in get_args(Scaling):
            raise UnsupportedModelError(
                f"[config.json] the type in '{key}' must be one of {', '.join(get_args(Scaling))} "
                f"but got {kind!r:.100}. Other ways to stretch positions are not implemented."
            )
        refuse_unless(scaling, _FIXED)
        theta = number({**config, **scaling}, "rope_theta", 10000.0, low=1.0, high=1e15)
        if kind == "default":
            return cls(theta)
        factor = number(scaling, "factor", low=1.0, high=1e6)
        if kind == "linear":
            return cls(theta, kind, factor)
        if kind == "dynamic":
            trained_length = integer(config, "max_position_embeddings", 2048, high=2**31 - 1)
            refuse_unless(scaling, {_ORIGINAL_LENGTH: trained_length})
            return cls(theta, kind, factor, trained_length=trained_length)
        return cls(
            theta,
            kind,
            factor,
            number(scaling, "low_freq_factor", low=1e-3, high=1e6),
            number(scaling, "high_freq_factor", low=1e-3, high=1e6),
            integer(scaling, _ORIGINAL_LENGTH, high=2**40),
        )

    def to_hub(self) -> dict[str, Any]:
        """The keys that `from_hub` reads."""
        if self.scaling == "default":
            return {"rope_theta": self.theta, "rope_scaling": None}
        scaling: dict[str, Any] = {"rope_type": self.scaling, "factor": self.factor}
        if self.scaling == "llama3":
            scaling |= {
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                _ORIGINAL_LENGTH: self.trained_length,
            }
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    def build(self, head_dim: int) -> RoPE:
        """The rotation of heads of this size."""
        if self.scaling == "dynamic":
            return DynamicRoPE(
                head_dim,
                base=self.theta,
                factor=self.factor,
                trained_length=self.trained_length,
            )
        wavelengths = rope_wavelengths(head_dim, self.theta)
        if self.scaling == "linear":
            wavelengths = linear_wavelengths(wavelengths, self.factor)
        elif self.scaling == "llama3":
            wavelengths = llama3_wavelengths(
                wavelengths,
                factor=self.factor,
                low_freq_factor=self.low_freq_factor,
                high_freq_factor=self.high_freq_factor,
                trained_length=self.trained_length,
            )
        return RoPE(head_dim, wavelengths=wavelengths)
