"""Mixers by their names, and one as a description of a model names it, with its options."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar, get_args

import mlx.nn as nn

from ...errors import CheckpointError, UnsupportedModelError
from ...files import plugins
from ...layers import ChannelMixer, RoPE
from ...layers.attention.positions import ALiBi, RelativeBias
from ...layers.mixer import Linears, SpatialMixer, TokenMixer

Made = TypeVar("Made")

_CAPABILITIES = {
    "causal": "causal",
    "bidirectional": "bidirectional",
    "cross": "cross",
    "recurrent": "constant state",
    "length_bound": "bounded length",
    "packs_samples": "packing",
}


def token_mixers() -> dict[str, type[TokenMixer]]:
    """All token mixers by name, sorted."""
    return _mixers("token_mixers", TokenMixer)


def spatial_mixers() -> dict[str, type[SpatialMixer]]:
    """All spatial mixers by name, sorted."""
    return _mixers("spatial_mixers", SpatialMixer)


def channel_mixers() -> dict[str, type[ChannelMixer]]:
    """All channel mixers by name, sorted."""
    return _mixers("channel_mixers", ChannelMixer)


def _mixers(package: str, base: type) -> dict[str, Any]:
    """Each file of the package, or on its search path, holds a mixer of its name, or several."""
    path = importlib.import_module(f"mlx_mmfree.{package}").__path__
    return _found(package, base, tuple(path), tuple(plugins.LOADED))


@cache
def _found(
    package: str, base: type, search: tuple[str, ...], loaded: tuple[plugins.Plugin, ...]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for plugin in plugins.modules_of(package):
        module = plugin.module
        for _, value in inspect.getmembers(module, inspect.isclass):
            is_own = f"{value.__module__}.".startswith(f"{module.__name__}.")
            if issubclass(value, base) and is_own:
                plugins.add(found, vars(value).get("name", plugin.name), value, plugin)
    return dict(sorted(found.items()))


def capabilities(mixer: type[TokenMixer]) -> list[str]:
    """The abilities of mixers of this class, as text."""
    return [words for name, words in _CAPABILITIES.items() if getattr(mixer, name)]


def find_token_mixer(name: object) -> type[TokenMixer]:
    """The mixer of this name.

    Raises:
        UnsupportedModelError: None has this name; the known ones are listed with what they can do.
    """
    known = token_mixers()
    if isinstance(name, str) and name in known:
        return known[name]
    listed = "; ".join(f"{key} ({', '.join(capabilities(mixer))})" for key, mixer in known.items())
    raise UnsupportedModelError(
        f"[model] a token mixer must be one of those that follow but got {name!r:.100}: {listed}. "
        f"{plugins.where_else()}"
    )


def find_spatial_mixer(name: object) -> type[SpatialMixer]:
    """The spatial mixer of this name.

    Raises:
        UnsupportedModelError: None has this name.
    """
    return _named("spatial", spatial_mixers(), name)


def find_channel_mixer(name: object) -> type[ChannelMixer]:
    """The channel mixer of this name.

    Raises:
        UnsupportedModelError: None has this name.
    """
    return _named("channel", channel_mixers(), name)


def _named(kind: str, known: Mapping[str, Made], name: object) -> Made:
    if isinstance(name, str) and name in known:
        return known[name]
    raise UnsupportedModelError(
        f"[model] a {kind} mixer must be one of {', '.join(known)} but got {name!r:.100}. "
        f"{plugins.where_else()}"
    )


_MOST = 2**20
"""No option of a real model is a larger number, and sizes follow from options."""

_OF_THE_MODEL = ("dims", "linear", "is_causal", "max_length", "usual_length", "rope")
"""Arguments that the model decides for all its mixers, besides those that it gives some."""


@dataclass(frozen=True)
class MixerPositions:
    """How mixers tell positions apart.

    Attributes:
        kind: `rope`, `alibi`, `relative_bias`, or another word for nothing.
        rope_base: Base of the rotation.
        rope: Makes the rotation of heads of a size, instead of the plain one with that base.
    """

    kind: str
    rope_base: float = 10000.0
    rope: Callable[[int], RoPE] | None = None

    @property
    def is_bias(self) -> bool:
        """True if it is a term of scores."""
        return self.kind in ("alibi", "relative_bias")

    @property
    def argument(self) -> str | None:
        """The argument of mixers that takes it."""
        if self.kind == "rope":
            return "rope"
        return "position_bias" if self.is_bias else None

    def refusal(self, mixer: str) -> UnsupportedModelError:
        """The error for a mixer that does not take it."""
        return UnsupportedModelError(
            f"[config.json] 'positions' must not be {self.kind} for {mixer}, which has no scores to add "
            "it to. mmfree mixers describes those that have."
        )

    def made(self, heads: int, head_dim: int, *, is_causal: bool) -> nn.Module:
        """It, for a mixer with these heads."""
        if self.kind == "rope":
            make = self.rope or partial(RoPE, base=self.rope_base)
            return make(head_dim)
        return ALiBi(heads) if self.kind == "alibi" else RelativeBias(heads, is_causal=is_causal)


@dataclass(frozen=True)
class MixerChoice:
    """One mixer.

    Attributes:
        name: That of its file.
        options: Arguments of its class, plain values.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, key: str, value: object) -> "MixerChoice":
        """Reads a name, or an object with `name` and options beside it.

        Raises:
            CheckpointError: It is neither, or an option is no plain value.
        """
        if isinstance(value, str):
            return cls(value)
        if not (isinstance(value, Mapping) and isinstance(value.get("name"), str)):
            raise CheckpointError(
                f"[config.json] '{key}' must be the name of a mixer, or an object with 'name' and its "
                f"options, but got {value!r:.100}."
            )
        options = {str(name): option for name, option in value.items() if name != "name"}
        for name, option in options.items():
            is_plain = option is None or isinstance(option, bool | int | float | str)
            if not is_plain or (isinstance(option, int | float) and not abs(option) <= _MOST):
                raise CheckpointError(
                    f"[config.json] '{name}' of '{key}' must be a word, or a number of at most {_MOST}, "
                    f"but got {option!r:.100}."
                )
        return cls(value["name"], options)

    def plain(self) -> str | dict[str, Any]:
        """The description that `read` reads back."""
        return {"name": self.name, **self.options} if self.options else self.name

    def token_mixer(
        self,
        dims: int,
        *,
        linear: Linears,
        is_causal: bool,
        max_length: int,
        positions: "MixerPositions | None" = None,
    ) -> TokenMixer:
        """Makes it.

        Args:
            dims: Model dims.
            linear: Makes its projections.
            is_causal: Whether it must not see what comes after a position.
            max_length: Positions of the longest sequence, for a mixer that must know.
            positions: What tells positions apart within a mixer that can; `None`: nothing does.

        Raises:
            UnsupportedModelError: There is no such mixer, or it cannot do what is asked.
            CheckpointError: An option does not fit.
        """
        mixer = find_token_mixer(self.name)
        can = mixer.causal if is_causal else mixer.bidirectional
        if not can:
            kind = "causal" if is_causal else "bidirectional"
            raise UnsupportedModelError(
                f"[config.json] the token mixers must be {kind} but {self.name} cannot be. mmfree "
                "mixers lists those that can."
            )
        known = inspect.signature(mixer.__init__).parameters
        arguments: dict[str, Any] = {
            "linear": linear,
            "max_length": max_length,
            "usual_length": max_length,
        }
        if mixer.causal and mixer.bidirectional:
            arguments["is_causal"] = is_causal
        if positions is not None:
            arguments |= self._with_positions(positions, dims, mixer, known, is_causal)
        return self._made(mixer, dims, arguments)

    def _with_positions(
        self,
        positions: "MixerPositions",
        dims: int,
        mixer: type[TokenMixer],
        known: Mapping[str, inspect.Parameter],
        is_causal: bool,
    ) -> dict[str, Any]:
        """The arguments of a mixer that take positions into it."""
        name = positions.argument
        if name is None or name not in known:
            if positions.is_bias and not mixer.recurrent:
                raise positions.refusal(self.name)
            return {}
        heads = self.options.get("num_heads") or known["num_heads"].default
        head_dim = self.options.get("head_dim") or dims // heads
        return {
            name: _checked(self.name, lambda: positions.made(heads, head_dim, is_causal=is_causal))
        }

    def takes(self, positions: "MixerPositions") -> bool:
        """Returns whether the mixer takes them."""
        mixer = find_token_mixer(self.name)
        return positions.argument in inspect.signature(mixer.__init__).parameters

    def channel_mixer(self, dims: int, *, linear: Linears, hidden_dims: int | None) -> ChannelMixer:
        """Makes it, with so many channels between its projections; raises as `token_mixer` does."""
        mixer = find_channel_mixer(self.name)
        return self._made(mixer, dims, {"linear": linear, "hidden_dims": hidden_dims})

    def _made(self, mixer: Callable[..., Made], dims: int, of_the_model: Mapping[str, Any]) -> Made:
        known = inspect.signature(mixer).parameters
        own = [
            name
            for name, parameter in known.items()
            if name not in (*_OF_THE_MODEL, *of_the_model) and _is_plain(parameter.annotation)
        ]
        unknown = [name for name in self.options if name not in own]
        if unknown:
            raise UnsupportedModelError(
                f"[config.json] the options of {self.name} must be among {', '.join(own)} but got "
                f"{', '.join(unknown)}."
            )
        given = {name: value for name, value in of_the_model.items() if name in known}
        return _checked(self.name, lambda: mixer(dims, **given, **self.options))


def _is_plain(annotation: object) -> bool:
    """Returns whether an argument takes numbers or words, which a description can hold."""
    kinds = get_args(annotation) or (annotation,)
    return any(isinstance(kind, str) or kind in (bool, int, float, str) for kind in kinds)


def _checked(name: str, make: Callable[[], Made]) -> Made:
    """The result of a call; a mixer's objection to its options becomes an error of the description."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"[config.json] the options of {name} do not fit: {error}") from error


def read_choices(key: str, value: object) -> tuple[MixerChoice, ...]:
    """One mixer for all layers, or a list that is repeated from layer to layer.

    Raises:
        CheckpointError: The list is empty, or an entry is wrong.
    """
    values: Sequence[object] = value if isinstance(value, list) else [value]
    if not values:
        raise CheckpointError(f"[config.json] '{key}' must name at least one mixer but is empty.")
    return tuple(MixerChoice.read(key, each) for each in values)
