"""Mixers with a gated recurrence: MLGRU, HGRN, HGRN2, GLA and RetNet."""

from functools import partial

import mlx.core as mx
import pytest

from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.mixer import TokenMixer
from mlx_mmfree.ops import gated_linear_attention, linear_scan
from mlx_mmfree.token_mixers import GLA, HGRN, HGRN2, MLGRU, RetNet
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden
from tests.goldens.mixers.passing import passing
from tests.goldens.mixers.rounding import Watched, assert_close_rounded

CUTS = pytest.mark.parametrize("cut", [1, 4, 1000])
RECURRENT = {
    "input_proj": "i_proj",
    "forget_proj": "f_proj",
    "gate_proj": "g_proj",
    "output_proj": "o_proj",
}
HEADS = {
    "query_proj": "q_proj",
    "key_proj": "k_proj",
    "value_proj": "v_proj",
    "gate_proj": "g_proj",
    "output_proj": "o_proj",
    "output_norm": "g_norm_swish_gate",
}


def in_chunks(mixer: TokenMixer, x: mx.array, cut: int, **arguments: mx.array) -> mx.array:
    state, parts = None, []
    for start in range(0, x.shape[1], cut):
        y, state = mixer(x[:, start : start + cut], state, **arguments)
        parts.append(y)
    return mx.concatenate(parts, axis=1)


def check_bounded(mixer: TokenMixer, file: GoldenFile, cut: int) -> None:
    x = file.inputs["x"]
    assert_close(in_chunks(mixer, x, cut), file.out["y"])
    y = in_chunks(mixer, x, cut, lower_bound=file.inputs["lower_bound"])
    assert_close(y, file.out["y_lower_bound"])


@golden("mlgru__recurrence")
def test_mlgru_of_the_paper(file: GoldenFile) -> None:
    gates = file.inputs["f"]
    x = mx.concatenate(
        [file.inputs["c_pre"], mx.log(gates / (1.0 - gates)), file.inputs["g_pre"]], -1
    )
    dims = gates.shape[-1]
    mixer = MLGRU(3 * dims, hidden_dims=dims, output_gate="sigmoid")
    names = ("input_proj", "forget_proj", "gate_proj")
    passing(mixer, dict.fromkeys(names, dims), dims)
    assert_close(mixer(x)[0][..., :dims], file.out["gated"])
    state = None
    for n in range(x.shape[1]):
        y, state = mixer(x[:, n : n + 1], state)
        assert_close(y[:, 0, :dims], file.out["gated"][:, n])
        assert_close(state.hidden, file.out["h"][:, n])


@golden("mlgru__hgrn_bit_attention")
@pytest.mark.parametrize("name", ["y", "y_lower_bound", "y_left_padded"])
def test_mlgru_as_released(file: GoldenFile, name: str) -> None:
    hyper, weights = file.hyper, file.weights
    linear = partial(BitLinear, norm_eps=hyper["bitlinear_norm_eps"])
    mixer = MLGRU(hyper["hidden"], norm_eps=hyper["norm_eps"], linear=linear)
    fill(mixer, weights, RECURRENT | {"gate_norm": "g_norm"})
    for ours, theirs in RECURRENT.items():
        mixer[ours].norm.weight = weights[f"{theirs}.norm.weight"]
        mixer[ours] = Watched(mixer[ours])
    bound = file.inputs["lower_bound"] if name == "y_lower_bound" else None
    valid = file.inputs["attention_mask"].astype(mx.bool_) if name == "y_left_padded" else None
    y, _ = mixer(file.inputs["x"], None, valid, lower_bound=bound)
    assert_close_rounded(y, file.out[name], *(mixer[ours] for ours in RECURRENT))


@golden("hgrn__op")
def test_hgrn_op(file: GoldenFile) -> None:
    f, x, first = (file.inputs[name] for name in ("f", "x", "h0"))
    for name, state in (("zero_init", mx.zeros(first.shape)), ("h0", first)):
        states, last = linear_scan(f, x, state)
        assert_close(states, file.out[f"h_seq_{name}"])
        assert_close(last, file.out[f"h_last_{name}"])


@golden("hgrn2__op")
def test_hgrn2_op(file: GoldenFile) -> None:
    q, f, v = (file.inputs[name].swapaxes(1, 2) for name in "qfv")
    first = file.inputs["S0"]
    for end, state in (("", mx.zeros(first.shape)), ("_S0", first)):
        o, last = gated_linear_attention(q * q.shape[-1] ** -0.5, 1.0 - f, v, f, state)
        assert_close(o.swapaxes(1, 2), file.out[f"o{end}"])
        assert_close(last, file.out[f"S_last{end}"])


@golden("hgrn__layer")
@CUTS
def test_hgrn_layer(file: GoldenFile, cut: int) -> None:
    hyper = file.hyper
    dims, hidden = hyper["dims"], hyper["dims"] * hyper["expand_ratio"]
    mixer = HGRN(dims, hidden_dims=hidden, norm_eps=hyper["norm_eps"])
    fill(mixer, file.weights, RECURRENT | {"output_norm": "g_norm"})
    check_bounded(mixer, file, cut)


@golden("hgrn2__layer")
@CUTS
def test_hgrn2_layer(file: GoldenFile, cut: int) -> None:
    hyper = file.hyper
    heads = hyper["dims"] // hyper["expand_ratio"]
    mixer = HGRN2(hyper["dims"], num_heads=heads, norm_eps=hyper["norm_eps"])
    names = ("query_proj", "forget_proj", "input_proj", "output_proj")
    linears = {name: f"{name[0]}_proj" for name in names}
    fill(mixer, file.weights, linears | {"output_norm": "g_norm"})
    check_bounded(mixer, file, cut)


@golden("gla__layer")
@CUTS
def test_gla_layer(file: GoldenFile, cut: int) -> None:
    hyper = file.hyper
    rank, heads = hyper["gate_low_rank_dim"], hyper["num_heads"]
    mixer = GLA(hyper["dims"], num_heads=heads, gate_rank=rank, norm_eps=hyper["norm_eps"])
    gate = {"forget_down_proj": "gk_proj.0", "forget_proj": "gk_proj.1"}
    fill(mixer, file.weights, HEADS | gate)
    assert_close(in_chunks(mixer, file.inputs["x"], cut), file.out["y"])


@golden("retnet__layer")
@CUTS
def test_retnet_layer(file: GoldenFile, cut: int) -> None:
    hyper = file.hyper
    mixer = RetNet(hyper["dims"], num_heads=hyper["num_heads"], norm_eps=hyper["norm_eps"])
    fill(mixer, file.weights, HEADS)
    assert_close(in_chunks(mixer, file.inputs["x"], cut), file.out["y"])
