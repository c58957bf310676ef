"""What the metadata of a GGUF file say of rotated weights, as PrismML writes them for Bonsai 2.

The keys under `prism.hadamard.` name the rotated matrices, the inputs that are rotated together, and one
vector of signs for each number of inputs. A matrix under `inverse_weight_names` is an embedding, whose
rows are rotated back. Whatever is missing or unknown is refused, since a program that leaves the
rotation out, or takes another, writes nonsense.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...files.gguf_file import StoredTensor
from ...files.tensors import TensorEntry
from ...layers.rotated import RotatedLinear
from ...models.parts.architecture import GGUFForm
from .forms.hadamard import SECTION, SIGNS
from .gguf_config import hub_name

MARK = "prism.hadamard."
ROTATED_KIND = "PQ2_0"
"""The type of rotated matrices: programs that would leave the rotation out do not know it."""
_FIXED = {
    "version": (1, 2),
    "transform": ("normalized-sylvester-walsh-hadamard",),
    "axis": ("input-last-dimension",),
    "sign_mode": ("explicit", "identity"),
    "gdn_v_grouped": (True,),
}
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
_NONSENSE = "Without the right rotation the model would write nonsense. Fetch the file again."


def rotated_names(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in the file of the rotated matrices, embeddings among them."""
    return tuple(name for key in _NAMES for name in metadata.get(MARK + key, ()))


def check_rotation(metadata: Mapping[str, Any], form: GGUFForm) -> None:
    """Refuses metadata of a rotation that are not those that are read.

    Raises:
        CheckpointError: Signs or names are missing or damaged.
        UnsupportedModelError: The rotation is another, or the architecture reads none.
    """
    given = {key.removeprefix(MARK): value for key, value in metadata.items() if _is_of(key)}
    if not given:
        return
    known = {*_FIXED, *_NAMES, *_NUMBERS, "block_size", _TIED}
    if not form.may_be_rotated or given.keys() - known:
        key = next(iter(sorted(given.keys() - known) or sorted(given)))
        raise UnsupportedModelError(
            f"[GGUF] '{MARK}{key:.80}' must be absent: such a rotation of the weights is not read. "
            "Without it the model would write nonsense. Use another file."
        )
    for key, allowed in _FIXED.items():
        if given.get(key) not in allowed or isinstance(given[key], bool) != (allowed == (True,)):
            raise UnsupportedModelError(
                f"[GGUF] '{MARK}{key}' of rotated weights must be "
                f"{' or '.join(map(repr, allowed))} but got {given.get(key)!r:.80}. {_NONSENSE}"
            )
    is_tied = given["version"] == 2
    if given.get(_TIED, False) is not is_tied:
        raise CheckpointError(
            f"[GGUF] '{MARK}{_TIED}' of rotated weights must be {is_tied} in version {given['version']} "
            f"but got {given.get(_TIED)!r:.40}. {_NONSENSE}"
        )
    block = given.get("block_size")
    if type(block) is not int:
        raise CheckpointError(
            f"[GGUF] '{MARK}block_size' of rotated weights must be a whole number but got "
            f"{block!r:.40}. {_NONSENSE}"
        )
    for key in _NAMES:
        names = given.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                f"[GGUF] '{MARK}{key}' of rotated weights must be a list of names but got "
                f"{names!r:.80}. {_NONSENSE}"
            )
    if not given.get(_NAMES[0]):
        raise CheckpointError(
            f"[GGUF] '{MARK}{_NAMES[0]}' must name the rotated weights but names none. {_NONSENSE}"
        )
    listed = rotated_names(metadata)
    if len(set(listed)) < len(listed):
        raise CheckpointError(
            f"[GGUF] '{MARK}{_NAMES[0]}' must name each rotated weight once but names some twice. "
            f"{_NONSENSE}"
        )
    if given["sign_mode"] == "explicit":
        _check_signs(given)


def _is_of(key: str) -> bool:
    return key.startswith(MARK)


def _check_signs(given: Mapping[str, Any]) -> None:
    for key in _NUMBERS:
        numbers = given.get(key)
        if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
            raise CheckpointError(
                f"[GGUF] '{MARK}{key}' must hold the signs of the rotation, or how many there are, as "
                f"whole numbers but {'is missing' if numbers is None else 'does not'}. {_NONSENSE}"
            )
    widths, values = given["sign_widths"], given["sign_values"]
    if min(widths, default=0) < 1 or len(set(widths)) < len(widths) or sum(widths) != len(values):
        raise CheckpointError(
            f"[GGUF] '{MARK}sign_values' must hold as many signs of the rotation as "
            f"'{MARK}sign_widths' has inputs, {sum(widths)}, but holds {len(values)}. {_NONSENSE}"
        )
    if wrong := [value for value in values if value not in (1, -1)]:
        raise CheckpointError(
            f"[GGUF] '{MARK}sign_values', the signs of the rotation, must be 1 or -1 but one is "
            f"{wrong[0]}. {_NONSENSE}"
        )


def rotation_of(
    file: Path,
    metadata: Mapping[str, Any],
    stored: Mapping[str, tuple[Path, StoredTensor]],
    form: GGUFForm,
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
            f"says that its head is the rotated embedding, but does not. {_NONSENSE}"
        )
    signs = _signs(metadata)
    embeddings = frozenset(metadata.get(MARK + _NAMES[1], ()))
    modules, entries = [], []
    for name in names:
        if name not in stored or len(stored[name][1].shape) != 2:
            raise CheckpointError(
                f"[GGUF] '{file}' must hold the rotated matrix {name!r:.100} but does not. {_NONSENSE}"
            )
        width = stored[name][1].shape[1]
        if signs is not None and width not in signs:
            raise CheckpointError(
                f"[GGUF] '{MARK}sign_widths' must have signs of the rotation for the {width} inputs of "
                f"{name!r:.100} but has {sorted(signs)}. {_NONSENSE}"
            )
        own = np.ones(width, np.float32) if signs is None else signs[width]
        module = hub_name(name, form).removesuffix(".weight")
        modules.append(
            {
                "path": module,
                "embedding": name in embeddings,
                "block": metadata[f"{MARK}block_size"],
            }
        )
        decode = partial(_constant, own.view(np.uint32))
        entry = TensorEntry(f"{module}.{SIGNS}", file, mx.float32, (width,), 0, 0, decode=decode)
        entries.append(entry)
    return {SECTION: modules}, entries


def rotation_metadata(
    layers: Mapping[str, RotatedLinear], signs: Mapping[str, np.ndarray], *, is_tied: bool
) -> dict[str, Any]:
    """The keys by which PrismML's program reads rotated weights; none without such weights.

    Args:
        layers: The rotated matrices by their names in the file.
        signs: The signs of each, by the same names.
        is_tied: Whether the head is the embedding.

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
        **{key: _FIXED[key][0] for key in ("transform", "axis", "sign_mode", "gdn_v_grouped")},
        "block_size": blocks.pop(),
        "weight_names": linears,
        **({"inverse_weight_names": embeddings} if embeddings else {}),
        "sign_widths": [np.int32(width) for width in by_width],
        "sign_values": [np.int32(sign) for own in by_width.values() for sign in own],
    }
    return {MARK + key: value for key, value in values.items()}


def _signs(metadata: Mapping[str, Any]) -> dict[int, np.ndarray] | None:
    """The signs for each number of inputs; `None`: all are 1."""
    if metadata[f"{MARK}sign_mode"] == "identity":
        return None
    widths = metadata[f"{MARK}sign_widths"]
    values = np.array(metadata[f"{MARK}sign_values"], np.float32)
    parts = np.split(values, np.cumsum(widths)[:-1])
    return dict(zip(widths, parts, strict=True))


def _constant(bits: np.ndarray, data: np.ndarray) -> np.ndarray:
    return bits
