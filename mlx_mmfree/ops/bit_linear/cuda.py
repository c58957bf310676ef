"""`bit_linear` on an NVIDIA GPU in plain operations, with dense products for its gradient."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx

from . import Options, Projection
from .dense_gradient import defined, with_dense_gradient
from .metal_form import Form


def run(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    form = Form.of(options)
    y: mx.array = _function(form)(*form.flat(x, projections, options.norm, options.residual))
    return y


@cache
def _function(form: Form) -> Callable[..., Any]:
    return with_dense_gradient(partial(defined, form), form)
