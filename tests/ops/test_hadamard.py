"""The signed Walsh-Hadamard transform of blocks."""

import math
from contextlib import nullcontext
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers.merged import merge_projections
from mlx_mmfree.layers.rotated import RotatedLinear
from mlx_mmfree.models import Block
from mlx_mmfree.models.parts.fused import FusedBlock, fuse_operations
from mlx_mmfree.ops import hadamard, use_backend
from mlx_mmfree.ops.backend.dispatch import FLOATS
from mlx_mmfree.ops.hadamard import hadamard_of_gate, hadamard_of_norm, hadamard_of_sum
from mlx_mmfree.token_mixers import GQA
from tests.emulator.emulator import Emulator
from tests.ops.planting import BARRIER, Fault, assert_seen
from tests.tolerances import TOLERANCE, relative_error


def matrix(size: int) -> np.ndarray:
    """Sylvester's matrix, by its definition: the sign is the parity of the common bits."""
    n = np.arange(size)
    common = n[:, None] & n
    bits = sum((common >> k) & 1 for k in range(size.bit_length()))
    return np.where(bits % 2, -1.0, 1.0) / math.sqrt(size)


def transformed(x: np.ndarray, block: int, signs: np.ndarray, *, inverse: bool) -> np.ndarray:
    given = x if inverse else x * signs
    y = (given.reshape(-1, block) @ matrix(block)).reshape(x.shape)
    return y * signs if inverse else y


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "dims", "block"),
    [(1, 5120, 1024), (3, 17408, 512), (2, 1024, 1024), (5, 96, 32), (2, 6, 2), (7, 64, 16)],
)
def test_equals_the_matrix(dtype: mx.Dtype, rows: int, dims: int, block: int) -> None:
    random = np.random.default_rng(dims + block)
    x = mx.array(random.normal(size=(rows, dims)).astype(np.float32)).astype(dtype)
    signs = random.choice([-1.0, 1.0], dims)
    for inverse in (False, True):
        y = hadamard(x, block, mx.array(signs.astype(np.float32)), inverse=inverse)
        assert y.dtype == dtype
        want = transformed(
            np.array(x.astype(mx.float32), np.float64), block, signs, inverse=inverse
        )
        tolerance = TOLERANCE[dtype]
        assert relative_error(y, mx.array(want.astype(np.float32))) <= tolerance


def test_a_single_number_becomes_signs() -> None:
    size = 8192
    for index in (0, 1, 5, 4096, 8191):
        y = np.array(hadamard((mx.arange(size) == index).astype(mx.float32), size))
        common = np.arange(size) & index
        parity = sum((common >> k) & 1 for k in range(13)) % 2
        assert np.abs(y - (1 - 2 * parity) / math.sqrt(size)).max() <= 1e-9


def test_without_signs_it_is_its_own_inverse() -> None:
    x = mx.random.normal((2, 3, 256))
    assert relative_error(hadamard(hadamard(x, 128), 128), x) <= TOLERANCE[mx.float32]
    assert hadamard(mx.zeros((0, 128)), 128).shape == (0, 128)


@pytest.mark.parametrize("inverse", [False, True])
def test_gradient(inverse: bool) -> None:
    x, dy = mx.random.normal((4, 192)), mx.random.normal((4, 192))
    signs = mx.where(mx.random.uniform(shape=(192,)) < 0.5, -1.0, 1.0)

    def loss(x: mx.array, signs: mx.array) -> mx.array:
        return (hadamard(x, 64, signs, inverse=inverse) * dy).sum()

    of_x, of_signs = mx.grad(loss, argnums=(0, 1))(x, signs)
    assert relative_error(of_x, hadamard(dy, 64, signs, inverse=not inverse)) <= 1e-5
    plain = hadamard(x, 64)
    want = (plain * dy).sum(axis=0) if inverse else (hadamard(dy, 64) * x).sum(axis=0)
    assert relative_error(of_signs, want) <= 1e-5


@pytest.mark.parametrize("block", [0, 1, 3, 48, 2**14, -2, 64.0, True])
def test_blocks_are_powers_of_two(block: object) -> None:
    with pytest.raises(ValueError, match=r"\[hadamard\] 'block' must be a power of two"):
        hadamard(mx.zeros((1, 192)), block)  # type: ignore[arg-type]


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="'x' must be floats"):
        hadamard(mx.zeros((1, 192)), 128)
    with pytest.raises(ValueError, match="'x' must be floats"):
        hadamard(mx.zeros((1, 128), mx.int32), 128)
    with pytest.raises(ValueError, match="'signs' must be float32 of shape"):
        hadamard(mx.zeros((1, 128)), 128, mx.ones((64,)))
    with pytest.raises(ValueError, match="'signs' must be float32 of shape"):
        hadamard(mx.zeros((1, 128)), 128, mx.ones((128,), mx.float16))


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("block", [64, 128, 256, 512, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("dtype", FLOATS)
def test_metal_kernel(block: int, dtype: mx.Dtype) -> None:
    random = np.random.default_rng(block)
    dims = 2 * block
    x = mx.array(random.normal(size=(2, dims)).astype(np.float32)).astype(dtype)
    signs = mx.array(random.choice([-1.0, 1.0], dims).astype(np.float32))
    for inverse in (False, True):
        for given in (signs, None):
            with use_backend("reference"):
                want = hadamard(x, block, given, inverse=inverse)
            with use_backend("metal"):
                got = hadamard(x, block, given, inverse=inverse)
            assert got.dtype == dtype
            assert relative_error(got, want) <= TOLERANCE[dtype]


def drawn(dims: int, block: int, dtype: mx.Dtype) -> tuple[mx.array, np.ndarray]:
    random = np.random.default_rng(dims + block)
    x = mx.array(random.normal(size=(2, dims)).astype(np.float32)).astype(dtype)
    return x, random.choice([-1.0, 1.0], dims)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def check_norm(dims: int, block: int, dtype: mx.Dtype, weight: mx.Dtype = mx.float32) -> None:
    x, signs = drawn(dims, block, dtype)
    gain = (1 + mx.arange(dims) % 7 / 8).astype(weight)
    y, z = hadamard_of_norm(x, gain, block, mx.array(signs.astype(np.float32)), eps=1e-2)
    numbers = float64(x)
    normed = numbers / np.sqrt((numbers**2).mean(axis=-1, keepdims=True) + 1e-2) * float64(gain)
    want = transformed(normed, block, signs, inverse=False)
    assert y.dtype == z.dtype == dtype
    assert relative_error(z, mx.array(normed)) <= TOLERANCE[dtype]
    assert relative_error(y, mx.array(want)) <= TOLERANCE[dtype]


def check_sum(dims: int, block: int, dtype: mx.Dtype, weight: mx.Dtype = mx.float32) -> None:
    x, signs = drawn(dims, block, dtype)
    branch = (3 * x[::-1, ::-1]).astype(dtype)
    gain = (1 + mx.arange(dims) % 7 / 8).astype(weight)
    y, u = hadamard_of_sum(x, branch, gain, block, mx.array(signs.astype(np.float32)), eps=1e-2)
    numbers = float64(x) + float64(branch)
    normed = numbers / np.sqrt((numbers**2).mean(axis=-1, keepdims=True) + 1e-2) * float64(gain)
    want = transformed(normed, block, signs, inverse=False)
    assert y.dtype == u.dtype == dtype
    assert mx.array_equal(u, x + branch)
    assert relative_error(y, mx.array(want)) <= TOLERANCE[dtype]


def check_gate(dims: int, block: int, dtype: mx.Dtype) -> None:
    x, _ = drawn(2 * dims, block, dtype)
    signs = np.where(np.arange(dims) % 3, 1.0, -1.0)
    y = hadamard_of_gate(4 * x, block, mx.array(signs.astype(np.float32)))
    gate, up = np.split(float64(4 * x), 2, axis=-1)
    want = transformed(gate / (1 + np.exp(-gate)) * up, block, signs, inverse=False)
    assert y.dtype == dtype
    assert relative_error(y, mx.array(want)) <= TOLERANCE[dtype]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("dims", "block"), [(5120, 1024), (96, 32)])
def test_of_a_norm_a_sum_and_a_gate(dims: int, block: int, dtype: mx.Dtype) -> None:
    check_norm(dims, block, dtype)
    check_sum(dims, block, dtype)
    check_gate(dims, block, dtype)


@pytest.mark.sample(1)
@pytest.mark.metal
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("dims", "block"), [(5120, 1024), (192, 64), (512, 512), (6144, 2048), (16384, 8192)]
)
def test_of_a_norm_a_sum_and_a_gate_on_metal(
    metal: None, dims: int, block: int, dtype: mx.Dtype
) -> None:
    with use_backend("metal"):
        check_norm(dims, block, dtype)
        check_norm(dims, block, dtype, dtype)
        check_sum(dims, block, dtype)
        check_sum(dims, block, dtype, dtype)
        check_gate(dims, block, dtype)


@pytest.mark.metal
def test_gradients_on_metal(metal: None) -> None:
    x, signs = mx.random.normal((2, 256)), mx.ones((128,))

    def loss(x: mx.array) -> mx.array:
        gated = hadamard_of_gate(x, 64, signs)
        y, z = hadamard_of_norm(gated, 2 * signs, 64, signs, eps=1e-3)
        y, u = hadamard_of_sum(y, z, 2 * signs, 64, signs, eps=1e-3)
        return (y * mx.cos(mx.arange(256).reshape(2, 128)) + u * z * z).sum()

    with use_backend("metal"):
        got = mx.grad(loss)(x)
    with use_backend("reference"):
        assert relative_error(got, mx.grad(loss)(x)) <= 1e-5


@pytest.mark.metal
@pytest.mark.parametrize("backend", ["reference", "metal"])
def test_a_block_leaves_its_sum_to_the_rotation(
    metal: None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(4)
    makes = partial(RotatedLinear, group_size=32, bits=4, block=64)
    mixer = SwiGLU(64, hidden_dims=128, linear=lambda inputs, outputs, bias: makes(inputs, outputs))
    for linear in mixer.children().values():
        outputs, inputs = linear.output_dims, linear.input_dims
        codes = mx.quantize(mx.random.normal((outputs, inputs)) / 8, 32, 4)
        linear.weight, linear.scales, linear.biases = codes
        linear.signs = mx.where(mx.random.uniform(shape=(inputs,)) < 0.5, -1.0, 1.0)
    mixer.up_proj.signs = mixer.gate_proj.signs
    block = Block(64, GQA(64, num_heads=2), mixer)
    x = mx.random.normal((2, 3, 64))
    with use_backend("reference"):
        want, _ = block(x)
        mx.eval(want)
    fuse_operations(block)
    if backend == "metal":
        merge_projections(block)
    assert type(block) is FusedBlock
    with use_backend("reference") if backend == "reference" else nullcontext():
        assert relative_error(block(x)[0], want) <= TOLERANCE[mx.float32]


def test_what_does_not_fit() -> None:
    x, ones = mx.ones((1, 64)), mx.ones(64)
    with pytest.raises(ValueError, match=r"\[hadamard_of_sum\] 'weight' and 'signs' must have"):
        hadamard_of_sum(x, x, ones, 32, mx.ones(32), eps=1e-6)
    for branch in (ones, x.astype(mx.float16)):
        with pytest.raises(ValueError, match=r"\[hadamard_of_sum\] 'branch' must be"):
            hadamard_of_sum(x, branch, ones, 32, ones, eps=1e-6)
    with pytest.raises(ValueError, match=r"\[hadamard_of_norm\] 'weight' and 'signs' must have"):
        hadamard_of_norm(mx.ones((1, 64)), mx.ones(32), 32, mx.ones(64), eps=1e-6)
    with pytest.raises(ValueError, match=r"\[hadamard_of_gate\] 'x' must have 128 numbers"):
        hadamard_of_gate(mx.ones((1, 64)), 32, mx.ones(64))


def of_norm() -> None:
    with use_backend("metal"):
        check_norm(4096, 1024, mx.float32)


def of_sum() -> None:
    with use_backend("metal"):
        check_sum(4096, 1024, mx.float16)


def of_gate() -> None:
    with use_backend("metal"):
        check_gate(1024, 512, mx.float32)


KERNELS = {
    of_norm: "hadamard_of_norm",
    of_sum: "hadamard_of_sum",
    of_gate: "hadamard_of_gate",
}
FAULTS = {
    "norm: of the block": Fault(of_norm, "start < dims", "start < BLOCK", 0),
    "norm: of the first row": Fault(of_norm, "x + row * dims", "x", 0),
    "norm: gain of the first block": Fault(
        of_norm, "(weight + first)", "(weight + EACH * index)", 0
    ),
    "norm: epsilon": Fault(of_norm, "+ eps)", ")", 0),
    "norm: signs of the first block": Fault(
        of_norm, "(signs + first)", "(signs + EACH * index)", 0
    ),
    "norm: barrier before the exchange": Fault(of_norm, BARRIER, "", 1),
    "norm: numbers that have met": Fault(of_norm, "step = done / stride", "step = 1", 0),
    "norm: neighbours' indices": Fault(of_norm, "+ index % stride", "", 0),
    "sum: branch of the first row": Fault(of_sum, "branch + row * dims", "branch", 0),
    "sum: squares of the stream alone": Fault(
        of_sum, " + static_cast<float>((branches + start)[k])", "", 0
    ),
    "sum: the branch of the first block": Fault(
        of_sum, "(branches + first)", "(branches + EACH * index)", 0
    ),
    "sum: stored in the first block": Fault(
        of_sum, "(summed + row * dims + first)", "(summed + row * dims)", 0
    ),
    "gate: halves exchanged": Fault(of_gate, "gates[k]", "(gates + dims)[k]", 0),
    "gate: no sigmoid": Fault(of_gate, "gate * sigmoid(gate)", "gate", 0),
    "gate: rows of half the width": Fault(of_gate, "2 * row * dims", "row * dims", 0),
}


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_metal_are_seen(
    name: str, emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    assert_seen(fault, KERNELS[fault.check], emulated, monkeypatch)
