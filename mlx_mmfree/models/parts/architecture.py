"""The record of an architecture: everything that the library asks of it, found by name.

Names of tensors on disk, which are the Hub's, are translated into those in memory by its table.
"""

import importlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import compress, product
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...errors import UnsupportedModelError
from ...files import plugins
from ...layers.matrix import StoredLayout, matrices, parameters
from .fused import fuse_operations
from .ternary_linears import PACKED_FORMATS

Pipeline = Literal[
    "text-generation",
    "feature-extraction",
    "fill-mask",
    "text-classification",
    "translation",
    "image-classification",
]
"""The task of a model, in the Hub's words."""


class Config(Protocol):
    """The description of one model."""

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        """Reads the keys of a Hub `config.json`."""

    def to_hub(self) -> dict[str, Any]:
        """The `config.json` that `from_hub` reads back."""


class Copy(str):
    """In `weight_names`, for a tensor that some programs store once more: the one that it must equal."""


class OlderName(str):
    """In `weight_names`, for what a tensor was called: the tensor, unless the newer name is there."""


class LeftOut(str):
    """In `weight_names`, for a part of a file that is never read: what it is, as text."""


class Stacked(str):
    """In `weight_names`, for one of several matrices that are one in memory, row after row.

    The last number of its name on disk, which is left out here, counts them from 0.
    """


def _nothing(given: Any) -> Mapping[str, Any]:
    return {}


def _in_order(name: str, config: Mapping[str, Any]) -> tuple[int, np.ndarray] | None:
    return None


def _as_on_hub(model: nn.Module) -> Mapping[str, StoredLayout]:
    return {}


@dataclass(frozen=True)
class GGUFFormat:
    """An architecture under one name in GGUF files.

    Attributes:
        config: What the name says about the Hub's configuration.
        sub_norms: What the Hub calls the norms before the last projections.
        is_ternary: Whether its linears are ternary, with 8-bit activations, in any case.
        rotates_pairs: Whether rows of query and key are stored so that each pair of neighbours is
            rotated; the Hub rotates the halves of a head against each other.
        own_keys: Keys that the architecture alone has, without its name; a file must have them.
        read: From the values of all keys, what `own_keys` say about the Hub's configuration.
        write: From a description, the values of `own_keys`.
        names: Further names of tensors, with `{}` for a layer number, and their names on the Hub.
        heads: From the Hub's name of a tensor and the configuration, the axis of the tensor along which
            heads lie in the file in another order, and the index in the file of each number along it;
            `None`: all lie as on the Hub.
        layouts: From a model, how parameters lie in a file, by their names in memory, where that is not
            as on the Hub; the `layouts` of the architecture tell that from a file.
        may_be_rotated: Whether its weights may be rotated.
        left_out: A key that counts blocks after the model's, which are never read.
    """

    config: Mapping[str, Any]
    sub_norms: tuple[str, str] = ("", "")
    is_ternary: bool = False
    rotates_pairs: bool = False
    own_keys: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _nothing
    write: Callable[[Any], Mapping[str, Any]] = _nothing
    names: Mapping[str, str] = field(default_factory=dict)
    heads: Callable[[str, Mapping[str, Any]], tuple[int, np.ndarray] | None] = _in_order
    layouts: Callable[[nn.Module], Mapping[str, StoredLayout]] = _as_on_hub
    may_be_rotated: bool = False
    left_out: str = ""


def _no_name(config: Any) -> str | None:
    return None


def _unknown(config: Any, ternary_dims: Sequence[int]) -> bool | None:
    return None


def _sample(config: Any) -> mx.array:
    """A fixed text `(1, 24)`, spread over the vocabulary, or a fixed picture `(1, H, W, C)`."""
    if not hasattr(config, "image_size"):
        return mx.array([[(7 + 7919 * n) % config.vocab_size for n in range(24)]], mx.int32)
    shape = (1, *config.image_size, config.input_channels)
    return mx.sin(mx.arange(math.prod(shape)) * 0.37).reshape(shape)


def _generation(config: Any) -> Pipeline:
    return "feature-extraction" if getattr(config, "is_embedder", False) else "text-generation"


def _itself(config: Any) -> Any:
    return config


class Published(NamedTuple):
    """A repository of the Hub, or several of a kind.

    Attributes:
        weights: The format of the weights, as text.
        compared_with: What small models in this format were compared with: the reference implementation,
            transformers, mlx-lm, timm, or the definition of the format.
    """

    weights: str
    compared_with: str


@dataclass(frozen=True)
class Architecture:
    """A kind of model, as `ARCHITECTURE` in a file of the package `models`.

    Only the first four attributes are needed. What the others leave out is refused by name where it is
    asked for.

    Attributes:
        name: Its `model_type` on the Hub.
        config: Describes a model.
        build: Makes a model of a description, with fresh weights, in its training variant.
        weight_names: Hub name to ours, `{}` a layer number; an entry that names a module covers all its
            tensors; `None` stands for a tensor that is stored but never used, `LeftOut` a part of the
            file, `Copy` and `OlderName` a second name of a tensor.
        newer_name: From the Hub name of a tensor and all names of its file, what the tensor is called in
            `weight_names`, for files whose names stood for others once.
        layouts: From a model, the shapes of the tensors of a file by their names, and the program that
            laid it out, `pt`, `mlx` or `None`, how parameters lie in it, by their names in memory, where
            that is not as on the Hub.
        packed_formats: The values of `quant_method`, and `affine`, in which ternary weights may be
            stored; for image models, all that there are.
        may_hold_masters: Float weights of such a checkpoint may be masters, without a word of it.
        is_ternarizable: Its dense models can be made ternary ones.
        why_no_base: Why its models are no base of a `hybrid`, whose attention other mixers replace, and
            no teacher of one; `None` if they can be.
        needs_range: Activations may go beyond float16, as the squares of ReLU do.
        mlx_lm: From a description and the input dims of its ternary linears, whether mlx-lm needs a file
            of this library to run the model: not where it knows the architecture; `None`: it cannot.
        name_in_mlx_lm: The `model_type` under which mlx-lm knows it, where that is another.
        within_mlx_lm: What names of modules begin with in mlx-lm, where its model is a part of another.
        transformers: From a description, why transformers does not run the model, `None` if it does.
            Left out: it has no such architecture.
        as_in_transformers: The same model in the terms of transformers, a description.
        gguf: By its names in GGUF files, what these say.
        gguf_name: From a description, the name under which it is written; `None` if there is none.
        sample: From a description, an input for `predictions` of the model, by which two copies are
            compared. Default: token ids, or a picture of the size that the model was made for.
        does: From a description, what the model does. Default: it continues texts, or embeds them.
        tiny: The `config.json` of a model of a few thousand weights, for tests.
        presets: By name, the `config.json` of published models, reduced to what decides the arithmetic.
        few_bit_sampling: From whether weights are rotated and whether answers begin with reasoning, how
            texts of models of it in 1 or 2 bits are sampled by their makers: values of `make_sampler`
            and `make_processors` by their names.
        published: Repositories of the Hub that are covered, and what is known of them. A name may list
            endings as `{1B,3B}`, and end with `*` where the list is long.

    Example:
        >>> architecture = find("hgrn_bit")
        >>> config = architecture.config.from_hub(dict(architecture.tiny))
        >>> type(architecture.build(config)).__name__
        'HGRNBit'
    """

    name: str
    config: type[Any]
    build: Callable[[Any], Any]
    weight_names: Mapping[str, str | None]
    newer_name: Callable[[str, Collection[str]], str] | None = None
    layouts: (
        Callable[[nn.Module, Mapping[str, tuple[int, ...]], str | None], Mapping[str, StoredLayout]]
        | None
    ) = None
    packed_formats: tuple[str, ...] = ("mmfree",)
    may_hold_masters: bool = False
    is_ternarizable: bool = False
    why_no_base: str | None = "its blocks differ from Llama's"
    needs_range: bool = False
    mlx_lm: Callable[[Any, Sequence[int]], bool | None] = _unknown
    name_in_mlx_lm: str = ""
    within_mlx_lm: str = ""
    transformers: Callable[[Any], str | None] | None = None
    as_in_transformers: Callable[[Any], Any] = _itself
    gguf: Mapping[str, GGUFFormat] = field(default_factory=dict)
    gguf_name: Callable[[Any], str | None] = _no_name
    sample: Callable[[Any], mx.array] = _sample
    does: Callable[[Any], Pipeline] = _generation
    tiny: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    few_bit_sampling: Callable[[bool, bool], Mapping[str, float]] | None = None
    published: Mapping[str, Published] = field(default_factory=dict)

    @property
    def repositories(self) -> dict[str, Published]:
        """The architectures of `published`, each by its own name."""
        return {each: known for name, known in self.published.items() for each in _listed(name)}

    def __post_init__(self) -> None:
        if self.variants:
            object.__setattr__(self, "packed_formats", PACKED_FORMATS)

    @property
    def variants(self) -> Mapping[str, Mapping[str, Any]]:
        """Of a family of images, its models by the names in timm's files; see `ImageConfig`."""
        return getattr(self.config, "variants", {})

    @property
    def can_be_ternary(self) -> bool:
        """True if its dense models can be made ternary ones: all image models can."""
        return self.is_ternarizable or bool(self.variants)

    def pipeline(self, config: Any) -> Pipeline:
        """The task of a model of this description: all image models classify."""
        return "image-classification" if self.variants else self.does(config)


_ENDINGS = re.compile(r"\{([^{}]*)\}")


def _listed(name: str) -> list[str]:
    """The names that a name with endings in braces stands for."""
    found = _ENDINGS.search(name)
    if found is None:
        return [name]
    before, after = name[: found.start()], name[found.end() :]
    return [each for ending in found[1].split(",") for each in _listed(before + ending + after)]


def architectures() -> dict[str, Architecture]:
    """Lists the architectures that can be loaded.

    Returns:
        All of them by name.

    Example:
        >>> "bitnet" in architectures()
        True
    """
    path = importlib.import_module("mlx_mmfree.models").__path__
    return _architectures(tuple(path), tuple(plugins.LOADED))


@cache
def _architectures(
    search: tuple[str, ...], loaded: tuple[plugins.Plugin, ...]
) -> dict[str, Architecture]:
    return plugins.records_of("models", "ARCHITECTURE", Architecture)


def known_model_types() -> list[str]:
    """Lists the names of the architectures that can be loaded.

    Returns:
        The values of `model_type`, sorted.

    Example:
        >>> "hgrn_bit" in known_model_types()
        True
    """
    return sorted(architectures())


def bases() -> list[str]:
    """The names of the architectures that can be the base of a hybrid, sorted."""
    return sorted(name for name, each in architectures().items() if each.why_no_base is None)


def find(model_type: object) -> Architecture:
    """Finds an architecture by its name.

    Args:
        model_type: The name, as `config.json` has it.

    Returns:
        The architecture.

    Raises:
        UnsupportedModelError: None has this name.

    Example:
        >>> find("bitnet").name
        'bitnet'
    """
    if isinstance(model_type, str) and model_type in architectures():
        return architectures()[model_type]
    raise UnsupportedModelError(
        f"[load] 'model_type' must be one of {', '.join(known_model_types())} but got "
        f"{model_type!r:.100}. This architecture is not implemented. "
        f"{plugins.of_mlx_lm(model_type)} {plugins.where_else()}"
    )


def find_described(config: Mapping[str, Any]) -> Architecture:
    """Finds the architecture of a `config.json`: by its `model_type`, or by timm's `architecture`.

    Args:
        config: What the file says.

    Returns:
        The architecture.

    Raises:
        UnsupportedModelError: There is none.

    Example:
        >>> find_described({"model_type": "bitnet"}).name
        'bitnet'
    """
    kind, name = config.get("model_type"), config.get("architecture")
    known = architectures()
    if isinstance(kind, str) and kind in known:
        return known[kind]
    if "model_type" in config or not isinstance(name, str):
        return find(kind)
    for architecture in known.values():
        if name in architecture.variants:
            return architecture
    raise UnsupportedModelError(
        f"[load] 'architecture' must be one of {', '.join(known_variants())} but got {name!r:.100}. "
        f"This architecture is not implemented. {plugins.where_else()}"
    )


def known_variants() -> list[str]:
    """The `architecture` values of image models that can be loaded, sorted."""
    return sorted(name for each in architectures().values() for name in each.variants)


def architecture_of(config: Config) -> Architecture:
    """Finds the architecture that a model's description belongs to.

    Args:
        config: The description, the attribute `config` of a model.

    Returns:
        The architecture.

    Raises:
        UnsupportedModelError: There is none.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> architecture_of(model.config).name
        'hgrn_bit'
    """
    return find_described(config.to_hub())


Model = TypeVar("Model", bound=nn.Module)


def draw_weights(model: Model, standard_deviation: float) -> Model:
    """Draws the weights of embeddings and linears from a normal distribution; returns the model.

    It is the last step of `build`, and the only one in which a model's operations are fused.
    """
    modules = dict(model.named_modules())
    for path, matrix in matrices(model).items():
        if matrix.holds_floats:
            layer = modules[path]
            layer.weight = mx.random.normal(layer.weight.shape, scale=standard_deviation)
    return fuse_operations(model)


_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
# the scale of a packed linear, a tensor beside its `weight`
_SCALE_ON_DISK, _SCALE_IN_MEMORY = "weight_scale", "scale"


Layer = tuple[int, ...]
"""The numbers of a layer in names on disk: its own, and before it the stage's if there are stages."""

_BLOCK = re.compile(r"(?:stages\.(?:\{\}|[0-9]+)\.)?blocks\.\{\}")


class WeightNames:
    """Translates names by the table `weight_names` of an architecture.

    An entry that names a tensor covers it; an entry that names a module covers every tensor inside.

    Args:
        table: Patterns on disk to patterns in memory. `{}` stands for a number, and `None` and `LeftOut`
            mark unused tensors. An entry may say any of its numbers as they are. `Copy` and `OlderName`
            mark second names, which `second_name` reads, and `Stacked` what `stack_of` reads.

    Attributes:
        stacked: Of the table, what is one tensor in memory with others.
    """

    def __init__(self, table: Mapping[str, str | None]):
        self._left_out = {hub: ours for hub, ours in table.items() if isinstance(ours, LeftOut)}
        table = {**table, **dict.fromkeys(self._left_out)}
        self.stacked = {hub: ours for hub, ours in table.items() if isinstance(ours, Stacked)}
        table = {hub: ours for hub, ours in table.items() if hub not in self.stacked}
        second = {hub: ours for hub, ours in table.items() if isinstance(ours, Copy | OlderName)}
        # a second name stands for nothing in the first table, where it covers what is in its module
        self._to_memory = {**table, **dict.fromkeys(second, "")}
        self._second = {**dict.fromkeys(table, ""), **second}
        self._to_disk = {
            ours: hub for hub, ours in table.items() if ours is not None and hub not in second
        }

    def in_layer(self, disk_name: str) -> tuple[Layer, str] | None:
        """The layer of a tensor or module and its name in the layer; `None` outside of layers."""
        for pattern in _layer_patterns(tuple(self._to_disk.items())):
            if found := pattern.fullmatch(disk_name):
                *numbers, rest = found.groups()
                return tuple(map(int, numbers)), rest
        return None

    def is_unused(self, disk_name: str) -> bool:
        """Returns whether the architecture stores the tensor but never uses it."""
        entry, _ = _translate(disk_name, self._to_memory)
        return entry is not None and self._to_memory[entry] is None

    def left_out(self, disk_name: str) -> str | None:
        """The part of the file that is never read and holds a tensor, as text; `None` if none does."""
        entry, _ = _translate(disk_name, self._left_out)
        return None if entry is None else self._left_out[entry]

    def to_memory(self, disk_name: str) -> str | None:
        """The name in memory; `None` if the table lacks the tensor or has it as unused or a copy."""
        return _translate(disk_name, self._to_memory, _SCALE_ON_DISK, _SCALE_IN_MEMORY)[1]

    def stack_of(self, disk_name: str) -> tuple[str, int] | None:
        """The name on disk of what a tensor is stacked in, and its index there; `None` for others."""
        _, name = _translate(disk_name, self.stacked)
        return None if name is None else (self.to_disk(name), int(_NUMBER.findall(disk_name)[-1]))

    def in_stack(self, disk_name: str) -> str | None:
        """The names of what is stacked in a tensor, with `{}` for their numbers; `None` for others."""
        patterns = {str(ours): hub for hub, ours in self.stacked.items()}
        return _translate(self.to_memory(disk_name) or "", patterns)[1]

    def second_name(self, disk_name: str) -> tuple[str, bool] | None:
        """The name in memory of a second name, and whether it is a copy; `None` for other names."""
        entry, name = _translate(disk_name, self._second, _SCALE_ON_DISK, _SCALE_IN_MEMORY)
        if name is None or entry is None:
            return None
        return name, isinstance(self._second[entry], Copy)

    def to_disk(self, memory_name: str) -> str:
        """The name on disk.

        Raises:
            KeyError: The table has no entry for it.
        """
        _, name = _translate(memory_name, self._to_disk, _SCALE_IN_MEMORY, _SCALE_ON_DISK)
        if name is None:
            raise KeyError(memory_name)
        return name

    def module_to_memory(self, disk_name: str) -> str | None:
        """The path in memory of a module with a weight; `None` if the table lacks it."""
        name = self.to_memory(f"{disk_name}.weight")
        return None if name is None else name.removesuffix(".weight")

    def has_module(self, path: str) -> bool:
        """Returns whether a module with a weight has a name on disk."""
        return _translate(f"{path}.weight", self._to_disk)[1] is not None

    def modules_to_disk(self, paths: Iterable[str]) -> dict[str, str]:
        """The names on disk of those modules with a weight that have one, by their paths."""
        names = {path: _translate(f"{path}.weight", self._to_disk)[1] for path in paths}
        return {path: name.removesuffix(".weight") for path, name in names.items() if name}

    def module_to_disk(self, path: str) -> str:
        """The name on disk of a module with a weight.

        Raises:
            KeyError: The table has no entry for it.
        """
        return self.to_disk(f"{path}.weight").removesuffix(".weight")


@lru_cache
def _layer_patterns(to_disk: tuple[tuple[str, str], ...]) -> list[re.Pattern[str]]:
    """The patterns of names on disk that lie in a layer, without repetitions."""
    heads: dict[str, None] = {}
    for ours, hub in to_disk:
        if found := _BLOCK.match(ours):
            parts = hub.split("{}")[: found.group().count("{}")]
            heads["([0-9]+)".join(map(re.escape, [*parts, ""]))] = None
    return [re.compile(head + r"\.(.+)") for head in heads]


@lru_cache(maxsize=4096)
def _templates(name: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The name with `{}` for some of its numbers, from all of them to none, and those numbers."""
    numbers = _NUMBER.findall(name)
    between = _NUMBER.split(name)
    found = []
    for are_free in product((True, False), repeat=len(numbers)):
        parts = ["{}" if p else n for p, n in zip(are_free, numbers, strict=True)]
        text = "".join(sum(zip(between, [*parts, ""], strict=True), ()))
        found.append((text, tuple(compress(numbers, are_free))))
    return tuple(found)


def _translate(
    name: str, table: Mapping[str, str | None], scale_from: str = "", scale_to: str = ""
) -> tuple[str | None, str | None]:
    """The longest entry that covers a name, and what it makes of the name; `None`: there is none."""
    split = [(pattern.split("."), numbers) for pattern, numbers in _templates(name)]
    for length in range(len(split[0][0]), 0, -1):
        for parts, numbers in split:
            entry = ".".join(parts[:length])
            if entry not in table:
                continue
            if not (target := table[entry]):
                return entry, None
            rest = parts[length:]
            if rest and rest[-1] == scale_from:
                rest[-1] = scale_to
            result = ".".join([target, *rest])
            for number in numbers:
                result = result.replace("{}", number, 1)
            return entry, result
    return None, None


def weight_names(config: Config) -> WeightNames:
    """The names for a model with this configuration."""
    return WeightNames(architecture_of(config).weight_names)


def layer_numbers(model: nn.Module, names: WeightNames) -> dict[Layer, int]:
    """The index of each layer of a model, counted from the first."""
    found = (names.in_layer(names.to_disk(name)) for name in parameters(model))
    layers = sorted({each[0] for each in found if each is not None})
    return {layer: number for number, layer in enumerate(layers)}
