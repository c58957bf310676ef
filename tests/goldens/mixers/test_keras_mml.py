"""Keras-MML: its layers are options of this library's.

What its kernels hold as `[in, out]` is `[out, in]` here, and gates that it keeps in one matrix stand in
another order.
"""

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.norms import PlacedRMSNorm
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.token_mixers import MLGRU
from tests.goldens.mixers.files import GoldenFile, assert_close, golden
from tests.goldens.mixers.rounding import Watched, assert_close_rounded

EPS = 1e-24
Weights = dict[str, mx.array]


def _ternary(weights: Weights, prefix: str, order: list[int] | None = None) -> Watched:
    """A `DenseMML`, its outputs in another order of equal parts."""
    kernel, bias, gain = (weights[f"{prefix}{name}"] for name in ("kernel", "bias", "gain"))
    if order is not None:
        kernel, bias = (_reordered(part, order) for part in (kernel, bias))
    if gain.ndim > 1:
        layer = BitLinear(*kernel.shape, bias=True)
        norm = PlacedRMSNorm(gain.shape[1], max_length=gain.shape[0])
        norm.weight = gain
        watched = Watched(layer, norm)
    else:
        layer = BitLinear(*kernel.shape, bias=True, norm_eps=EPS)
        layer.norm.weight = gain
        watched = Watched(layer)
    layer.weight, layer.bias = kernel.T, bias
    return watched


def _dense(weights: Weights, prefix: str) -> nn.Linear:
    layer = nn.Linear(*weights[f"{prefix}kernel"].shape)
    layer.weight, layer.bias = weights[f"{prefix}kernel"].T, weights[f"{prefix}bias"]
    return layer


def _reordered(x: mx.array, order: list[int]) -> mx.array:
    parts = mx.split(x, len(order), axis=-1)
    return mx.concatenate([parts[n] for n in order], axis=-1)


def _made(layers: dict[str, Any]) -> dict[str, Any]:
    """Makers that give these projections, whatever sizes they are asked for."""
    return {name: lambda *_, layer=layer, **__: layer for name, layer in layers.items()}


def _mixer(weights: Weights, dims: int, hidden: int, is_full: bool, prefix: str = "") -> MLGRU:
    if is_full:
        # f, c, g
        layers: dict[str, Any] = {
            "gates_proj": _ternary(weights, f"{prefix}in.", [1, 0, 2]),
            "output_proj": _ternary(weights, f"{prefix}out."),
        }
    else:
        layers = {
            "recurrence_proj": _ternary(weights, f"{prefix}in.", [1, 0]),
            "gate_proj": _dense(weights, f"{prefix}data_gate."),
            "output_proj": _dense(weights, f"{prefix}out."),
        }
    return MLGRU(
        dims,
        hidden_dims=hidden,
        bias=True,
        stacking="all" if is_full else "recurrence",
        output_gate="sigmoid",
        linear=_made(layers),
    )


def _feed_forward(weights: Weights, dims: int, hidden: int, prefix: str = "") -> SwiGLU:
    layers = {
        "gate_up_proj": _ternary(weights, f"{prefix}gate_up."),
        "down_proj": _ternary(weights, f"{prefix}down."),
    }
    return SwiGLU(dims, hidden_dims=hidden, is_stacked=True, bias=True, linear=_made(layers))


def _watched(module: nn.Module) -> list[Watched]:
    return [part for part in module.modules() if isinstance(part, Watched)]


@golden("keras_mml__dense")
def test_dense(file: GoldenFile) -> None:
    x = file.inputs["x"]
    layer = _ternary(file.weights, "")
    assert_close_rounded(layer(x), file.out["y"], layer)


@golden("bitlinear__matmulfreellm")
def test_bit_linear(file: GoldenFile) -> None:
    hyper, weights = file.hyper, file.weights
    layer = BitLinear(hyper["in_features"], hyper["out_features"], norm_eps=hyper["norm_eps"])
    layer.weight, layer.norm.weight = weights["weight"], weights["norm.weight"]
    watched = Watched(layer)
    assert_close_rounded(watched(file.inputs["x"]), file.out["y"], watched)


@golden("keras_mml__rms_norm")
def test_norm(file: GoldenFile) -> None:
    length, dims = file.weights["gain"].shape
    norm = PlacedRMSNorm(dims, max_length=length)
    norm.weight = file.weights["gain"]
    assert_close(norm(file.inputs["x"]), file.out["y"])


@golden("keras_mml__grumml_fully", "keras_mml__grumml_partial", "keras_mml__attention")
def test_recurrence(file: GoldenFile) -> None:
    hyper, x = file.hyper, file.inputs["x"]
    units = hyper["units"] if "units" in hyper else hyper["out_dim"]
    for cut in (1, x.shape[1]):
        mixer = _mixer(file.weights, x.shape[-1], units, hyper["fully_mml"])
        state, parts = None, []
        for start in range(0, x.shape[1], cut):
            y, state = mixer(x[:, start : start + cut], state)
            parts.append(y)
        y = mx.concatenate(parts, axis=1)
        assert_close_rounded(y, file.out["y"], *_watched(mixer))


@golden("keras_mml__swiglu")
def test_feed_forward(file: GoldenFile) -> None:
    x = file.inputs["x"]
    mixer = _feed_forward(file.weights, x.shape[-1], file.hyper["intermediate"])
    assert_close_rounded(mixer(x), file.out["y"], *_watched(mixer))


@golden("keras_mml__transformer_block")
def test_transformer_block(file: GoldenFile) -> None:
    hyper, weights, x = file.hyper, file.weights, file.inputs["x"]
    dims = hyper["embedding_dim"]
    block = Block(
        dims,
        _mixer(weights, dims, dims, hyper["fully_mml"], "attn."),
        _feed_forward(weights, dims, hyper["ffn_dim"], "ffn."),
        norm=partial(PlacedRMSNorm, max_length=x.shape[1]),
        norm_eps=EPS,
        norm_order="post",
    )
    block.token_norm.weight = weights["norm1.gain"]
    block.channel_norm.weight = weights["norm2.gain"]
    assert_close_rounded(block(x)[0], file.out["y"], *_watched(block))
