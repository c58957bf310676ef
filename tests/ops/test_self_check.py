"""A kernel that does not compute what it should is switched off, with one warning that names it."""

import warnings

import mlx.core as mx
import pytest

from mlx_mmfree.errors import BackendError
from mlx_mmfree.ops import backend_report, pack_ternary, self_check, ternary_matmul, use_backend
from tests.emulator.emulator import Emulator

X = mx.arange(2 * 32, dtype=mx.float32).reshape(2, 32)
TRITS = mx.arange(3 * 32).reshape(3, 32) % 3 - 1
WEIGHT = pack_ternary(TRITS)
OP = "mlx_mmfree.ops.ternary_matmul"


@pytest.fixture
def device(emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """A device on which nothing has been checked yet."""
    monkeypatch.setattr(self_check, "_checks", {})
    return emulated


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (("code == 1 ? 0.0f", "code == 2 ? 0.0f"), "it computes wrong values"),
        (("const uint code =", "const uint code ="[:-1]), "it does not run .*does not compile"),
        (("word += 32", "word += 31"), "it computes wrong values"),
        (("float sum = simd_sum(", "float sum = 0 / 0.0f * ("), "it computes wrong values"),
        (("first + n < outputs\n", "first + n < 9999\n"), "it does not run .*out of bounds"),
    ],
    ids=["wrong", "not-compiling", "not-all-words", "nan", "out-of-bounds"],
)
def test_a_broken_kernel_is_switched_off(
    device: Emulator, fault: tuple[str, str], reason: str
) -> None:
    device.edit = lambda text: text.replace(*fault)
    with pytest.warns(RuntimeWarning, match=f"ternary_matmul_decode.*is switched off.*{reason}"):
        got = ternary_matmul(X, WEIGHT)
    assert mx.array_equal(got, X @ TRITS.T.astype(mx.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ternary_matmul(X, WEIGHT)
    with use_backend("metal"), pytest.raises(BackendError, match=f"'metal' cannot run: {reason}"):
        ternary_matmul(X, WEIGHT)


def test_other_kernels_stay_on(device: Emulator) -> None:
    device.edit = lambda text: text.replace("code == 1 ? 0.0f", "code == 2 ? 0.0f")
    with pytest.warns(RuntimeWarning):
        ternary_matmul(X, WEIGHT)
    many = mx.concatenate([X] * 5)
    device.records.clear()
    assert mx.array_equal(ternary_matmul(many, WEIGHT), many @ TRITS.T.astype(mx.float32))
    assert all("prefill" in record.kernel for record in device.records)
    checked = self_check.checked_kernels()
    assert [fault is None for fault in checked.values()] == [False, True]
    assert all("ternary_matmul" in kernel for kernel in checked)


def test_a_sound_kernel_is_checked_once(device: Emulator) -> None:
    assert backend_report(OP, X, WEIGHT, codes=False)["metal"] is None
    assert len(device.records) == 1
    ternary_matmul(X, WEIGHT)
    ternary_matmul(X + 1, WEIGHT)
    assert len(device.records) == 3


def test_a_check_may_happen_inside_transformations(device: Emulator) -> None:
    gradient = mx.grad(lambda x: ternary_matmul(x, WEIGHT).sum())(X)
    assert mx.array_equal(gradient, mx.broadcast_to(TRITS.sum(axis=0), X.shape).astype(mx.float32))
    for transform in (mx.compile, mx.vmap):
        self_check._checks.clear()
        transform(lambda x: backend_report(OP, X, WEIGHT, codes=False) and x)(X)
        assert list(self_check.checked_kernels().values()) == [None]


def test_without_metal_the_reason_says_so() -> None:
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    assert backend_report(OP, X, WEIGHT, codes=False)["metal"] == "no Metal device"
