"""PrismML's form of rotated weights, as Bonsai 2 is stored: MLX's affine form behind a rotation.

`modules` in `config.json` lists what is packed, each with its `path`, whether it is an `embedding`, and
its `block`, the inputs that are rotated together. A module with a block has `.signs`, float32, beside
the tensors of MLX's affine form; one whose block is 0 is not rotated. A program that leaves the rotation
out gets results of the right shape that mean nothing. So a file with signs is refused unless each of
them is used, and each rotated module must have its own.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ....errors import CheckpointError, UnsupportedModelError
from ....files.tensors import TensorEntry
from ....layers.matrix import Matrix
from ....layers.rotated import RotatedEmbedding, RotatedLinear
from ....ops.hadamard import MAX_BLOCK
from ..weight_form import Place, StoredMatrix, StoredTensor, WeightForm
from .affine import BITS, GROUP_SIZES, form

SECTION = "modules"
SIGNS = "signs"
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


def _open(places: Mapping[str, Place]) -> dict[str, StoredMatrix]:
    by_name = {place.name: path for path, place in places.items()}
    found: dict[str, StoredMatrix] = {}
    if not places:
        return found
    described: Any = next(iter(places.values())).said
    rotated: set[str] = set()
    for each in described:
        name, block = each["path"], each["block"]
        if name not in by_name:
            raise CheckpointError(
                f"[config.json] {name!r:.100} of '{SECTION}' must be a linear or an embedding of the "
                f"model but is none. {_NONSENSE}"
            )
        path = by_name[name]
        if each["embedding"] != places[path].matrix.is_embedding:
            raise CheckpointError(
                f"[config.json] 'embedding' of {name!r:.100} in '{SECTION}' must be "
                f"{places[path].matrix.is_embedding} but is {each['embedding']}. {_NONSENSE}"
            )
        if block:
            rotated.add(name)
            found[path] = _stored(places[path], block)
    for place in places.values():
        if SIGNS in place.tensors and place.name not in rotated:
            raise CheckpointError(
                f"[load] {place.tensors[SIGNS].name!r:.100} must be absent, since '{SECTION}' of "
                "config.json has no rotation for it, but there are signs of a rotation. "
                f"{_NONSENSE}"
            )
    return found


def _stored(place: Place, block: int) -> StoredMatrix:
    """A rotated matrix, with room for its codes and signs."""
    matrix, name, tensors, _ = place
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
            f"[load] the rotated {name!r:.100} must be in MLX's affine form, with 'weight', 'scales' "
            f"and 'biases', but its tensors are not. {_NONSENSE}"
        )
    kind: type[RotatedLinear] = RotatedEmbedding if matrix.is_embedding else RotatedLinear
    sizes = (matrix.output_dims, dims) if matrix.is_embedding else (dims, matrix.output_dims)
    layer = kind(*sizes, group_size=group_size, bits=bits, block=block)
    read = _Signs(signs)
    return StoredMatrix(layer, {SIGNS: StoredTensor(((dims,),), (mx.float32,), read)})


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
            place = mx.argmax(wrong).item()
            raise CheckpointError(
                f"[load] the signs {self._entry.name!r:.100} of a rotation must be 1 or -1 but number "
                f"{place} is {signs[place].item()}. {_NONSENSE}"
            )
        return signs


def _describe(held: Mapping[str, Matrix], config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = {name: each.layer for name, each in held.items() if each.is_rotated}
    if not rotated:
        return {}
    modules = [
        {"path": name, "embedding": each.is_embedding, "block": each.block, "dtype": "float16"}
        for name, each in rotated.items()
    ]
    first = next(iter(rotated.values()))
    return {"quantization": form(first.codes_group, first.bits), **config, SECTION: modules}


_MLX_LM_BLOCKS = (512, 1024, 2048, 4096, 8192)


def description_for_mlx_lm(
    config: Mapping[str, Any],
    rotated: Mapping[str, RotatedLinear],
    others: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The keys of `config.json` by which mlx-lm reads a model of Qwen3.5 with rotated weights.

    Args:
        config: What describes the model, without its form.
        rotated: The rotated matrices by their names on disk.
        others: The forms of the matrices in MLX's affine form, by their names on disk.

    Raises:
        UnsupportedModelError: mlx-lm does not read such matrices.
    """
    usual = form(128, 2)
    for name, each in rotated.items():
        if (each.codes_group, each.bits) != (128, 2) or each.block not in _MLX_LM_BLOCKS:
            raise UnsupportedModelError(
                f"[convert] the rotated {name!r} must have codes of 2 bits in groups of 128, and blocks "
                f"from 512 to 8192, for mlx-lm, but has {each.bits} bits, groups of {each.codes_group} "
                f"and blocks of {each.block}. Give 'unrotate' (--unrotate)."
            )
    if wrong := [name for name, other in others.items() if dict(other) != usual]:
        raise UnsupportedModelError(
            f"[convert] {wrong[0]!r} must have the form {usual} beside rotated weights, for mlx-lm, but "
            f"has {dict(others[wrong[0]])}. Give 'unrotate' (--unrotate)."
        )
    blocks = {**dict.fromkeys(others, 0), **{name: each.block for name, each in rotated.items()}}
    embeddings = {name for name, each in rotated.items() if each.is_embedding}
    embeddings |= {name for name in others if name.endswith("embed_tokens")}
    return {
        "model_type": "prism_hadamard_qwen35",
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


FORM = WeightForm(
    name="hadamard",
    open=_open,
    section=SECTION,
    check=check_modules,
    describe=_describe,
    precedes=True,
    opens_in=("mlx-lm",),
    words="codes of 2 bits of rotated weights, with signs",
)
