"""Tiny models that certificates are counted for, and what they are counted on."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import native
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.ops import use_backend

needs_graphs = pytest.mark.skipif(
    native.unavailable() is not None, reason="the compiled extension reads the graph"
)

BACKENDS = ("native", "reference")
"""The compiled kernels, and plain operations."""

TERNARY = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}


@contextmanager
def on(backend: str) -> Iterator[None]:
    """The best kernels of a CPU, or plain operations alone."""
    with nullcontext() if backend == "native" else use_backend(backend):
        yield


def tiny(model_type: str, *, is_packed: bool = True, **options: Any) -> Decoder:
    """A random model, packed or in its training variant."""
    mx.random.seed(4)
    architecture = find(model_type)
    config = architecture.config.from_hub({**architecture.tiny, **options})
    model: Decoder = architecture.build(config)
    if is_packed:
        pack_linears(model)
    mx.eval(model.parameters())
    return model
