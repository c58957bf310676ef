"""Rotary positions as a Hub configuration describes them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import mlx.core as mx

from ...errors import CheckpointError, UnsupportedModelError
from ...layers.attention import positions
from .fields import agreed, boolean, integer, number, refuse_unless, section

Scaling = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]

_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Further keys that change the rotation, with the value that changes nothing.
_FIXED = {"alpha": None, "partial_rotary_factor": 1.0, "mrope_section": None}
_REFUSED = {
    "proportional": "It rotates a part of each head.",
    "axial": "It rotates by positions in pictures.",
    "mrope": "It rotates by positions in pictures and films.",
}


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of one model.

    Attributes:
        theta: Base of the wavelengths.
        scaling: How the wavelengths are stretched.
        factor: By how much they are stretched; 1 for longrope, which has `factors`.
        low_freq_factor: An argument of `llama3_wavelengths`.
        high_freq_factor: An argument of `llama3_wavelengths`.
        trained_length: The longest text of training before positions were stretched; llama3, yarn,
            longrope and dynamic scaling need it.
        attention_factor: What yarn and longrope multiply rotated queries and keys by.
        beta_fast: An argument of `yarn_wavelengths`.
        beta_slow: An argument of `yarn_wavelengths`.
        is_rounded: An argument of `yarn_wavelengths`.
        factors: By how much longrope stretches the wavelength of each pair.
    """

    theta: float = 10000.0
    scaling: Scaling = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    trained_length: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_rounded: bool = True
    factors: tuple[float, ...] = ()

    @classmethod
    def from_hub(
        cls, config: Mapping[str, Any], default_theta: float | None = 10000.0
    ) -> "Rotation":
        """Reads `rope_theta` and `rope_scaling`, or both in `rope_parameters`.

        As in transformers and mlx-lm, `rope_scaling` replaces `rope_parameters` where both are given.
        Without a default the base must be given. Dynamic scaling begins at
        `max_position_embeddings`; other kinds take it for the trained length where the scaling names
        none.

        Raises:
            CheckpointError: A value is of the wrong type or out of bounds, or two keys for one thing
                have different values.
            UnsupportedModelError: The scaling is not implemented.
        """
        key = "rope_scaling" if section(config, "rope_scaling") else "rope_parameters"
        scaling = {k: value for k, value in section(config, key).items() if value is not None}
        names = ("rope_type", "type")
        kind: Any = agreed({f"'{name}' of '{key}'": scaling.get(name) for name in names})
        kind = "default" if kind is None else kind
        if kind not in get_args(Scaling):
            why = _REFUSED.get(str(kind), "Other ways to stretch positions are not implemented.")
            raise UnsupportedModelError(
                f"[config.json] the type in '{key}' must be one of {', '.join(get_args(Scaling))} "
                f"but got {kind!r:.100}. {why}"
            )
        refuse_unless(scaling, _FIXED)
        nested = [name for name, value in scaling.items() if isinstance(value, Mapping)]
        if nested:
            raise UnsupportedModelError(
                f"[config.json] '{key}' must be the same for all layers but names {nested[0]!r:.60}. "
                "Such models are not implemented."
            )
        given = agreed(
            {
                f"'rope_theta' of '{key}'": scaling.get("rope_theta"),
                "'rope_theta'": config.get("rope_theta"),
            }
        )
        replaced = section(config, "rope_parameters").get("rope_theta")
        # transformers forgets it there, and mlx-lm's Qwen3 takes it
        if key == "rope_scaling" and given is None and replaced not in (None, default_theta):
            raise CheckpointError(
                "[config.json] 'rope_theta' must stand in 'rope_scaling', which replaces "
                f"'rope_parameters', but {replaced!r:.60} stands in 'rope_parameters' alone. Copy it "
                "there."
            )
        if given is None and default_theta is None:
            raise CheckpointError(
                "[config.json] 'rope_theta' must be given for this architecture, since programs differ "
                "in what they take without it, but is missing. Write the base that the model was "
                "trained with."
            )
        theta = {} if given is None else {"rope_theta": given}
        base = number(theta, "rope_theta", default_theta, low=1.0, high=1e15)
        return cls(base) if kind == "default" else cls._stretched(base, kind, key, scaling, config)

    @classmethod
    def _stretched(
        cls,
        theta: float,
        kind: Scaling,
        key: str,
        scaling: dict[str, Any],
        config: Mapping[str, Any],
    ) -> "Rotation":
        """Reads the section under `key`, which stretches positions."""
        trained_length = integer(config, "max_position_embeddings", 2048, high=2**31 - 1)
        if kind == "dynamic":
            refuse_unless(scaling, {_ORIGINAL_LENGTH: trained_length})
        outside = f"'{_ORIGINAL_LENGTH}'"
        lengths = {outside: config.get(_ORIGINAL_LENGTH) or None}
        lengths[f"{outside} of '{key}'"] = scaling.get(_ORIGINAL_LENGTH)
        given = agreed(lengths)
        if given is not None:
            trained_length = integer({_ORIGINAL_LENGTH: given}, _ORIGINAL_LENGTH, high=2**31 - 1)
        if kind == "longrope":
            return cls(
                theta,
                kind,
                trained_length=trained_length,
                attention_factor=_longrope_attention_factor(scaling, config, trained_length),
                factors=_equal_factors(scaling),
            )
        if kind == "yarn":
            stretched = integer(config, "max_position_embeddings", 2048, high=2**31 - 1)
            scaling.setdefault("factor", stretched / trained_length)
        factor = number(scaling, "factor", low=1.0, high=1e6)
        if kind == "llama3":
            low = number(scaling, "low_freq_factor", low=1e-3, high=1e6)
            high = number(scaling, "high_freq_factor", low=1e-3, high=1e6)
            if high <= low:
                raise UnsupportedModelError(
                    "[config.json] 'high_freq_factor' must be larger than 'low_freq_factor' but got "
                    f"{high} and {low}."
                )
            return cls(theta, kind, factor, low, high, trained_length)
        if kind == "yarn":
            return cls._yarn(theta, factor, trained_length, scaling)
        refuse_unless(scaling, {"attention_factor": 1.0})
        if kind == "linear":
            return cls(theta, kind, factor)
        return cls(theta, kind, factor, trained_length=trained_length)

    @classmethod
    def _yarn(
        cls, theta: float, factor: float, trained_length: int, scaling: Mapping[str, Any]
    ) -> "Rotation":
        weights = [
            number(scaling, key, 0.0, low=0.0, high=1e3) for key in ("mscale", "mscale_all_dim")
        ]
        usual = positions.yarn_attention_factor(factor)
        if all(weights):
            above, below = (positions.yarn_attention_factor(factor, weight) for weight in weights)
            usual = above / below
        fast = number(scaling, "beta_fast", 32.0, low=0.0, high=1e6) or 32.0
        slow = number(scaling, "beta_slow", 1.0, low=0.0, high=1e6) or 1.0
        if fast <= slow:
            raise UnsupportedModelError(
                f"[config.json] 'beta_fast' must be larger than 'beta_slow' but got {fast} and {slow}."
            )
        return cls(
            theta,
            "yarn",
            factor,
            trained_length=trained_length,
            attention_factor=number(scaling, "attention_factor", usual, low=1e-3, high=1e3),
            beta_fast=fast,
            beta_slow=slow,
            is_rounded=boolean(scaling, "truncate", True),
        )

    def to_hub(self) -> dict[str, Any]:
        """The keys that `from_hub` reads."""
        if self.scaling == "default":
            return {"rope_theta": self.theta, "rope_scaling": None}
        scaling: dict[str, Any] = {"rope_type": self.scaling, "factor": self.factor}
        if self.scaling in ("llama3", "yarn", "longrope"):
            scaling[_ORIGINAL_LENGTH] = self.trained_length
        if self.scaling in ("yarn", "longrope"):
            scaling["attention_factor"] = self.attention_factor
        if self.scaling == "llama3":
            scaling |= {
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
            }
        if self.scaling == "yarn":
            scaling |= {
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "truncate": self.is_rounded,
            }
        if self.scaling == "longrope":
            scaling |= {"short_factor": list(self.factors), "long_factor": list(self.factors)}
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    def build(self, head_dim: int) -> positions.RoPE:
        """The rotation of heads of this size."""
        if self.scaling == "dynamic":
            return positions.DynamicRoPE(
                head_dim,
                base=self.theta,
                factor=self.factor,
                trained_length=self.trained_length,
            )
        wavelengths = positions.rope_wavelengths(head_dim, self.theta)
        if self.scaling == "linear":
            wavelengths = positions.linear_wavelengths(wavelengths, self.factor)
        elif self.scaling == "llama3":
            wavelengths = positions.llama3_wavelengths(
                wavelengths,
                factor=self.factor,
                low_freq_factor=self.low_freq_factor,
                high_freq_factor=self.high_freq_factor,
                trained_length=self.trained_length,
            )
        elif self.scaling == "yarn":
            wavelengths = positions.yarn_wavelengths(
                wavelengths,
                base=self.theta,
                factor=self.factor,
                beta_fast=self.beta_fast,
                beta_slow=self.beta_slow,
                trained_length=self.trained_length,
                is_rounded=self.is_rounded,
            )
        elif self.scaling == "longrope":
            wavelengths = wavelengths * mx.array(self.factors, mx.float32)
        return positions.RoPE(
            head_dim, wavelengths=wavelengths, attention_factor=self.attention_factor
        )


def _equal_factors(scaling: Mapping[str, Any]) -> tuple[float, ...]:
    """The factors of longrope.

    Other ones beyond the trained length would rotate the whole text anew once it gets there.
    """
    short, long = (scaling.get(key) for key in ("short_factor", "long_factor"))
    if not isinstance(short, list) or not 0 < len(short) <= 2**11:
        raise CheckpointError(
            "[config.json] 'short_factor' must be a list of numbers for longrope but got "
            f"{short!r:.80}."
        )
    if short != long:
        raise UnsupportedModelError(
            "[config.json] 'long_factor' must equal 'short_factor' but differs. A text that would be "
            "rotated anew once it is longer than in training is not implemented."
        )
    return tuple(number({"short_factor": f}, "short_factor", low=1e-6, high=1e6) for f in short)


def _longrope_attention_factor(
    scaling: Mapping[str, Any], config: Mapping[str, Any], trained_length: int
) -> float:
    stretched = integer(config, "max_position_embeddings", 2048, high=2**31 - 1)
    factor = number(scaling, "factor", stretched / trained_length, low=1e-6, high=1e6)
    usual = 1.0
    if factor > 1.0 and trained_length > 1:
        usual = math.sqrt(1.0 + math.log(factor) / math.log(trained_length))
    return number(scaling, "attention_factor", usual, low=1e-3, high=1e3)
