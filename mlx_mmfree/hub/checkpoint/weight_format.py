"""The formats in which checkpoints store weights: a record for each, which the rest of the library asks.

Each file of the folder `formats`, or on its search path, has such a record as `FORMAT`.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...errors import UnsupportedModelError
from ...files import plugins
from ...files.gguf_file import StoredTensor as GGUFTensor
from ...files.tensors import TensorEntry, TensorSpec
from ...layers.matrix import Matrix
from ...layers.rotated import RotatedLinear
from ...models.parts.architecture import GGUFFormat

PACKED_DTYPES = (mx.uint8, mx.uint32)
"""The dtypes of packed weights, in all formats that are read."""

WRITER_KEY = "mlx_mmfree"
"""The key under which `config.json` describes its writer, see `hub.checkpoint.checkpoint`."""

_SECTION = "quantization_config"


@dataclass(frozen=True)
class StoredTensor:
    """How a parameter is stored.

    Attributes:
        shapes: The shapes that the tensor may have.
        dtypes: The dtypes that it may have.
        read: Turns the tensor into the parameter.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]
    read: Callable[[mx.array], mx.array]


class UnreadMatrix(NamedTuple):
    """A matrix of a model whose weights are not read yet.

    Attributes:
        matrix: The matrix in its training variant.
        name: The name of its module on disk.
        tensors: The tensors of the module, by what follows its name.
        description: The entry of `config.json` about the format; empty if there is none.
    """

    matrix: Matrix
    name: str
    tensors: Mapping[str, TensorEntry]
    description: Mapping[str, Any]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix that a checkpoint stores in some format.

    Attributes:
        layer: Replaces the layer in the model. It holds the parameters, and multiplies: with scales for
            the matrix, for its rows or for groups, or after it has rotated its input.
        tensors: How its parameters are stored where that differs from how it holds them, by their names.
        copies: Names of further tensors, which repeat what the others say.
        entries: By the names of parameters, what replaces all tensors of the module, where one
            parameter is made of several of them.
    """

    layer: nn.Module
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    entries: Mapping[str, TensorEntry] = field(default_factory=dict)


class WrittenMatrix(NamedTuple):
    """How a ternary matrix is written.

    Attributes:
        specs: The names, dtypes and shapes of its tensors.
        make: Makes them of its words in the layout of `ops.ternary` and its float32 scale.
        repeats_scale: Whether the scale is only in rounded copies, and needs a file of its own.
        codes: Where it is written `InCodes`, or mlx-lm reads it as such, the inputs of a group and the
            bits of a code.
    """

    specs: tuple[TensorSpec, ...]
    make: Callable[[mx.array, mx.array], Sequence[mx.array]]
    repeats_scale: bool = False
    codes: tuple[int, int] | None = None


class InCodes(NamedTuple):
    """How codes are stored that have a scale and a bias for each group of inputs.

    Attributes:
        specs: From the name, the outputs and the inputs of a matrix, the inputs of a group, the bits of
            a code, and the dtype of floats, the tensors for its codes, scales and biases.
        describe: From the inputs of a group and the bits of a code of each module, by its name on disk,
            the keys of `config.json` to add.
        sizes: From the name of a module and a description that was checked, these two numbers.
    """

    specs: Callable[[str, int, int, int, int, mx.Dtype], tuple[TensorSpec, ...]]
    describe: Callable[[Mapping[str, tuple[int, int]]], Mapping[str, Any]]
    sizes: Callable[[str, Mapping[str, Any]], tuple[int, int]]


class GGUFMatrix(NamedTuple):
    """A tensor of a GGUF file that holds a matrix.

    Attributes:
        file: The file.
        tensor: The tensor.
        name: What the Hub calls it.
        order: The stored row of each row of the Hub's matrix; `None` if they lie in one order.
        is_ternary: Whether it holds the trits of a linear whose activations have 8 bits.
    """

    file: Path
    tensor: GGUFTensor
    name: str
    order: np.ndarray | None = None
    is_ternary: bool = False

    def entry(
        self,
        name: str,
        dtype: mx.Dtype,
        shape: tuple[int, ...],
        decode: Callable[..., np.ndarray] | None = None,
    ) -> TensorEntry:
        """A tensor of the Hub that is made of this one's bytes, the keyword `data` of `decode`."""
        offsets = (self.tensor.start, self.tensor.stop)
        return TensorEntry(name, self.file, dtype, shape, *offsets, decode=decode)

    def entry_of_rows(
        self, name: str, dtype: mx.Dtype, shape: tuple[int, ...], decode: Callable[..., np.ndarray]
    ) -> TensorEntry:
        """Like `entry`, with the rows in the order of the Hub."""
        return self.entry(name, dtype, shape, partial(_in_order, decode, self.order))


def _in_order(
    decode: Callable[..., np.ndarray], order: np.ndarray | None, data: np.ndarray
) -> np.ndarray:
    rows = decode(data=data)
    return rows if order is None else rows[order]


class InGGUF(NamedTuple):
    """How GGUF files store matrices that take a format when they are read.

    Attributes:
        open: The tensors that the format has for a matrix of a file; none if it has another format.
        describe: From such matrices by the names of their modules on the Hub, and the names of the
            linears that have another format, the keys of `config.json` to add.
    """

    open: Callable[[GGUFMatrix], list[TensorEntry]]
    describe: Callable[[Mapping[str, GGUFTensor], Sequence[str]], Mapping[str, Any]]


class RotatedFormat(NamedTuple):
    """How `config.json` tells other programs that matrices are rotated.

    Attributes:
        keywords: Words in the keys of a `config.json` that ask for a rotation.
        gguf_type: The type of rotated matrices in GGUF: programs that would leave the rotation out do
            not know it.
        check: Refuses metadata of a GGUF file whose rotation is not read, or not in this architecture.
        names: From these metadata, the names in the file of the rotated matrices.
        open: From a GGUF file, its metadata, its tensors by their names, each with its file, and its
            architecture, the keys of `config.json` to add, and further tensors.
        gguf_metadata: From the rotated layers by their names in the file, their signs, and `is_tied`,
            whether the head is the embedding, the metadata.
        for_mlx_lm: From what `config.json` says of the model, the rotated layers by their names on disk,
            and the numbers that `InCodes.describe` takes of the other matrices, the `config.json` by
            which mlx-lm reads the model.
        mlx_lm_type: The `model_type` there, the only one with rotated matrices.
    """

    keywords: tuple[str, ...]
    gguf_type: str
    check: Callable[[Mapping[str, Any], GGUFFormat], None]
    names: Callable[[Mapping[str, Any]], tuple[str, ...]]
    open: Callable[
        [Path, Mapping[str, Any], Mapping[str, tuple[Path, GGUFTensor]], GGUFFormat],
        tuple[dict[str, Any], list[TensorEntry]],
    ]
    gguf_metadata: Callable[..., dict[str, Any]]
    for_mlx_lm: Callable[
        [Mapping[str, Any], Mapping[str, RotatedLinear], Mapping[str, tuple[int, int]]],
        dict[str, Any],
    ]
    mlx_lm_type: str


def always(description: Any) -> bool:
    """Accepts every description."""
    return True


def _no_entries(matrices: Mapping[str, Matrix], config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


def _as_it_is(described: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(described or {})


Opened = tuple[dict[str, Any], dict[str, TensorEntry]]
"""The content of `config.json`, and tensors by their names."""


@dataclass(frozen=True)
class WeightFormat:
    """A format in which checkpoints store matrices, as `FORMAT` in a file of the folder `formats`.

    Only `name` and `open` are needed.

    Attributes:
        name: Its name, which architectures list in `packed_formats`, unless `own` has a `quant_method`.
        open: From the unread matrices by their paths, the ones that are stored in this format.
        section: The key of `config.json` that describes it.
        own: The entries that each description has, which tell the format from others.
        check: Refuses a description that asks for something that is not read.
        is_for_all: Whether matrices of every architecture may have it.
        is_usual: Whether tensors that no description speaks of may have it.
        covers: From a description, whether all ternary linears have this format.
        precedes: Whether it is asked before the others, since its matrices look like another format's.
        simplify: From a loaded matrix, a layer of this format that computes the same with fewer bits;
            `None` if there is none.
        describe: From the matrices of a model by their names on disk, and its `config.json` so far, the
            keys to add; none if no matrix has the format.
        write: From the name, the outputs and the inputs of a ternary matrix, and the dtype of floats,
            how it is written.
        describe_written: Turns the `quantization_config` of float masters into the one of the ternary
            matrices that `write` writes.
        codes: How it holds `InCodes`, if it does.
        gguf: How it is stored `InGGUF`, if it is.
        open_folder: From a folder, its `config.json` and its tensors, both in the terms of other
            variants, where a file of its own says how matrices are stored.
        rotated: Its `RotatedFormat`, if its matrices are rotated.
        trits_per_byte: How many ternary weights share a byte, where that is not 4.
        rows: What the outputs of a matrix that it writes must be a multiple of.
        opens_in: The programs that open it beside this library.
        words: How weights are stored, for a model card, where that is not the usual way.
        method: Its name in `quant_method`, which is made of the others.
    """

    name: str
    open: Callable[[Mapping[str, UnreadMatrix]], Mapping[str, StoredMatrix]]
    section: str = _SECTION
    own: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Any], None] | None = None
    is_for_all: bool = False
    is_usual: bool = False
    covers: Callable[[Mapping[str, Any]], bool] | None = None
    precedes: bool = False
    simplify: Callable[[Matrix], nn.Module | None] | None = None
    describe: Callable[[Mapping[str, Matrix], Mapping[str, Any]], Mapping[str, Any]] = _no_entries
    write: Callable[[str, int, int, mx.Dtype], WrittenMatrix] | None = None
    describe_written: Callable[[Mapping[str, Any] | None], dict[str, Any]] = _as_it_is
    codes: InCodes | None = None
    gguf: InGGUF | None = None
    open_folder: Callable[[Path, dict[str, Any], dict[str, TensorEntry]], Opened] | None = None
    rotated: RotatedFormat | None = None
    trits_per_byte: int = 4
    rows: int = 1
    opens_in: tuple[str, ...] = ()
    words: str = ""
    method: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", self.own.get("quant_method", self.name))


def weight_formats() -> dict[str, WeightFormat]:
    """All formats by their names."""
    path = importlib.import_module(f"{__package__}.formats").__path__
    return _weight_formats(tuple(path), tuple(plugins.LOADED))


def code_format() -> tuple[WeightFormat, InCodes]:
    """The format that holds `InCodes`, and how."""
    return next(
        (format, format.codes) for format in weight_formats().values() if format.codes is not None
    )


def rotated_format() -> RotatedFormat:
    """How rotated matrices are described."""
    formats = weight_formats().values()
    return next(format.rotated for format in formats if format.rotated is not None)


@cache
def _weight_formats(
    search: tuple[str, ...], loaded: tuple[plugins.Plugin, ...]
) -> dict[str, WeightFormat]:
    return plugins.records_of("weight_formats", "FORMAT", WeightFormat)


def formats_of(config: Mapping[str, Any]) -> dict[str, tuple[WeightFormat, Mapping[str, Any]]]:
    """The formats that a `config.json` names, by their names, with what it says of each.

    Nothing is checked but which formats they are.
    """
    found: dict[str, tuple[WeightFormat, Mapping[str, Any]]] = {}
    for format in weight_formats().values():
        description = config.get(format.section)
        if format.section != _SECTION and description is not None:
            found[format.name] = format, description
    description = config.get(_SECTION)
    if isinstance(description, Mapping) and "quant_method" in description:
        named = [
            format
            for format in weight_formats().values()
            if format.method == description["quant_method"]
        ]
        # of formats with one method, the one of which most is reported
        named.sort(key=lambda format: (-len(format.own.keys() & description), len(format.own)))
        found |= {
            format.name: (format, description) for format in named[:1] if format.section == _SECTION
        }
    return found


def described_formats(
    config: Mapping[str, Any], read: Sequence[str]
) -> list[tuple[WeightFormat, Mapping[str, Any]]]:
    """The formats in which a checkpoint may store its matrices, with what `config.json` says of each.

    Args:
        config: The content of `config.json`.
        read: The `packed_formats` that the architecture reads.

    Raises:
        UnsupportedModelError: The weights are stored in a way that is not read.
    """
    found = formats_of(config)
    quantization = config.get("quantization")
    keys = [*config, *(quantization if isinstance(quantization, Mapping) else ())]
    formats = weight_formats().values()
    usual = next(format for format in formats if format.is_usual)
    keywords = {
        keyword for format in formats if format.rotated for keyword in format.rotated.keywords
    }
    rotated = [key for key in keys if any(keyword in key.lower() for keyword in keywords)]
    if rotated and not any(format.rotated for format, _ in found.values()):
        raise UnsupportedModelError(
            f"[config.json] {rotated[0]!r:.80} must be absent, or come with 'modules' that say which "
            "weights are rotated: without the rotation the model would write nonsense. Use a checkpoint "
            "in a format that is read."
        )
    is_own = any(format.method == usual.method for format, _ in found.values())
    for format, own_section in found.values():
        if format.section != _SECTION:
            if not (is_own or format.is_for_all or format.method in read):
                raise UnsupportedModelError(
                    f"[config.json] {format.section!r} must be absent for this architecture but is "
                    "given. Load the checkpoint that it was made from."
                )
            if format.check is not None:
                format.check(own_section)
    description: Any = config.get(_SECTION)
    packed = next((format for format, _ in found.values() if format.section == _SECTION), usual)
    # mlx-lm writes its own section twice
    is_copy = bool(found) and not (
        isinstance(description, Mapping) and "quant_method" in description
    )
    if description is not None and not is_copy:
        named = dict(description) if isinstance(description, Mapping) else {}
        is_read = packed.method in read and packed.method == named.get("quant_method")
        if not is_read or any(named.get(key) != value for key, value in packed.own.items()):
            known = packed if packed.method == usual.method else usual
            others = "".join(
                f", with 'quant_method' {name}" for name in read if name != usual.method
            )
            raise UnsupportedModelError(
                f"[config.json] 'quantization_config' must be {dict(known.own)}{others}, or absent for "
                f"this architecture but got {description!r:.200}. Load the checkpoint that it was made "
                f"from. {plugins.where_else()}"
            )
        if packed.check is not None:
            packed.check(description)
    rest = [each for each in found.values() if each[0] is not packed]
    return [(packed, description if isinstance(description, Mapping) else {}), *rest]
