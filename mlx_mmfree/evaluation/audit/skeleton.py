"""Models of published shapes whose weights take no memory, since nothing computes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from ...arguments import did_you_mean
from ...errors import CheckpointError, UsageError
from ...files.reading import read_json_object
from ...hub.checkpoint.weight_format import code_format
from ...layers import pack_linears
from ...layers.matrix import fixed_dtype_names, matrices, parameters
from ...models import architectures, find
from ...models.parts.fields import dtype_name
from ...ops.device import FLOATS

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def presets() -> dict[str, Mapping[str, Any]]:
    """The configurations of published models by name, reduced to what decides the arithmetic."""
    found = (each.presets for each in architectures().values())
    return {name: config for named in found for name, config in named.items()}


def full_name(name: str) -> str:
    """The name of `presets()` that alone ends with this one's words, or this one."""
    found = [each for each in presets() if f"-{each}".endswith(f"-{name.lower()}")]
    return found[0] if len(found) == 1 and not Path(name).exists() else name


def read_config(caller: str, name: str) -> dict[str, Any]:
    """The configuration of this name, or in this file.

    Args:
        caller: The command that messages name.
        name: A name of `presets()`, as `full_name` completes it, or a `config.json`, or its folder.

    Raises:
        UsageError: There is none.
    """
    if (full := full_name(name).lower()) in presets():
        return dict(presets()[full])
    path = Path(name)
    if not path.exists():
        raise UsageError(
            f"[{caller}] 'config' must be one of {', '.join(sorted(presets()))} or a config.json but "
            f"got {name!r}.{did_you_mean(name, presets())}"
        )
    return read_json_object(path / "config.json" if path.is_dir() else path)


def skeleton(config: Mapping[str, Any], dtype: mx.Dtype | None = None) -> Any:
    """A model in its inference variant, whose weights MLX would only draw if they were asked for.

    Args:
        config: Configuration, as in a `config.json` of the Hub.
        dtype: Dtype of everything that is not packed; `None` takes the configuration's.

    Raises:
        CheckpointError: A value is missing, of the wrong type or out of bounds.
        UnsupportedModelError: The architecture is not supported.
    """
    architecture = find(config.get("model_type"))
    dtype = config_dtype(config) if dtype is None else dtype
    model = pack_linears(architecture.build(architecture.config.from_hub(config)))
    _take_codes(model, config)
    modules, fixed = dict(model.named_modules()), fixed_dtype_names(model)
    for name, array in parameters(model).items():
        if array.dtype in FLOATS and name not in fixed:
            path, _, key = name.rpartition(".")
            setattr(modules[path], key, array.astype(dtype))
    return model


def _take_codes(model: Any, config: Mapping[str, Any]) -> None:
    """Gives matrices of floats codes, if a configuration describes them."""
    format, codes = code_format()
    if (entry := config.get(format.section)) is None:
        return
    if format.check is not None:
        format.check(entry)
    coded = [
        (path, matrix.in_codes(*codes.sizes(path, entry)))
        for path, matrix in matrices(model).items()
        if matrix.is_plain
    ]
    model.update_modules(tree_unflatten(coded))


def config_dtype(config: Mapping[str, Any]) -> mx.Dtype:
    """The dtype that a configuration names, float32 where it names none."""
    name = dtype_name(config) or "float32"
    if name not in _DTYPES:
        raise CheckpointError(
            f"[config] 'dtype' must be one of {', '.join(_DTYPES)} but got {name!r}."
        )
    return _DTYPES[name]
