"""Floats of packed matrices: found again, within their limit, and gone with the matrix."""

import gc

import mlx.core as mx
import pytest

from mlx_mmfree.errors import UsageError
from mlx_mmfree.ops import pack_ternary, ternary_matmul, unpacked, use_backend
from mlx_mmfree.ops.ternary_matmul import chunked
from mlx_mmfree.ops.unpacked import UnpackedMatrices

cpu_only = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="for a CPU")


def drawn(outputs: int, inputs: int) -> mx.array:
    return mx.random.randint(-1, 2, (outputs, inputs))


def test_a_matrix_is_unpacked_once_and_goes_with_its_packed_form() -> None:
    trits = drawn(5, 40)
    weight = pack_ternary(trits)
    matrices = UnpackedMatrices(10**6)
    found = matrices.find(weight, 40)
    assert found is not None and mx.array_equal(found, trits)
    assert matrices.find(weight, 40) is found
    assert matrices.size_bytes == 4 * 5 * 40
    del weight
    gc.collect()
    assert matrices.size_bytes == 0 and not matrices._kept


def test_the_limit_holds() -> None:
    matrices = UnpackedMatrices(2 * 4 * 5 * 40 + 10)
    weights = [pack_ternary(drawn(5, 40)) for _ in range(3)]
    assert [matrices.find(weight, 40) is not None for weight in weights] == [True, True, False]
    assert matrices.size_bytes == 2 * 4 * 5 * 40


def test_what_is_traced_is_not_kept() -> None:
    matrices = UnpackedMatrices(10**6)
    mx.compile(lambda weight: [matrices.find(weight, 40)] and weight)(pack_ternary(drawn(5, 40)))
    gc.collect()
    assert matrices.size_bytes == 0


@cpu_only
@pytest.mark.parametrize("limit_bytes", [0, 10**6])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("inputs", [40, 300])
def test_sums_of_codes_are_exact(
    limit_bytes: int, rows: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "unpacked_matrices", lambda: UnpackedMatrices(limit_bytes))
    # several blocks of outputs
    monkeypatch.setattr(chunked, "BLOCK_WEIGHTS", 4 * inputs)
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
