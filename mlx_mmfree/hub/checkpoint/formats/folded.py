"""Reads `hadamard_packing.json`, which says that the floats of a Hub folder were rotated.

PrismML's converter takes such a folder and writes a rotated GGUF file. The file names each rotated
tensor and its role: `fold-before-matmul` of a matrix whose input is rotated, `inverse-after-lookup` of
an embedding whose rows are rotated back. Signs are given for each number of inputs. In schema 3, the
head is the rotated embedding. The floats are held as `hub.checkpoint.rotated_floats` says.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ....files.checkpoint_files import PACKING_FILE
from ....files.reading import read_json_object
from ....files.tensors import TensorEntry
from ....models import find_described
from ....ops.device import FLOATS
from ....ops.hadamard import MAX_BLOCK
from .. import weight_format
from ..rotated_floats import SIGNS, without_rotated_floats
from .hadamard import SECTION, constant_entry

_NONSENSE = "Without the right rotation the model would write nonsense. Fetch the checkpoint again."
_LINEAR, _EMBEDDING = "fold-before-matmul", "inverse-after-lookup"
_FIXED = {
    "schema_version": (1, 2, 3),
    "kind": ("hadamard-weight-fold",),
    "status": ("requires-matching-runtime",),
}
_TRANSFORM = {
    "name": ("normalized-signed-sylvester-walsh-hadamard",),
    "sign_mode": ("explicit", "identity"),
}
_HEAD = "lm_head.weight"


def read_folded(
    folder: Path, config: dict[str, Any], tensors: dict[str, TensorEntry]
) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """A checkpoint as its files give it, with its rotation in the terms of the format `hadamard`.

    Args:
        folder: The folder.
        config: The content of its `config.json`.
        tensors: Its tensors by their names.

    Returns:
        Both as they are if the folder has no `hadamard_packing.json`.

    Raises:
        CheckpointError: The file is damaged, or does not belong to the tensors.
        UnsupportedModelError: It asks for another rotation.
    """
    if not (folder / PACKING_FILE).exists():
        return config, tensors
    described = read_json_object(folder / PACKING_FILE)
    _check_fixed(described, _FIXED)
    if SECTION in config:
        raise CheckpointError(
            f"[config.json] '{SECTION}' must be absent beside {PACKING_FILE} but both describe rotated "
            f"weights. {_NONSENSE}"
        )
    transform = described.get("transform")
    if not isinstance(transform, Mapping):
        raise _wrong("transform", "an object", transform)
    _check_fixed(transform, _TRANSFORM, " of 'transform'")
    block = transform.get("block_size")
    if type(block) is not int or not 2 <= block <= MAX_BLOCK or block & (block - 1):
        raise _wrong(
            "block_size", f"a power of two from 2 to {MAX_BLOCK}", block, " of 'transform'"
        )
    signs = _signs(described) if transform["sign_mode"] == "explicit" else None
    roles = _roles(described)
    newer = find_described(config).newer_name
    canonical = {newer(name, tensors) if newer else name: name for name in tensors}
    roles = {newer(name, tensors) if newer else name: role for name, role in roles.items()}
    _check_head(described, config, canonical, roles)
    found, modules = dict(tensors), list[Mapping[str, Any]]()
    for name, role in roles.items():
        entry = tensors.get(canonical.get(name, ""))
        if entry is None or len(entry.shape) != 2 or entry.dtype not in FLOATS:
            raise CheckpointError(
                f"[{PACKING_FILE}] 'tensors' must name matrices of floats in '{folder}' but "
                f"{name!r:.100} is none. {_NONSENSE}"
            )
        width = entry.shape[1]
        if width % block or (signs is not None and width not in signs):
            raise CheckpointError(
                f"[{PACKING_FILE}] 'block_size' must divide the {width} inputs of {name!r:.100}, and "
                f"'signs' must have signs for them, but got {block} and "
                f"{'no signs' if signs is None else sorted(signs)}. {_NONSENSE}"
            )
        own = np.ones(width, np.float32) if signs is None else signs[width]
        module = name.removesuffix(".weight")
        modules.append({"path": module, "embedding": role == _EMBEDDING, "block": block})
        del found[entry.name]
        entries = [replace(entry, name=name), constant_entry(f"{module}.{SIGNS}", entry.file, own)]
        found |= {each.name: each for each in entries}
    modules, found = without_rotated_floats(modules, found)
    return {**config, SECTION: modules} if modules else config, found


def _wrong(key: str, rule: str, got: object, where: str = "") -> CheckpointError:
    return CheckpointError(
        f"[{PACKING_FILE}] '{key}'{where} must be {rule} but got {got!r:.80}. {_NONSENSE}"
    )


def _check_fixed(
    given: Mapping[str, Any], rules: Mapping[str, tuple[Any, ...]], where: str = ""
) -> None:
    for key, allowed in rules.items():
        value = given.get(key)
        if isinstance(value, bool) or value not in allowed:
            raise UnsupportedModelError(
                f"[{PACKING_FILE}] '{key}'{where} must be {' or '.join(map(repr, allowed))} but got "
                f"{value!r:.80}. {_NONSENSE}"
            )


def _signs(described: Mapping[str, Any]) -> dict[int, np.ndarray]:
    given = described.get("signs")
    if not isinstance(given, Mapping) or not given:
        raise _wrong("signs", "an object of the signs for each number of inputs", given)
    found = {}
    for width, values in given.items():
        is_number = width.isascii() and width.isdecimal() and len(width) < 10
        is_list = isinstance(values, list) and all(type(v) is int and abs(v) == 1 for v in values)
        if not is_number or not is_list or len(values) != int(width):
            raise CheckpointError(
                f"[{PACKING_FILE}] 'signs' must hold, under each number of inputs, as many signs of 1 "
                f"or -1 but those under {width!r:.40} are not. {_NONSENSE}"
            )
        found[int(width)] = np.array(values, np.float32)
    return found


def _roles(described: Mapping[str, Any]) -> dict[str, str]:
    """The role of each rotated tensor by its name."""
    records = described.get("tensors")
    if not isinstance(records, list) or not records:
        raise _wrong("tensors", "a list of the rotated tensors", records)
    roles: dict[str, str] = {}
    for record in records:
        name = record.get("name") if isinstance(record, Mapping) else None
        if not isinstance(name, str) or not name.endswith(".weight") or name in roles:
            raise _wrong(
                "tensors", "objects with the 'name' of a weight each, no name twice", record
            )
        if type(record.get("axis")) is not int or record["axis"] != -1:
            raise _wrong("axis", "-1", record.get("axis"), f" of {name!r:.100}")
        roles[name] = record.get("role", _LINEAR)
        if roles[name] not in (_LINEAR, _EMBEDDING):
            raise _wrong("role", f"{_LINEAR} or {_EMBEDDING}", roles[name], f" of {name!r:.100}")
    return roles


def _check_head(
    described: Mapping[str, Any],
    config: Mapping[str, Any],
    canonical: Mapping[str, str],
    roles: Mapping[str, str],
) -> None:
    """Refuses a head whose rotation the schema leaves open."""
    inner = config.get("text_config")
    is_tied = (inner if isinstance(inner, Mapping) else config).get("tie_word_embeddings")
    is_tied = config.get("tie_word_embeddings") if is_tied is None else is_tied
    wanted, given = described["schema_version"] == 3, described.get("tied_output", False)
    if given is not wanted:
        raise CheckpointError(
            f"[{PACKING_FILE}] 'tied_output' must be {str(wanted).lower()} in schema "
            f"{described['schema_version']} but got {given!r:.40}. {_NONSENSE}"
        )
    has_head = _HEAD in canonical or _HEAD in roles
    has_embedding = _EMBEDDING in roles.values()
    if wanted and (has_head or not has_embedding or is_tied is False):
        raise CheckpointError(
            f"[{PACKING_FILE}] 'tied_output' must come with a rotated embedding, with "
            f"'tie_word_embeddings' in config.json, and without {_HEAD!r}, but does not. {_NONSENSE}"
        )
    if has_embedding and not wanted and not has_head:
        raise CheckpointError(
            f"[{PACKING_FILE}] 'schema_version' must be 3, with 'tied_output', where the rotated "
            f"embedding is the head too, but got {described['schema_version']}. {_NONSENSE}"
        )


def _none(
    unread: Mapping[str, weight_format.UnreadMatrix],
) -> dict[str, weight_format.StoredMatrix]:
    # the matrices have other formats once the file was read
    return {}


FORMAT = weight_format.WeightFormat(name="folded", open=_none, open_folder=read_folded)
