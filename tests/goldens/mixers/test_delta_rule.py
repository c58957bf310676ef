"""The delta rule and the mixers whose state is led by it."""

import mlx.core as mx

from mlx_mmfree.ops import gated_delta_rule
from tests.goldens.mixers.files import GoldenFile, assert_close, golden


def heads(x: mx.array) -> mx.array:
    """`(B, T, H, ...)` as `(B, H, T, N)`, where one number of a head is a row of it."""
    x = x.swapaxes(1, 2)
    return x[..., None] if x.ndim == 3 else x


def unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def rule(arrays: dict[str, mx.array], state: mx.array, **options: mx.array):
    """What fla computes; value heads share the heads of keys."""
    many = arrays["v"].shape[2]
    q, k = (heads(mx.repeat(arrays[n], many // arrays[n].shape[2], axis=2)) for n in "qk")
    f = mx.exp(heads(arrays["g"])) if "g" in arrays else None
    scaled = q * q.shape[-1] ** -0.5
    o, last = gated_delta_rule(
        scaled, k, heads(arrays["v"]), heads(arrays["beta"]), f, state, **options
    )
    return o.swapaxes(1, 2), last


def rwkv(arrays: dict[str, mx.array], state: mx.array):
    r, w, k, v, a, b = (heads(arrays[name]) for name in "rwkvab")
    # what is read under a is added
    o, last = gated_delta_rule(r, k, v, None, mx.exp(w), state, removal=(a, -b))
    return o.swapaxes(1, 2), last


def check_gradients(file: GoldenFile, compute) -> None:
    given = {name: x for name, x in file.inputs.items() if f"d{name}" in file.out}

    def loss(given: dict[str, mx.array]) -> mx.array:
        o, last = compute({name: x for name, x in given.items() if name != "S0"}, given["S0"])
        return (o * file.inputs["do"]).sum() + (last * file.inputs["dS"]).sum()

    for name, gradient in mx.grad(loss)(given).items():
        assert_close(gradient, file.out[f"d{name}"])


@golden("delta_rule__op", "gated_delta_rule__op", "kda__op", "rwkv7__op")
def test_operations(file: GoldenFile) -> None:
    compute = rwkv if "r" in file.inputs else rule
    first = file.inputs["S0"]
    for end, state in (("", mx.zeros(first.shape)), ("_S0", first)):
        o, last = compute(file.inputs, state)
        assert_close(o, file.out[f"o{end}"])
        assert_close(last, file.out[f"S_last{end}"])
    if "S_mid_S0" in file.out:
        split = file.hyper["split"]
        part = {n: x[:, :split] for n, x in file.inputs.items() if n not in ("S0", "dS")}
        assert_close(compute(part, first)[1], file.out["S_mid_S0"])
    check_gradients(file, compute)


@golden("gated_delta_rule__grouped_l2norm")
def test_heads_that_share_keys_of_length_one(file: GoldenFile) -> None:
    def compute(arrays: dict[str, mx.array], state: mx.array, **options: mx.array):
        return rule(arrays | {n: unit(arrays[n]) for n in "qk"}, state, **options)

    first, valid = file.inputs["S0"], file.inputs["mask"]
    o, last = compute(file.inputs, first)
    assert_close(o, file.out["o"])
    assert_close(last, file.out["S_last"])
    o, last = compute(file.inputs, first, valid=valid)
    assert_close(mx.where(valid[..., None, None], o, 0.0), file.out["o_masked"])
    assert_close(last, file.out["S_last_masked"])
    check_gradients(file, compute)
