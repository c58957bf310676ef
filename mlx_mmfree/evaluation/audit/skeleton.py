"""Models of published shapes whose weights take no memory, since nothing computes them."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...layers import pack_linears
from ...layers.matrix import kept_names, parameters
from ...models import find
from ...ops.float_dtypes import FLOATS
from ..benchmark_weights import config_dtype


def skeleton(config: Mapping[str, Any], dtype: mx.Dtype | None = None) -> Any:
    """A model in its inference form, whose weights MLX would only draw if they were asked for.

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
    modules, kept = dict(model.named_modules()), kept_names(model)
    for name, array in parameters(model).items():
        if array.dtype in FLOATS and name not in kept:
            path, _, key = name.rpartition(".")
            setattr(modules[path], key, array.astype(dtype))
    return model
