"""Floats of packed matrices: found again, within their limit, and gone with the matrix."""

import gc

import mlx.core as mx
import pytest

from mlx_mmfree.errors import UsageError
from mlx_mmfree.ops import pack_ternary, ternary_matmul, unpacked, use_backend
from mlx_mmfree.ops.ternary_matmul import definition
from mlx_mmfree.ops.unpacked import UnpackedMatrices

cpu_only = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="for a CPU")


def drawn(outputs: int, inputs: int) -> mx.array:
    return mx.random.randint(-1, 2, (outputs, inputs))


def test_a_matrix_is_unpacked_once_and_goes_with_its_packed_format() -> None:
    trits = drawn(5, 40)
    weight = pack_ternary(trits)
    matrices = UnpackedMatrices(10**6)
    found = matrices.find([weight], 40)
    assert found is not None and mx.array_equal(found.whole, trits)
    assert matrices.find([weight], 40) is found
    assert matrices.size_bytes == 4 * 5 * 40
    del weight
    gc.collect()
    assert matrices.size_bytes == 0 and not matrices._cached


def test_the_limit_holds() -> None:
    matrices = UnpackedMatrices(2 * 4 * 5 * 40 + 10)
    weights = [pack_ternary(drawn(5, 40)) for _ in range(3)]
    assert [matrices.find([weight], 40) is not None for weight in weights] == [True, True, False]
    assert matrices.size_bytes == 2 * 4 * 5 * 40


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_first_alone", [False, True])
def test_matrices_that_are_multiplied_together_are_cached_once(is_first_alone: bool) -> None:
    matrices = UnpackedMatrices(10**6)
    trits = [drawn(96, 40) for _ in range(3)]
    weights = [pack_ternary(each) for each in trits]
    if is_first_alone:
        matrices.find(weights[:1], 40)
    together = matrices.find(weights, 40)
    assert together is not None and mx.array_equal(together.whole, mx.concatenate(trits))
    # blocks do not cross from one matrix to the next
    blocks = together.blocks.reshape(3, -1, *together.blocks.shape[1:])
    for weight, each, part in zip(weights, trits, blocks, strict=True):
        alone = matrices.find([weight], 40)
        assert alone is not None and mx.array_equal(alone.whole, each)
        assert mx.array_equal(part.swapaxes(1, 2).reshape(96, 40), each)
    assert matrices.size_bytes == 3 * 4 * 96 * 40
    del weights, weight
    gc.collect()
    assert matrices.size_bytes == 0 and not matrices._cached


@pytest.mark.parametrize("outputs", [1, 7, 64, 4099])
def test_blocks_are_few(outputs: int) -> None:
    weight = pack_ternary(drawn(outputs, 100))
    floats = UnpackedMatrices(10**8).find([weight], 100)
    assert floats is not None and floats.blocks.shape[0] <= max(1, outputs // 16)


@pytest.mark.usefixtures("unfused")
def test_what_is_traced_is_not_cached() -> None:
    matrices = UnpackedMatrices(10**6)
    mx.compile(lambda weight: [matrices.find([weight], 40)] and weight)(pack_ternary(drawn(5, 40)))
    gc.collect()
    assert matrices.size_bytes == 0


@pytest.mark.usefixtures("unfused")
@cpu_only
def test_what_a_backward_pass_unpacks_stays_in_compiled_graphs() -> None:
    """MLX remembers there how arrays were computed, and a compiled graph computes them again."""
    matrices, trits = UnpackedMatrices(10**6), mx.random.randint(-1, 2, (5, 40))
    weight = pack_ternary(trits)

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return x @ trits.T

    @product.vjp
    def backward(x: mx.array, d_y: mx.array, y: mx.array) -> mx.array:
        floats = matrices.find((weight,), 40)
        assert floats is not None
        return d_y @ floats.whole + (d_y[0] @ floats.blocks[0].T)

    gradient = mx.compile(mx.grad(lambda x: product(x).sum()))
    assert mx.array_equal(gradient(mx.ones((2, 40))), 2 * mx.ones((2, 5)) @ trits)


@pytest.mark.parametrize("limit_bytes", [0, 10**6])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("inputs", [40, 300])
def test_sums_of_codes_are_exact(
    limit_bytes: int, rows: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definition, "unpacked_matrices", lambda: UnpackedMatrices(limit_bytes))
    # the outputs fill several blocks
    monkeypatch.setattr(definition, "BLOCK_WEIGHTS", 4 * inputs)
    codes, trits = mx.random.randint(-128, 128, (rows, inputs)), drawn(33, inputs)
    weight = pack_ternary(trits)
    x = codes.astype(mx.float32)
    with use_backend("chunked"):
        y = ternary_matmul(x, weight, codes=True)
        gradient = mx.grad(lambda x: (ternary_matmul(x, weight, codes=True) * y).sum())(x)
    wanted = (codes[:, None] * trits).sum(axis=-1)
    assert mx.array_equal(y, wanted)
    assert mx.array_equal(gradient, (wanted[:, :, None] * trits).sum(axis=1))


def test_the_environment_sets_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked.unpacked_matrices.cache_clear()
    monkeypatch.setenv(unpacked.LIMIT, "3")
    assert unpacked.unpacked_matrices().limit_bytes == 3 * 10**6
    unpacked.unpacked_matrices.cache_clear()
    monkeypatch.setenv(unpacked.LIMIT, "much")
    with pytest.raises(UsageError, match="must be a whole number of megabytes but got 'much'"):
        unpacked.unpacked_matrices()
    monkeypatch.undo()
    unpacked.unpacked_matrices.cache_clear()
