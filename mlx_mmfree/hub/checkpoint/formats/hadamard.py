"""PrismML's format of rotated weights, as Bonsai 2 is stored: MLX's affine format after a rotation.

`modules` in `config.json` lists what is packed, each with its `path`, whether it is an `embedding`, and
its `block`, the inputs that are rotated together. A module with a block has `.signs`, float32, beside
the tensors of MLX's affine format; one whose block is 0 is not rotated. A program that leaves the
rotation out gets results of the right shape that mean nothing. So a file with signs is refused unless
each of them is used, and each rotated module must have its own.

In GGUF files, the metadata under `prism.hadamard.` name the rotated matrices, the inputs that are
rotated together, and one vector of signs for each number of inputs. A matrix under
`inverse_weight_names` is an embedding, whose rows are rotated back. Whatever is missing or unknown is
refused.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ....files.tensors import TensorEntry
from ....layers.matrix import Matrix
from ....layers.rotated import RotatedEmbedding, RotatedLinear
from ....models.parts.architecture import GGUFFormat
from ....ops.dense_matmul import GROUP_SIZES
from ....ops.hadamard import MAX_BLOCK
from .. import weight_format
from ..gguf_config import hub_name
from ..rotated_floats import SIGNS
from .affine import BITS, format

SECTION = "modules"
_NONSENSE = "Without the rotation the model would write nonsense. Fetch the checkpoint again."


def check_modules(described: Any) -> None:
    """Refuses a list of modules that says something else than what is read.

    Raises:
        CheckpointError: It is not such a list.
        UnsupportedModelError: A module asks for something that is not implemented.
    """
    if not isinstance(described, list) or not described:
        raise CheckpointError(
            f"[config.json] '{SECTION}' must list the packed modules but got {described!r:.100}. "
            f"{_NONSENSE}"
        )
    seen: set[str] = set()
    for each in described:
        path = each.get("path") if isinstance(each, Mapping) else None
        if not isinstance(path, str) or path in seen:
            raise CheckpointError(
                f"[config.json] each of '{SECTION}' must have a 'path' of its own but got "
                f"{each!r:.100}. {_NONSENSE}"
            )
        seen.add(path)
        block = each.get("block")
        is_known = type(block) is int and (block == 0 or 2 <= block <= MAX_BLOCK)
        if not is_known or block & (block - 1):
            raise UnsupportedModelError(
                f"[config.json] the 'block' of the rotated {path!r:.100} must be 0 or a power of two up "
                f"to {MAX_BLOCK} but got {block!r:.40}. {_NONSENSE}"
            )
        if type(each.get("embedding")) is not bool or each.get("dtype", "float16") != "float16":
            raise UnsupportedModelError(
                f"[config.json] {path!r:.100} of '{SECTION}' must say whether it is an 'embedding', and "
                f"have the 'dtype' float16, but got {each!r:.150}. {_NONSENSE}"
            )


def _open(
    unread: Mapping[str, weight_format.UnreadMatrix],
) -> dict[str, weight_format.StoredMatrix]:
    by_name = {matrix.name: path for path, matrix in unread.items()}
    found: dict[str, weight_format.StoredMatrix] = {}
    if not unread:
        return found
    described: Any = next(iter(unread.values())).description
    rotated: set[str] = set()
    for each in described:
        name, block = each["path"], each["block"]
        if name not in by_name:
            raise CheckpointError(
                f"[config.json] {name!r:.100} of '{SECTION}' must be a linear or an embedding of the "
                f"model but is none. {_NONSENSE}"
            )
        path = by_name[name]
        if each["embedding"] != unread[path].matrix.is_embedding:
            raise CheckpointError(
                f"[config.json] 'embedding' of {name!r:.100} in '{SECTION}' must be "
                f"{unread[path].matrix.is_embedding} but is {each['embedding']}. {_NONSENSE}"
            )
        if block:
            rotated.add(name)
            found[path] = _stored(unread[path], block)
    for matrix in unread.values():
        if SIGNS in matrix.tensors and matrix.name not in rotated:
            raise CheckpointError(
                f"[load] {matrix.tensors[SIGNS].name!r:.100} must be absent, since '{SECTION}' of "
                "config.json has no rotation for it, but there are signs of a rotation. "
                f"{_NONSENSE}"
            )
    return found


def _stored(unread: weight_format.UnreadMatrix, block: int) -> weight_format.StoredMatrix:
    """A rotated matrix, with capacity for its codes and signs."""
    matrix, name, tensors, _ = unread
    dims = matrix.input_dims
    if SIGNS not in tensors:
        raise CheckpointError(
            f"[load] the signs of the rotated {name!r:.100} must be there as '{name:.100}.{SIGNS}' but "
            f"are missing. {_NONSENSE}"
        )
    weight, scales, signs = tensors.get("weight"), tensors.get("scales"), tensors[SIGNS]
    if signs.shape != (dims,):
        raise CheckpointError(
            f"[load] the signs {signs.name!r:.100} must be {dims}, one for each input, but have shape "
            f"{signs.shape}. {_NONSENSE}"
        )
    if dims % block or not matrix.is_plain or "bias" in matrix.layer:
        raise CheckpointError(
            f"[config.json] the 'block' of the rotated {name!r:.100} must divide its {dims} inputs, and "
            f"it must have no bias, but got {block}. {_NONSENSE}"
        )
    bits, group_size = _sizes(dims, weight, scales)
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise CheckpointError(
            f"[load] the rotated {name!r:.100} must be in MLX's affine format, with 'weight', 'scales' "
            f"and 'biases', but its tensors are not. {_NONSENSE}"
        )
    kind: type[RotatedLinear] = RotatedEmbedding if matrix.is_embedding else RotatedLinear
    sizes = (matrix.output_dims, dims) if matrix.is_embedding else (dims, matrix.output_dims)
    layer = kind(*sizes, group_size=group_size, bits=bits, block=block)
    read = _Signs(signs)
    return weight_format.StoredMatrix(
        layer, {SIGNS: weight_format.StoredTensor(((dims,),), (mx.float32,), read)}
    )


def _sizes(dims: int, weight: TensorEntry | None, scales: TensorEntry | None) -> tuple[int, int]:
    """Bits and group size, as the shapes tell them; 0 where they tell none."""
    if weight is None or scales is None or len(weight.shape) != 2 or len(scales.shape) != 2:
        return 0, 0
    words, groups = weight.shape[1] * 32, scales.shape[1]
    if words % dims or not groups or dims % groups:
        return 0, 0
    return words // dims, dims // groups


class _Signs:
    """Reads signs, and refuses other numbers."""

    def __init__(self, entry: TensorEntry):
        self._entry = entry

    def __call__(self, signs: mx.array) -> mx.array:
        wrong = mx.abs(signs) != 1
        if mx.any(wrong).item():
            index = mx.argmax(wrong).item()
            raise CheckpointError(
                f"[load] the signs {self._entry.name!r:.100} of a rotation must be 1 or -1 but number "
                f"{index} is {signs[index].item()}. {_NONSENSE}"
            )
        return signs


def _describe(matrices: Mapping[str, Matrix], config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = {name: each.layer for name, each in matrices.items() if each.is_rotated}
    if not rotated:
        return {}
    modules = [
        {"path": name, "embedding": each.is_embedding, "block": each.block, "dtype": "float16"}
        for name, each in rotated.items()
    ]
    first = next(iter(rotated.values()))
    return {"quantization": format(first.codes_group, first.bits), **config, SECTION: modules}


_MLX_LM_TYPE = "prism_hadamard_qwen35"
_MLX_LM_BLOCKS = (512, 1024, 2048, 4096, 8192)


def description_for_mlx_lm(
    config: Mapping[str, Any],
    rotated: Mapping[str, RotatedLinear],
    others: Mapping[str, tuple[int, int]],
) -> dict[str, Any]:
    """The `config.json` by which mlx-lm reads a model of Qwen3.5 with rotated weights.

    Args:
        config: What describes the model, without its format.
        rotated: The rotated matrices by their names on disk.
        others: Group sizes and bits of the matrices in MLX's affine format, by their names on disk.

    Raises:
        UnsupportedModelError: mlx-lm does not read such matrices.
    """
    usual = format(128, 2)
    for name, each in rotated.items():
        if (each.codes_group, each.bits) != (128, 2) or each.block not in _MLX_LM_BLOCKS:
            raise UnsupportedModelError(
                f"[convert] the rotated {name!r} must have codes of 2 bits in groups of 128, and blocks "
                f"from 512 to 8192, for mlx-lm, but has {each.bits} bits, groups of {each.codes_group} "
                f"and blocks of {each.block}. Give 'unrotate' (--unrotate)."
            )
    if wrong := [name for name, other in others.items() if format(*other) != usual]:
        raise UnsupportedModelError(
            f"[convert] {wrong[0]!r} must have the format {usual} beside rotated weights, for mlx-lm, "
            f"but has {format(*others[wrong[0]])}. Give 'unrotate' (--unrotate)."
        )
    blocks = {**dict.fromkeys(others, 0), **{name: each.block for name, each in rotated.items()}}
    embeddings = {name for name, each in rotated.items() if each.is_embedding}
    embeddings |= {name for name in others if name.endswith("embed_tokens")}
    return {
        "model_type": _MLX_LM_TYPE,
        "base_model_type": "qwen3_5",
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "gdn_activation_layout": "grouped",
        "quantization": usual,
        SECTION: [
            {"path": name, "embedding": name in embeddings, "block": block, "dtype": "float16"}
            for name, block in blocks.items()
        ],
        "text_config": dict(config),
    }


MARK = "prism.hadamard."
ROTATED_TYPE = "PQ2_0"
"""The type of rotated matrices: programs that would leave the rotation out do not know it."""
_FIXED = {
    "version": (1, 2),
    "transform": ("normalized-sylvester-walsh-hadamard",),
    "axis": ("input-last-dimension",),
    "sign_mode": ("explicit", "identity"),
}
_GROUPED = "gdn_v_grouped"
"""True if the inputs of `ssm_out` lie as on the Hub, where several heads of values share a key."""
_NAMES = ("weight_names", "inverse_weight_names")
_NUMBERS = ("sign_widths", "sign_values")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_TIED = "tied_output"
"""In version 2, and only there: the head is the rotated embedding, and the file has no other."""
_FOLDED = re.compile(
    r"output\.weight|blk\.[0-9]+\.(?:attn_(?:q|k|v|qkv|gate|output)|ffn_(?:gate|up|down)|ssm_out)\.weight",
    re.ASCII,
)
"""The matrices whose rotation PrismML's program knows."""
_NO_GGUF = "Without the right rotation the model would write nonsense. Fetch the file again."


def rotated_names(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in the file of the rotated matrices, embeddings among them."""
    return tuple(name for key in _NAMES for name in metadata.get(MARK + key, ()))


def check_rotation(metadata: Mapping[str, Any], format: GGUFFormat) -> None:
    """Refuses metadata of a rotation that are not those that are read.

    Raises:
        CheckpointError: Signs or names are missing or damaged.
        UnsupportedModelError: The rotation is another, or the architecture reads none.
    """
    given = {key.removeprefix(MARK): value for key, value in metadata.items() if _is_of(key)}
    if not given:
        return
    known = {*_FIXED, *_NAMES, *_NUMBERS, "block_size", _GROUPED, _TIED}
    if not format.may_be_rotated or given.keys() - known:
        key = next(iter(sorted(given.keys() - known) or sorted(given)))
        raise UnsupportedModelError(
            f"[GGUF] '{MARK}{key:.80}' must be absent: such a rotation of the weights is not read. "
            "Without it the model would write nonsense. Use another file."
        )
    for key, allowed in _FIXED.items():
        if given.get(key) not in allowed or isinstance(given[key], bool):
            raise UnsupportedModelError(
                f"[GGUF] '{MARK}{key}' of rotated weights must be "
                f"{' or '.join(map(repr, allowed))} but got {given.get(key)!r:.80}. {_NO_GGUF}"
            )
    is_tied = given["version"] == 2
    if given.get(_TIED, False) is not is_tied:
        raise CheckpointError(
            f"[GGUF] '{MARK}{_TIED}' of rotated weights must be {is_tied} in version {given['version']} "
            f"but got {given.get(_TIED)!r:.40}. {_NO_GGUF}"
        )
    block = given.get("block_size")
    if type(block) is not int or not 2 <= block <= MAX_BLOCK or block & (block - 1):
        raise CheckpointError(
            f"[GGUF] '{MARK}block_size' of rotated weights must be a power of two from 2 to {MAX_BLOCK} "
            f"but got {block!r:.40}. {_NO_GGUF}"
        )
    for key in _NAMES:
        names = given.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                f"[GGUF] '{MARK}{key}' of rotated weights must be a list of names but got "
                f"{names!r:.80}. {_NO_GGUF}"
            )
    if not given.get(_NAMES[0]):
        raise CheckpointError(
            f"[GGUF] '{MARK}{_NAMES[0]}' must name the rotated weights but names none. {_NO_GGUF}"
        )
    listed = rotated_names(metadata)
    if len(set(listed)) < len(listed):
        raise CheckpointError(
            f"[GGUF] '{MARK}{_NAMES[0]}' must name each rotated weight once but names some twice. "
            f"{_NO_GGUF}"
        )
    _check_grouping(metadata, given)
    if given["sign_mode"] == "explicit":
        _check_signs(given)


def _is_of(key: str) -> bool:
    return key.startswith(MARK)


def _check_grouping(metadata: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses an order of the inputs of `ssm_out` that is not known."""
    prefix = metadata.get("general.architecture")
    keys, values = (metadata.get(f"{prefix}.ssm.{k}") for k in ("group_count", "time_step_rank"))
    is_rotated = any(name.endswith(".ssm_out.weight") for name in given[_NAMES[0]])
    is_grouped = given.get(_GROUPED, False)
    if not isinstance(is_grouped, bool) or (is_rotated and keys != values and not is_grouped):
        raise UnsupportedModelError(
            f"[GGUF] '{MARK}{_GROUPED}' of rotated weights must be true or false, and true where "
            f"'ssm_out' is rotated and its {values} heads of values share {keys} of keys, but got "
            f"{given.get(_GROUPED)!r:.80}. {_NO_GGUF}"
        )


def _check_signs(given: Mapping[str, Any]) -> None:
    for key in _NUMBERS:
        numbers = given.get(key)
        if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
            raise CheckpointError(
                f"[GGUF] '{MARK}{key}' must hold the signs of the rotation, or how many there are, as "
                f"whole numbers but {'is missing' if numbers is None else 'does not'}. {_NO_GGUF}"
            )
    widths, values = given["sign_widths"], given["sign_values"]
    if min(widths, default=0) < 1 or len(set(widths)) < len(widths) or sum(widths) != len(values):
        raise CheckpointError(
            f"[GGUF] '{MARK}sign_values' must hold as many signs of the rotation as "
            f"'{MARK}sign_widths' has inputs, {sum(widths)}, but holds {len(values)}. {_NO_GGUF}"
        )
    if wrong := [value for value in values if value not in (1, -1)]:
        raise CheckpointError(
            f"[GGUF] '{MARK}sign_values', the signs of the rotation, must be 1 or -1 but one is "
            f"{wrong[0]}. {_NO_GGUF}"
        )


def rotation_of(
    file: Path,
    metadata: Mapping[str, Any],
    stored: Mapping[str, tuple[Path, weight_format.GGUFTensor]],
    format: GGUFFormat,
) -> tuple[dict[str, Any], list[TensorEntry]]:
    """The key of `config.json` that lists rotated modules, and their signs.

    Raises:
        CheckpointError: A rotated matrix is not in the file, or has no signs.
    """
    names = rotated_names(metadata)
    if not names:
        return {}, []
    if metadata.get(MARK + _TIED) and (_HEAD in stored or _EMBEDDING not in names):
        raise CheckpointError(
            f"[GGUF] '{file}' must hold no {_HEAD!r} and rotate {_EMBEDDING!r}, since '{MARK}{_TIED}' "
            f"says that its head is the rotated embedding, but does not. {_NO_GGUF}"
        )
    signs, block = _signs_by_width(metadata), metadata[f"{MARK}block_size"]
    embeddings = frozenset(metadata.get(MARK + _NAMES[1], ()))
    modules, entries = [], []
    for name in names:
        if name not in stored or len(stored[name][1].shape) != 2:
            raise CheckpointError(
                f"[GGUF] '{file}' must hold the rotated matrix {name!r:.100} but does not. {_NO_GGUF}"
            )
        width = stored[name][1].shape[1]
        if signs is not None and width not in signs:
            raise CheckpointError(
                f"[GGUF] '{MARK}sign_widths' must have signs of the rotation for the {width} inputs of "
                f"{name!r:.100} but has {sorted(signs)}. {_NO_GGUF}"
            )
        if width % block:
            raise CheckpointError(
                f"[GGUF] '{MARK}block_size' must divide the {width} inputs of the rotated {name!r:.100} "
                f"but is {block}. {_NO_GGUF}"
            )
        own = np.ones(width, np.float32) if signs is None else signs[width]
        module = hub_name(name, format).removesuffix(".weight")
        modules.append({"path": module, "embedding": name in embeddings, "block": block})
        entries.append(constant_entry(f"{module}.{SIGNS}", file, own))
    return {SECTION: modules}, entries


def rotation_metadata(
    layers: Mapping[str, RotatedLinear],
    signs: Mapping[str, np.ndarray],
    *,
    is_tied: bool,
    is_grouped: bool,
) -> dict[str, Any]:
    """The keys by which PrismML's program reads rotated weights; none without such weights.

    Args:
        layers: The rotated matrices by their names in the file.
        signs: The signs of each, by the same names.
        is_tied: Whether the head is the embedding.
        is_grouped: Whether inputs of a rotated matrix lie as on the Hub where other files sort them.

    Raises:
        UnsupportedModelError: GGUF cannot say how they are rotated.
    """
    if not layers:
        return {}
    by_width: dict[int, np.ndarray] = {}
    for name, own in signs.items():
        if not np.array_equal(by_width.setdefault(len(own), own), own):
            raise UnsupportedModelError(
                f"[convert] all matrices with {len(own)} inputs must be rotated by the same signs for "
                f"GGUF but {name!r} has others. Give 'unrotate' (--unrotate)."
            )
    embeddings = [name for name, layer in layers.items() if layer.is_embedding]
    linears = [name for name in layers if name not in embeddings]
    blocks = {layer.block for layer in layers.values()}
    unknown = [name for name in linears if not _FOLDED.fullmatch(name)]
    if unknown or len(blocks) > 1 or not linears:
        raise UnsupportedModelError(
            "[convert] rotated weights must be projections that PrismML's llama.cpp knows, with blocks "
            f"of one size, for GGUF, but got {', '.join(unknown or map(str, sorted(blocks)))}. Give "
            "'unrotate' (--unrotate)."
        )
    is_shared = is_tied and bool(embeddings)
    values = {
        "version": 2 if is_shared else 1,
        **({_TIED: True} if is_shared else {}),
        **({_GROUPED: True} if is_grouped else {}),
        **{key: _FIXED[key][0] for key in ("transform", "axis", "sign_mode")},
        "block_size": blocks.pop(),
        "weight_names": linears,
        **({"inverse_weight_names": embeddings} if embeddings else {}),
        "sign_widths": [np.int32(width) for width in by_width],
        "sign_values": [np.int32(sign) for own in by_width.values() for sign in own],
    }
    return {MARK + key: value for key, value in values.items()}


def _signs_by_width(metadata: Mapping[str, Any]) -> dict[int, np.ndarray] | None:
    """The signs for each number of inputs; `None`: all are 1."""
    if metadata[f"{MARK}sign_mode"] == "identity":
        return None
    widths = metadata[f"{MARK}sign_widths"]
    values = np.array(metadata[f"{MARK}sign_values"], np.float32)
    parts = np.split(values, np.cumsum(widths)[:-1])
    return dict(zip(widths, parts, strict=True))


def constant_entry(name: str, file: Path, values: np.ndarray) -> TensorEntry:
    """A tensor of float32 numbers that are known without reading the file."""
    decode = partial(_constant, values.view(np.uint32))
    return TensorEntry(name, file, mx.float32, values.shape, 0, 0, decode=decode)


def _constant(bits: np.ndarray, data: np.ndarray) -> np.ndarray:
    return bits


FORMAT = weight_format.WeightFormat(
    name="hadamard",
    open=_open,
    section=SECTION,
    check=check_modules,
    describe=_describe,
    precedes=True,
    rotated=weight_format.RotatedFormat(
        ("hadamard", "rotation", "rotated", "walsh"),
        ROTATED_TYPE,
        check_rotation,
        rotated_names,
        rotation_of,
        rotation_metadata,
        description_for_mlx_lm,
        _MLX_LM_TYPE,
    ),
    opens_in=("mlx-lm",),
    words="codes of 2 bits of rotated weights, with signs",
)
