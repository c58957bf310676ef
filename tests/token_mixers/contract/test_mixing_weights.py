"""Weights that are shown, times the values, are what a mixer computes, for every mixer with weights.

What lies around them, its values and what follows, is written down here for each mixer once more.
"""

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import pytest
from _pytest.mark import ParameterSet

from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.linear import merge_heads, split_heads
from mlx_mmfree.layers.mixer import TokenMixer
from mlx_mmfree.ops.activations import gelu, silu
from mlx_mmfree.token_mixers import MLPMixer
from tests.token_mixers.contract.cases import (
    CROSS,
    DIMS,
    SMOOTH,
    Case,
    assert_equal,
    beside,
    by_case,
    rounds_keys,
    sequence,
)

Finish = Callable[[Any, mx.array, mx.array], mx.array]
"""Called with a mixer, its input and its weights `(B, H, L, N)`; gives its output."""


def _mixed(mixer: Any, x: mx.array, weights: mx.array, name: str = "value_proj") -> mx.array:
    """Weights times the values of each head, `(B, H, L, V)`."""
    heads = getattr(mixer, "num_kv_heads", mixer.num_heads)
    values = split_heads(mixer[name](x), heads)
    return weights @ mx.repeat(values, mixer.num_heads // heads, axis=1)


def _heads(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    y = _mixed(mixer, x, weights)
    y = mixer.head_norm(y) if "head_norm" in mixer else y
    y = merge_heads(y)
    y = mixer.output_norm(y) if "output_norm" in mixer else y
    return mixer.output_proj(y)


def _normed_input(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    return _heads(mixer, mixer.input_norm(x) if "input_norm" in mixer else x, weights)


def _channels(weights: mx.array, values: mx.array) -> mx.array:
    """Weights of each channel times its values `(B, L, E)`."""
    return (weights @ values.swapaxes(1, 2)[..., None])[..., 0].swapaxes(1, 2)


def _gated_heads(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    y = mixer.output_norm(_mixed(mixer, x, weights).swapaxes(1, 2)).flatten(2)
    return mixer.output_proj(y * silu(mixer.gate_proj(x)))


def _hgrn2(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    y = merge_heads(_mixed(mixer, x, weights, "input_proj"))
    return mixer.output_proj(mixer.output_norm(y))


def _hgrn(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    y = mixer.output_norm(_channels(weights, silu(mixer.input_proj(x))))
    return mixer.output_proj(y * silu(mixer.gate_proj(x)))


def _mlgru(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    state, context = mixer.init_state(x.shape[0], x.dtype), Context()
    if mixer.prepares:
        x, state = mixer.prepare(x, state, context)
    i, _, g = mixer.apart(mixer.project(x))
    if "input_conv" in mixer:
        i, _ = mixer.input_conv(i, state.convolutions[0], context)
    h = _channels(weights, silu(i))
    if "gate_norm" in mixer:
        return mixer.output_proj(mixer.gate_norm(g) * silu(h))
    return mixer.output_proj(mx.sigmoid(g) * h)


def _gru(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    """The candidates follow from the states before them, which are sums of earlier candidates."""
    names = ("reset_proj", "update_proj", "candidate_proj")
    of_reset, _, of_candidate = (mixer[name](x) for name in names)
    hidden, candidates = mx.zeros_like(of_reset[:, 0]), []
    for n in range(x.shape[1]):
        reset = mx.sigmoid(of_reset[:, n] + mixer.hidden_reset_proj(hidden))
        if mixer._resets_before:
            inner = mixer.hidden_candidate_proj(reset * hidden)
        else:
            inner = reset * mixer.hidden_candidate_proj(hidden)
        candidates.append(mx.tanh(of_candidate[:, n] + inner))
        seen = weights[:, :, n : n + 1, : n + 1]
        hidden = _channels(seen, mx.stack(candidates, axis=1))[:, 0]
    return mixer.output_proj(_channels(weights, mx.stack(candidates, axis=1)))


def _hydra(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    return mixer.output_proj(_channels(weights, mixer.value_proj(x)))


def _mlp_mixer(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    """The biases alone give what no token adds."""
    length = x.shape[1]
    columns = mx.pad(x, [(0, 0), (0, mixer._max_length - length), (0, 0)]).swapaxes(1, 2)
    z = mixer.up_length_proj(columns)
    # gelu(z) / z times the bias
    shares = gelu(z) / z * mixer.up_length_proj.bias
    return _channels(weights, x) + mixer.down_length_proj(shares).swapaxes(1, 2)[:, :length]


def _gmlp(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    u, v = mx.split(gelu(mixer.input_proj(x)), 2, axis=-1)
    values = split_heads(mixer.gate_norm(v), mixer.num_heads)
    bias = mixer.spatial_bias[:, : x.shape[1], None]
    s = merge_heads(weights[:, : mixer.num_heads] @ values + bias)
    if weights.shape[1] > mixer.num_heads:
        s = s + mixer.attention_proj(weights[:, -1] @ mixer.value_proj(x))
    return mixer.output_proj(u * s)


def _longformer(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    is_global = mx.arange(x.shape[1]) < mixer._num_global
    own, of_global = (_mixed(mixer, x, weights, n) for n in ("value_proj", "global_value_proj"))
    return mixer.output_proj(merge_heads(mx.where(is_global[:, None], of_global, own)))


def _linformer(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    missing = mixer._max_length - x.shape[1]
    columns = mx.pad(mixer.value_proj(x), [(0, 0), (0, missing), (0, 0)]).swapaxes(1, 2)
    values = mixer.value_length_proj(columns).swapaxes(1, 2)
    return mixer.output_proj(merge_heads(weights @ split_heads(values, mixer.num_heads)))


def _fnet(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    over_dims = mx.fft.fft(x, axis=2)
    return weights[:, 0] @ over_dims.real + weights[:, 1] @ over_dims.imag


def _sima(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    y = _heads(mixer, x, weights)
    return mx.where((mx.arange(x.shape[1]) == 0)[:, None], y, x) if mixer._class_only else y


def _delta_rule(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    before = mixer.init_state(x.shape[0], x.dtype)
    q, k, v, *_ = mixer.apart(mixer.project(x))
    (_, _, values), _ = mixer.convolved(q, k, v, before, Context())
    y = mixer.output_norm((weights @ values).swapaxes(1, 2)).flatten(2)
    if "gate_down_proj" in mixer:
        y = y * mx.sigmoid(mixer.gate_proj(mixer.gate_down_proj(x)))
    elif "gate_proj" in mixer:
        y = y * silu(mixer.gate_proj(x))
    return mixer.output_proj(y)


def _mamba2(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    before = mixer.init_state(x.shape[0], x.dtype).convolution
    z, channels, steps = mixer.apart(mixer.project(x))
    (_, _, values, _), _ = mixer._heads(channels, steps, before, Context())
    return mixer.output_proj(mixer._normed(weights @ values, z))


def _rwkv7(mixer: Any, x: mx.array, weights: mx.array) -> mx.array:
    before = mixer.init_state(x.shape[0], x.dtype).shift
    (r, k, values, *_), gate, _ = mixer._inner(x, before, Context())
    own = (r * k * mixer.bonus[:, None]).sum(axis=-1, keepdims=True) * values
    return mixer.output_proj(mixer._normed(weights @ values, own) * gate)


FINISH: dict[str, Finish] = {
    "DeltaNet": _delta_rule,
    "GatedDeltaNet": _delta_rule,
    "KDA": _delta_rule,
    "Mamba2": _mamba2,
    "RWKV7": _rwkv7,
    "FNet": _fnet,
    "GLA": _gated_heads,
    "GMLP": _gmlp,
    "GRU": _gru,
    "HGRN": _hgrn,
    "HGRN2": _hgrn2,
    "Hydra": _hydra,
    "Linformer": _linformer,
    "Longformer": _longformer,
    "MLGRU": _mlgru,
    "MLPMixer": _mlp_mixer,
    "Pooling": lambda mixer, x, weights: weights[:, 0] @ x,
    "ReLUAttention": _normed_input,
    "RetNet": _gated_heads,
    "SimA": _sima,
}

OF_CHANNELS = ("GRU", "HGRN", "Hydra", "MLGRU", "MLPMixer")


def _has_weights(case: Case) -> bool:
    # a ternary MLPMixer norms columns; keys in few bits come with values that are rounded
    is_exact = case[:2] != ("MLPMixer", "ternary") and not rounds_keys(case)
    return is_exact and case.kind.mixing_weights is not TokenMixer.mixing_weights


def _shown(cases: Iterable[ParameterSet]) -> list[ParameterSet]:
    return [case for case in cases if _has_weights(case.values[0])]


@by_case(_shown(SMOOTH))
def test_weights_times_values_are_the_result(case: Case) -> None:
    mixer, x = case.build(), sequence()
    if "empty_values" in mixer:
        # weights are for tokens alone
        mixer.empty_values = mx.zeros_like(mixer.empty_values)
    weights = mixer.mixing_weights(x)
    assert weights.shape[2] == x.shape[1] and weights.dtype == mx.float32
    assert mixer.weighs_channels == (case.name in OF_CHANNELS)
    if mixer.is_causal:
        assert mx.array_equal(weights, mx.tril(weights))
    assert_equal(FINISH.get(case.name, _heads)(mixer, x, weights), mixer(x)[0])


@by_case(_shown(CROSS))
def test_weights_of_a_second_sequence(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    memory = beside(mixer)["memory"]
    weights = mixer.mixing_weights(x, memory=memory)
    finish = FINISH.get(case.name, _heads)
    assert_equal(finish(mixer, memory, weights), mixer(x, memory=memory)[0])


def test_a_lower_bound_decides_what_is_forgotten() -> None:
    for name in ("MLGRU", "HGRN", "HGRN2"):
        mixer, x, bound = Case(name, "dense", {}).mixer, sequence(), mx.full((DIMS,), 0.9)
        weights = mixer.mixing_weights(x, lower_bound=bound)
        got = FINISH[name](mixer, x, weights)
        assert_equal(got, mixer(x, lower_bound=bound)[0])


def test_mixers_without_weights_say_so() -> None:
    ternary = Case("MLPMixer", "ternary", {}).mixer
    assert isinstance(ternary, MLPMixer)
    with pytest.raises(ValueError, match=r"^\[MLPMixer\] has no weights .* norm what they read\.$"):
        ternary.mixing_weights(sequence())

    class Plain(TokenMixer):
        pass

    with pytest.raises(ValueError, match=r"^\[Plain\] has no weights between positions"):
        Plain().mixing_weights(sequence())
