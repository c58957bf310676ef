"""MLX's affine form of quantised linears and embeddings, as mlx-lm writes it.

A module `X` has `X.weight`, `uint32` with codes of 2 to 8 bits, and `X.scales` and `X.biases` with one
float for each group of inputs. The weight is `code * scale + bias`. Activations stay floats.
`config.json` describes the form under `quantization`. There, the name of a module may hold another form,
`false` for none, or `true` for the usual one. Ternary Bonsai uses 2 bits with codes below 3 and
`bias = -scale`.
"""

from collections.abc import Container, Mapping
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ....errors import CheckpointError, UnsupportedModelError
from ....layers.matrix import matrices
from ....ops.ternary import CODES_PER_WORD, packed_width
from ...names import WeightNames

METHOD = "affine"
TERNARY_BITS = 2
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
KEYS = ("weight", "scales", "biases")
"""Names of the tensors of a module."""

_FORM_KEYS = {"group_size", "bits", "mode"}


def form(group_size: int, bits: int) -> dict[str, Any]:
    """The description of a form in `config.json`."""
    return {"group_size": group_size, "bits": bits, "mode": METHOD}


def group_size_of(input_dims: int) -> int:
    """The largest group that divides a row after it was padded to a multiple of 32."""
    padded = packed_width(input_dims) * CODES_PER_WORD
    return next(size for size in reversed(GROUP_SIZES) if padded % size == 0)


def describe(model: nn.Module, names: WeightNames) -> dict[str, Any] | None:
    """The value of `quantization` for a model; `None` if no module has this form."""
    forms = {
        path: form(module.group_size, module.bits)
        for path, module in (
            (p, m.layer) for p, m in matrices(model).items() if m.storage == "codes"
        )
    }
    if not forms:
        return None
    usual = next(iter(forms.values()))
    others = {names.module_to_disk(path): own for path, own in forms.items() if own != usual}
    return {**usual, **others}


def check_form(described: Any) -> None:
    """Refuses modes, bits and group sizes that are not read.

    Raises:
        UnsupportedModelError: The form is not read.
    """
    forms = [described]
    if isinstance(described, Mapping):
        own = [value for key, value in described.items() if key not in _FORM_KEYS]
        forms += [value for value in own if not isinstance(value, bool)]
        forms[0] = {key: described[key] for key in _FORM_KEYS if key in described}
    for each in forms:
        if (
            not isinstance(each, Mapping)
            or set(each) - _FORM_KEYS
            or each.get("bits") not in BITS
            or isinstance(each["bits"], bool)
            or each.get("group_size") not in GROUP_SIZES
            or each.get("mode", METHOD) != METHOD
        ):
            raise UnsupportedModelError(
                f"[config.json] 'quantization' must be affine with {_listed(BITS)} bits and a group "
                f"size of {_listed(GROUP_SIZES)} but got {each!r:.200}. Use a checkpoint in such a form."
            )


def _sizes_of(name: str, described: Mapping[str, Any]) -> dict[str, int]:
    """The group size and bits of a module, by its name on disk, of a description that was checked."""
    own = described.get(name)
    given = own if isinstance(own, Mapping) else described
    # some writers of JSON give whole numbers a fraction of zero
    return {key: int(given[key]) for key in ("group_size", "bits")}


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def is_copy(described: Any, quantization: Any) -> bool:
    """Whether a `quantization_config` only repeats `quantization`, as mlx-lm writes it."""
    return quantization is not None and not (
        isinstance(described, Mapping) and "quant_method" in described
    )


def quantize_modules(
    model: nn.Module, names: WeightNames, tensors: Container[str], described: Mapping[str, Any]
) -> None:
    """Replaces the linears and the embedding that a checkpoint stores in this form.

    Args:
        model: The model, dense where modules may be replaced.
        names: Names on disk and in memory.
        tensors: The names of the checkpoint's tensors.
        described: The value of `quantization`.

    Raises:
        CheckpointError: A group does not divide the inputs of a module.
    """
    replaced: list[tuple[str, nn.Module]] = []
    for path, matrix in matrices(model).items():
        if not matrix.is_plain:
            continue
        name = names.module_to_disk(path)
        if f"{name}.scales" not in tensors:
            continue
        sizes: dict[str, Any] = _sizes_of(name, described)
        if matrix.input_dims % sizes["group_size"]:
            raise CheckpointError(
                f"[config.json] 'group_size' must divide the {matrix.input_dims} inputs of {name!r} but "
                f"got {sizes['group_size']}. Take config.json from the original checkpoint."
            )
        replaced.append((path, matrix.in_codes(**sizes)))
    model.update_modules(tree_unflatten(replaced))
