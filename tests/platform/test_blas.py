"""MLX's dense products go through OpenBLAS, whichever package is imported first."""

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.platform import blas

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only MLX on Linux is bound")

REPORT = """
import numpy as np
a = np.random.default_rng(0).standard_normal((64, 48), dtype=np.float32)
product = np.array(mx.array(a) @ mx.array(a).T)
error = np.abs(product - a.astype(np.float64) @ a.T.astype(np.float64)).max()
slots = {s.symbol: s.address for s in blas.imported_slots("libmlx.so")}
function = ctypes.c_size_t.from_address(slots["cblas_sgemm"]).value
openblas = blas.load_openblas()
bound = function == blas.function_address(openblas.scipy_cblas_sgemm)
print(bound, error < 1e-4, openblas.scipy_openblas_get_num_threads())
"""


def run_python(code: str, **environment: str) -> str:
    root = Path(__file__).parents[2]
    variables = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **environment}
    variables.pop("OPENBLAS_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


MLX_FIRST = """
import ctypes
import mlx.core as mx
mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))  # the lazily bound symbol is resolved already
from mlx_mmfree.platform import blas
blas.bind()
"""
OURS_FIRST = """
import ctypes
from mlx_mmfree.platform import blas
blas.bind()
import mlx.core as mx
"""


@linux_only
@pytest.mark.parametrize("imports", [MLX_FIRST, OURS_FIRST], ids=["mlx first", "ours first"])
def test_products_go_through_openblas(imports: str) -> None:
    assert run_python(imports + REPORT) == "True True 1"


@linux_only
def test_compiled_threads_share_products() -> None:
    if reason := native.unavailable():
        pytest.skip(reason)
    code = """
    import ctypes
    import mlx.core as mx
    import numpy as np
    from mlx_mmfree import native
    from mlx_mmfree.platform import blas
    native.kernels()
    whole = np.random.default_rng(0).integers(-8, 8, (700, 300))
    with mx.stream(mx.cpu):
        x = mx.array(whole).astype(mx.float64)
        print(np.array_equal(np.array(x @ x.T), whole @ whole.T))
    """
    shown = run_python(textwrap.dedent(code) + REPORT, OMP_NUM_THREADS="2")
    assert shown.splitlines() == ["True", "False True 1"]


@linux_only
def test_switched_off() -> None:
    code = MLX_FIRST + REPORT + "print(blas.bind().reason)"
    assert run_python(code, MLX_MMFREE_BLAS="0").splitlines() == [
        "False True 1",
        "switched off by MLX_MMFREE_BLAS=0",
    ]


@linux_only
def test_products_and_factors_are_those_of_the_reference_blas() -> None:
    code = """
    import json
    import mlx.core as mx
    from mlx_mmfree.platform import blas
    blas.bind()
    mx.random.seed(1)
    a = mx.random.normal((33, 65))
    square = a @ a.T
    factor = mx.linalg.cholesky(square, stream=mx.cpu)
    results = [square, factor, mx.linalg.inv(square, stream=mx.cpu)]
    print(json.dumps([result.tolist() for result in results]))
    """
    bound, reference = (json.loads(run_python(code, MLX_MMFREE_BLAS=s)) for s in ("1", "0"))
    for got, wanted in zip(bound, reference, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


@linux_only
def test_every_blas_import_of_mlx_is_bound() -> None:
    imported = {
        slot.symbol
        for slot in blas.imported_slots("libmlx.so")
        if slot.symbol.startswith("cblas_") or slot.symbol.endswith(("trf_", "tri_", "evd_"))
    }
    assert {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "sgetrf_", "ssyevd_"} <= imported
    assert imported <= set(blas.bind().symbols)


@linux_only
def test_protected_slots_are_written_and_protected_again() -> None:
    def permissions(address: int) -> str:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, flags = line.split()[:2]
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= address < high:
                return flags
        raise LookupError(address)

    slot = next(s for s in blas.imported_slots("libmlx.so") if not s.is_writable)
    before = ctypes.c_uint64.from_address(slot.address).value
    assert permissions(slot.address).startswith("r--")
    blas.write_slot(slot, 12345)
    written = ctypes.c_uint64.from_address(slot.address).value
    blas.write_slot(slot, before)
    assert written == 12345
    assert permissions(slot.address).startswith("r--")


def test_libraries_that_are_not_loaded_have_no_slots() -> None:
    if sys.platform == "linux":
        assert list(blas.imported_slots("libnothing.so")) == []
    else:
        assert blas.bind().symbols == ()


@linux_only
def test_one_warning_when_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_binding", None)
    monkeypatch.setattr(blas, "imported_slots", lambda library: iter(()))
    monkeypatch.delenv(blas.SWITCH, raising=False)
    with pytest.warns(RuntimeWarning, match="imports no BLAS") as caught:
        assert blas.bind().is_needed
        blas.bind()
    assert len(caught) == 1


@linux_only
def test_openblas_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> ctypes.CDLL:
        raise OSError("wrong ELF class")

    monkeypatch.setattr(blas, "_binding", None)
    monkeypatch.setattr(blas, "load_openblas", fail)
    monkeypatch.delenv(blas.SWITCH, raising=False)
    with pytest.warns(RuntimeWarning, match="does not load .wrong ELF class"):
        assert blas.bind().symbols == ()
