"""A product with a float matrix is found, however it is written."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.evaluation.audit import certify, products
from mlx_mmfree.evaluation.audit.record import record
from mlx_mmfree.evaluation.audit.section import verdict
from mlx_mmfree.layers import PackedBitLinear
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.native import sources
from mlx_mmfree.ops import ternarize
from mlx_mmfree.ops.backend.dispatch import operations
from tests.evaluation.audit_models import BACKENDS, needs_graphs, on, tiny

pytestmark = needs_graphs

DIMS, WIDE = 32, 24


def _coded(y: mx.array, weight: mx.array) -> mx.array:
    packed, scales, biases = mx.quantize(weight.T, group_size=32, bits=4)
    mx.eval(packed, scales, biases)
    return mx.quantized_matmul(y, packed, scales, biases, group_size=32, bits=4)


PLANTED: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "@": lambda y, weight: y @ weight,
    "matmul": mx.matmul,
    "einsum": lambda y, weight: mx.einsum("bld,de->ble", y, weight),
    "tensordot": lambda y, weight: mx.tensordot(y, weight, 1),
    "inner": lambda y, weight: mx.inner(y, weight.T),
    "addmm": lambda y, weight: mx.addmm(mx.zeros((WIDE,)), y, weight),
    "convolution": lambda y, weight: mx.conv1d(y, weight.T[:, None, :]),
    "sum": lambda y, weight: (y[..., None] * weight).sum(-2),
    "sum of a cast": lambda y, weight: (y[..., None] * weight.astype(mx.float16)).sum(-2),
    "quotient": lambda y, weight: (y[..., None] / weight).sum(-2),
    "ones": lambda y, weight: (y[..., None, :] * weight.T) @ mx.ones((DIMS,)),
    "codes": _coded,
    "part": lambda y, weight: y[..., :16] @ weight[:16],
    "scaled": lambda y, weight: y @ (2 * weight),
    "gather": lambda y, weight: mx.gather_mm(y[0], weight[None], rhs_indices=mx.array([0]))[None],
}
HARMLESS: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "scale": lambda y, weight: y * weight[:, 0],
    "shift": lambda y, weight: y + weight[:, 0],
    "window": lambda y, weight: mx.conv1d(y, weight[:, :1, None], groups=DIMS),
    "outer": lambda y, weight: y[..., None] * weight[0],
    "lookup": lambda y, weight: weight[mx.argmax(y, axis=-1)],
    "activations": lambda y, weight: y @ y.swapaxes(1, 2),
}


def planted(function: Callable[[mx.array, mx.array], mx.array], model: Any = None) -> Any:
    """A model whose second block also computes something with a matrix."""
    model = tiny("hgrn_bit") if model is None else model
    block = model.blocks[1]

    class Planted(type(block)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            y, state = super().__call__(*args, **kwargs)
            return y + 0 * function(y, self.secret).sum(), state

    block.__class__ = Planted
    block.secret = mx.random.normal((DIMS, WIDE))
    mx.eval(block.secret)
    return model


@pytest.mark.sample(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_product_is_found(name: str, backend: str) -> None:
    with on(backend):
        found = certify(planted(PLANTED[name]), 3)
    assert found.is_matmul_free is False
    (dense,) = found.dense_in_blocks
    # codes were made of the matrix, so that nobody knows whose they are
    assert dense.path == ("a constant" if name == "codes" else "blocks.1.secret")
    assert (dense.inputs, dense.outputs) == (16 if name == "part" else DIMS, WIDE)
    assert dense.path in verdict(found) and verdict(found).startswith("Not MatMul-free: 1 product ")


@pytest.mark.parametrize("name", HARMLESS)
def test_other_uses_of_weights_are_none(name: str) -> None:
    found = certify(planted(HARMLESS[name]), 3)
    assert found.is_matmul_free is True and not found.dense_in_blocks
    assert ("of activations with activations" in verdict(found)) == (name == "activations")
    assert (found.lookups == ("embed", "blocks.1.secret")) == (name == "lookup")


def test_a_matrix_that_is_no_parameter_is_found() -> None:
    secret = mx.random.normal((DIMS, WIDE))
    mx.eval(secret)
    (dense,) = certify(planted(lambda y, _: y @ secret), 3).dense_in_blocks
    assert dense.path == "a constant"


def test_trits_that_are_no_parameter_are_ternary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_AT_A_TIME", 4 * WIDE)
    trits = ternarize(mx.random.normal((DIMS, WIDE)))[0]
    two_sizes = mx.where(mx.arange(DIMS)[:, None] < DIMS // 2, trits, trits * 0.5)
    mx.eval(trits, two_sizes)
    cases = ((trits, True), (trits * 0.5, True), (trits + 0.25, False), (two_sizes, False))
    for plant, is_free in cases:
        found = certify(planted(lambda y, _, plant=plant: y @ plant), 3)
        assert found.is_matmul_free is is_free


def test_floats_that_a_layer_holds_are_dense_whatever_their_values() -> None:
    model = planted(lambda y, weight: y @ weight)
    model.blocks[1].secret = ternarize(mx.random.normal((DIMS, WIDE)))[0]
    (dense,) = certify(model, 3).dense_in_blocks
    assert (dense.path, dense.storage) == ("blocks.1.secret", "float32")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dense_layer_in_the_place_of_a_ternary_one_is_found(backend: str) -> None:
    model = tiny("hgrn_bit")
    model.blocks[0].token_mixer.output_proj = nn.Linear(DIMS, DIMS, bias=False)
    with on(backend):
        (dense,) = certify(model, 3).dense_in_blocks
    assert dense.path == "blocks.0.token_mixer.output_proj" and dense.storage == "float32"


@pytest.mark.parametrize("backend", BACKENDS)
def test_master_weights_are_ternary_only_where_they_are_rounded(backend: str) -> None:
    model = tiny("hgrn_bit", is_packed=False)
    with on(backend):
        found = certify(model, 3)
    assert found.is_matmul_free is True
    assert all("for each token" in each.storage for each in found.products)
    paths = {each.path for each in found.products}
    assert paths == {path for path, matrix in matrices(model).items() if matrix.is_ternary}
    master = model.blocks[1].channel_mixer.down_proj.weight
    with on(backend):
        (dense,) = certify(planted(lambda y, _: y @ master[:, :DIMS], model), 3).dense_in_blocks
    assert dense.path == "blocks.1.channel_mixer.down_proj"


def test_the_embedding_in_a_block_is_found() -> None:
    model = tiny("bitnet")
    table = model.embed.weight
    found = certify(planted(lambda y, _: y @ table.T, model), 3)
    assert [each.path for each in found.dense_in_blocks] == ["embed"]
    assert [each.path for each in found.products if each.is_outside] == ["head"]


def test_what_is_outside_is_named() -> None:
    model = tiny("hgrn_bit")
    model.head = nn.Linear(DIMS, 60, bias=False)
    found = certify(model, 3)
    assert found.is_matmul_free is True
    assert verdict(found).endswith("Outside the blocks: head (float32), the lookup of embed.")


def test_a_kernel_without_a_declared_cost_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = certify(tiny("hgrn_bit"), 3)
    monkeypatch.setattr(operations()["mlgru_step"], "costs", {})
    found = certify(tiny("hgrn_bit"), 3)
    assert found.unknown == {"MlgruStep": 2} and found.is_matmul_free is None
    assert found.count("multiply") < whole.count("multiply")
    assert "not known" in verdict(found) and "MlgruStep" in verdict(found)


def test_an_operation_of_mlx_that_nobody_counts_is_unknown() -> None:
    found = certify(planted(lambda y, _: mx.fft.rfft(y).real), 3)
    assert "FFT" in "".join(found.unknown) and found.is_matmul_free is None


def test_every_kernel_has_a_declared_cost() -> None:
    """But those that train, of which a decoded token has none."""
    headers = sources.FOLDER.glob("*/*.h")
    names = {
        line.partition("(")[2].rstrip(")")
        for header in headers
        for line in header.read_text().split()
        if line.startswith("DEFINE_NAME(")
    }
    training = {name for name in names if name.endswith("Gradient")}
    training |= {"Adamw", "CrossEntropy", "RmsNormRound", "UnpackScaled"}
    training |= {"DenseMatmulTransposed", "TernaryMatmulTransposed"}
    assert names - training <= {name for each in operations().values() for name in each.costs}


def test_nothing_is_computed() -> None:
    """Weights that are yet to be drawn stay so."""
    model = tiny("hgrn_bit")
    weight = mx.zeros((DIMS, DIMS)) / 0
    layer = model.blocks[0].token_mixer.output_proj
    assert isinstance(layer, PackedBitLinear)
    layer.norm.weight = weight[0]
    recording = record(model, 3)
    assert "Divide" not in {node.name for node in recording.graph.nodes}
