"""A kernel that does not compute what it should is switched off, with one warning that names it."""

import json
import platform
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.errors import BackendError
from mlx_mmfree.ops import (
    Projection,
    backend_report,
    bit_linear,
    pack_ternary,
    ternary_matmul,
    use_backend,
)
from mlx_mmfree.ops.backend import dispatch, metal_functions, self_check, stored_results
from tests.backends import change_backend
from tests.emulator.emulator import Emulator

X = mx.arange(2 * 32, dtype=mx.float32).reshape(2, 32)
TRITS = mx.arange(3 * 32).reshape(3, 32) % 3 - 1
WEIGHT = pack_ternary(TRITS)
OP = "mlx_mmfree.ops.ternary_matmul"


@pytest.fixture
def device(emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """A device other than the CPU, on which nothing has been checked yet, and that flushes denormals.

    So kernels need no check but their own.
    """
    monkeypatch.setattr(metal_functions, "_without_halves", ContextVar("flushes", default=True))
    monkeypatch.setattr(self_check, "_checks", {})
    monkeypatch.setattr(dispatch, "native_unavailable", lambda: "this is no CPU")
    change_backend(monkeypatch, "bit_linear", "chunked", unsupported=lambda *_: "this is no CPU")
    return emulated


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (("unit - 1.0f", "unit"), "it computes wrong values"),
        (("const Words bits =", "const Words bits"), "it does not run .*does not compile"),
        (("word += 32", "word += 31"), "it computes wrong values"),
        (("float sum = simd_sum(", "float sum = 0 / 0.0f * ("), "it computes wrong values"),
        (("min(n, outputs - 1 - first)", "n"), "it does not run .*out of bounds"),
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
    device.edit = lambda text: text.replace("sum = simd_sum(", "sum = (")
    with pytest.warns(RuntimeWarning):
        ternary_matmul(X, WEIGHT)
    many = mx.concatenate([X] * 25)
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


@pytest.mark.usefixtures("unfused")
def test_a_check_may_happen_inside_transformations(device: Emulator) -> None:
    gradient = mx.grad(lambda x: ternary_matmul(x, WEIGHT).sum())(X)
    assert mx.array_equal(gradient, mx.broadcast_to(TRITS.sum(axis=0), X.shape).astype(mx.float32))
    for transform in (mx.compile, mx.vmap):
        self_check.check_again()
        transform(lambda x: backend_report(OP, X, WEIGHT, codes=False) and x)(X)
        assert list(self_check.checked_kernels().values()) == [None]


def test_plain_operations_take_over(
    device: Emulator, chunked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.edit = lambda text: text.replace("unit - 1.0f", "unit")
    with pytest.warns(RuntimeWarning, match="ternary_matmul_decode"):
        assert backend_report(OP, X, WEIGHT, codes=False)["metal"]
    device.records.clear()
    change_backend(monkeypatch, "ternary_matmul", "reference", run=None)
    assert mx.array_equal(ternary_matmul(X, WEIGHT), X @ TRITS.T.astype(mx.float32))
    assert not device.records


def test_other_kernels_take_over_from_a_fused_one(device: Emulator) -> None:
    device.edit = lambda text: text.replace("if (RESIDUAL)", "if (false)")
    trits = mx.concatenate([TRITS, TRITS])
    projection = Projection(pack_ternary(trits), mx.array([0.5]))
    with pytest.warns(RuntimeWarning, match="bit_linear.*wrong values"):
        got = bit_linear(X, [projection], quantize=False, residual=mx.ones((2, 6)))
    assert mx.array_equal(got, X @ trits.T.astype(mx.float32) * 0.5 + 1)
    assert "ternary_matmul_decode" in device.records[-1].kernel
    bit_linear(X, [projection])
    assert "bit_linear" in device.records[-1].kernel


@pytest.fixture
def folder(device: Emulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which results are stored."""
    monkeypatch.setenv("MLX_MMFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_results, "_sections", {})
    return tmp_path / "cache" / "kernel_checks"


def start_process() -> None:
    self_check._checks.clear()
    stored_results._sections.clear()


def launches(device: Emulator) -> int:
    before = len(device.records)
    assert mx.array_equal(ternary_matmul(X, WEIGHT), X @ TRITS.T.astype(mx.float32))
    return len(device.records) - before


def test_another_process_does_not_check_again(device: Emulator, folder: Path) -> None:
    assert launches(device) == 2
    start_process()
    assert launches(device) == 1
    [file] = folder.iterdir()
    [results] = json.loads(file.read_text()).values()
    assert list(results.values()) == [None]
    self_check.check_again()
    assert launches(device) == 2


def test_a_stored_fault_warns_in_another_process(device: Emulator, folder: Path) -> None:
    device.edit = lambda text: text.replace("unit - 1.0f", "unit")
    with pytest.warns(RuntimeWarning, match="wrong values"):
        assert launches(device) == 1
    start_process()
    with pytest.warns(RuntimeWarning, match="ternary_matmul_decode.*wrong values"):
        assert launches(device) == 0


def failing(message: str, kind: type[Exception]) -> Callable[[str], str]:
    """Stands in for Metal's compiler, or for what else may fail."""

    def edit(text: str) -> str:
        raise kind(message)

    return edit


@pytest.mark.parametrize(
    ("message", "kind", "lasts"),
    [
        (
            "[metal::Device] Unable to build metal library from source\nprogram_source:9:1: "
            "error: expected expression\n",
            *(RuntimeError, True),
        ),
        (
            "[metal::Device] Unable to load kernel: Threadgroup memory size (32896) exceeds the maximum "
            "threadgroup memory allowed (32768)",
            *(RuntimeError, True),
        ),
        (
            "Thread group size (1024) is greater than the maximum allowed threads per threadgroup "
            "(448).",
            *(ValueError, True),
        ),
        ("[metal::Device] Unable to load kernel: XPC_ERROR_CONNECTION", RuntimeError, False),
        ("[METAL] Command buffer execution failed: Insufficient Memory", RuntimeError, False),
        ("[metal::malloc] Resource limit (499000) exceeded.", RuntimeError, False),
        ("", MemoryError, False),
    ],
)
def test_a_failure_that_may_pass_is_tried_again_in_another_process(
    device: Emulator, folder: Path, message: str, kind: type[Exception], lasts: bool
) -> None:
    device.edit = failing(message, kind)
    with pytest.warns(RuntimeWarning, match="ternary_matmul_decode.*does not run"):
        assert launches(device) == 0
    device.edit = lambda text: text
    # in the same process it stays off
    assert launches(device) == 0
    start_process()
    if lasts:
        with pytest.warns(RuntimeWarning, match="ternary_matmul_decode.*does not run"):
            assert launches(device) == 0
    else:
        assert launches(device) == 2


@pytest.mark.parametrize(
    "fact", ["_device_name", "_system_version", "mlx_version", "_text_of_operations"]
)
def test_what_a_stored_result_holds_for(
    device: Emulator, folder: Path, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launches(device) == 2
    start_process()
    monkeypatch.setattr(stored_results, fact, lambda *_: "another")
    assert launches(device) == 2
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_result_is_found_again(device: Emulator, folder: Path) -> None:
    assert launches(device) == 2
    [file] = folder.iterdir()
    sound = file.read_bytes()
    file.write_bytes(sound.replace(b"null", b"[]"))
    start_process()
    assert launches(device) == 2
    assert file.read_bytes() == sound


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b'{"kernels', b"\xff\xfe", b"[" * 100_000, b'{"kernels": 1}'],
    ids=repr,
)
def test_damaged_results_are_ignored(device: Emulator, folder: Path, content: bytes) -> None:
    assert launches(device) == 2
    [file] = folder.iterdir()
    sound = file.read_bytes()
    file.write_bytes(content)
    start_process()
    assert launches(device) == 2
    assert file.read_bytes() == sound
    assert list(folder.iterdir()) == [file]


def test_a_cache_that_cannot_be_written(device: Emulator, folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    assert launches(device) == 2
    assert launches(device) == 1
    assert list(folder.parent.iterdir()) == [folder]


def test_a_cache_that_is_turned_off(
    device: Emulator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MMFREE_CACHE", "0")
    assert launches(device) == 2
    start_process()
    assert launches(device) == 2
    assert not folder.exists()


def test_threads_that_ask_at_once_check_once(device: Emulator) -> None:
    found: list[str | None] = []

    def ask() -> None:
        found.append(backend_report(OP, X, WEIGHT, codes=False)["metal"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [None] * 4
    assert len(device.records) == 1


def test_without_metal_the_reason_says_so() -> None:
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    assert backend_report(OP, X, WEIGHT, codes=False)["metal"] == "no Metal device"


def test_the_version_of_the_system_has_its_release_and_its_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(platform, "version", lambda: "Darwin Kernel Version 24.1.0: xnu-11215.41.3")
    found = stored_results._system_version.__wrapped__()
    assert found.startswith("15.1 ")
    assert found.endswith("xnu-11215.41.3")
