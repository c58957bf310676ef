"""Ternary linears as `quantization_config` of a Hub configuration describes them.

How their weights are stored is the business of `hub`; here is what they compute.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...errors import CheckpointError
from ...layers import BitLinear
from ...layers.dense import Linear
from ...layers.mixer import LinearFactory
from .fields import boolean, number, refuse_unless, section

PACKED_FORMATS = ("mmfree", "bitnet", "affine")
"""The `packed_formats` of an architecture whose linears a `TernaryLinears` describes."""

_STORAGE_KEYS = {
    "quant_method",
    "linear_class",
    "quantization_mode",
    "bits",
    "trits_per_byte",
    "format_version",
}
# Packed linears of a dense model, whose activations stay floats.
_DENSE = "linear"
_OWN_KEYS = {"modules_to_not_convert", "use_rms_norm", "rms_norm_eps"}


@dataclass(frozen=True)
class TernaryLinears:
    """The ternary linears of a BitNet-style model.

    Attributes:
        norm_eps: Epsilon of an RMSNorm inside each; `None` means none.
        excluded: Hub names of modules whose linears stay dense; `None`: the head alone.
    """

    norm_eps: float | None = None
    excluded: tuple[str, ...] | None = None

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> "TernaryLinears | None":
        """Reads `quantization_config`; `None` if there is none.

        Raises:
            CheckpointError: A value is of the wrong type.
            UnsupportedModelError: A key is not known.
        """
        described = section(config, "quantization_config")
        if not described or described.get("linear_class") == _DENSE:
            return None
        refuse_unless(described, dict.fromkeys(set(described) - _STORAGE_KEYS - _OWN_KEYS))
        excluded = described.get("modules_to_not_convert")
        if excluded is not None and (
            not isinstance(excluded, list) or not all(isinstance(name, str) for name in excluded)
        ):
            raise CheckpointError(
                "[config.json] 'modules_to_not_convert' must be a list of names but got "
                f"{excluded!r:.100}."
            )
        has_norm = boolean(described, "use_rms_norm", False)
        eps = number(described, "rms_norm_eps", 1e-6, low=1e-12, high=1.0)
        return cls(eps if has_norm else None, None if excluded is None else tuple(excluded))

    def to_hub(self) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint with float master weights."""
        described: dict[str, Any] = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
        }
        if self.norm_eps is not None:
            described |= {"use_rms_norm": True, "rms_norm_eps": self.norm_eps}
        if self.excluded is not None:
            described["modules_to_not_convert"] = list(self.excluded)
        return described

    def without(self, names: Iterable[str]) -> "TernaryLinears":
        """The same with these linears dense, by their Hub names."""
        before = ("lm_head",) if self.excluded is None else self.excluded
        return replace(self, excluded=(*before, *sorted(names)))


def linear_of(linears: TernaryLinears | None, name: str) -> LinearFactory:
    """Makes the linear with this Hub name."""
    if linears is None:
        return Linear
    excluded = ("lm_head",) if linears.excluded is None else linears.excluded
    is_dense = any(f".{key}." in f".{name}." for key in excluded)
    return Linear if is_dense else partial(BitLinear, norm_eps=linears.norm_eps)
