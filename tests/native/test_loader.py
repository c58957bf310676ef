"""The loader tells "not built", "built for another version" and "does not load" apart."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from mlx_mmfree import native
from mlx_mmfree.errors import BackendError, UsageError
from mlx_mmfree.native import loader
from mlx_mmfree.version import __version__

MLX = version("mlx")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable folder; the compiled package is looked for under a name of its own."""
    monkeypatch.setattr(loader, "PACKAGE", "_fake_native")
    monkeypatch.setattr(loader.blas, "share", lambda share_products: None)
    monkeypatch.syspath_prepend(tmp_path)
    loader._load.cache_clear()
    yield tmp_path
    loader._load.cache_clear()
    for name in [name for name in sys.modules if name.startswith("_fake_native")]:
        del sys.modules[name]


# what the loader calls
FUNCTIONS = "def set_threads(count): pass\nshare_products = None"


def write_package(
    site: Path,
    *,
    library: str = __version__,
    mlx: str = MLX,
    sources: str | None = loader.sources.digest(),
    ext: str = "",
) -> None:
    package = site / "_fake_native"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"__version__ = {library!r}\nMLX_VERSION = {mlx!r}\nSOURCES = {sources!r}\n"
    )
    (package / "_ext.py").write_text(ext)
    importlib.invalidate_caches()


def test_loads(site: Path) -> None:
    write_package(site, ext=f"answer = 42\n{FUNCTIONS}")
    assert native.unavailable() is None
    assert native.kernels().answer == 42


def test_not_built(site: Path) -> None:
    assert "was not built" in (native.unavailable() or "")
    with pytest.raises(BackendError, match=r"\[native\] the CPU extension was not built.*Rebuild"):
        native.kernels()


def test_built_for_another_mlx(site: Path) -> None:
    write_package(site, mlx="0.1.2", ext="raise SystemError('must not be imported')")
    reason = native.unavailable()
    assert reason is not None
    assert f"built for MLX 0.1.2 but MLX {MLX} is running" in reason


def test_built_from_another_source(site: Path) -> None:
    write_package(site, library="0.0.7")
    reason = native.unavailable()
    assert reason is not None
    assert f"built for mlx_mmfree 0.0.7 but mlx_mmfree {__version__} is running" in reason


@pytest.mark.parametrize(
    ("digest", "end"),
    [(None, "--no-deps --no-binary mlx-mmfree mlx-mmfree"), ("12", "--no-deps .")],
)
def test_the_hint_is_that_of_the_installation(
    site: Path, monkeypatch: pytest.MonkeyPatch, digest: str | None, end: str
) -> None:
    monkeypatch.setattr(loader.sources, "digest", lambda: digest)
    assert (native.unavailable() or "").endswith(end)


def test_built_before_the_sources_changed(site: Path) -> None:
    write_package(site, sources="0123", ext="raise SystemError('must not be imported')")
    wanted = "was built from other C++ sources than those here. Rebuild it"
    assert wanted in (native.unavailable() or "")


def test_an_installed_package_has_no_sources_to_compare(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader.sources, "digest", lambda: None)
    write_package(site, sources="0123", ext=FUNCTIONS)
    assert native.unavailable() is None


def test_environment_chooses_the_instructions(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(
        site,
        ext=f"{FUNCTIONS}\n"
        "def kernel_names(): return ['fast', 'portable']\n"
        "def use_kernels(name):\n    global used\n    used = name\n",
    )
    monkeypatch.setenv("MLX_MMFREE_CPU_KERNELS", "portable")
    assert native.kernels().used == "portable"
    loader._load.cache_clear()
    monkeypatch.setenv("MLX_MMFREE_CPU_KERNELS", "quick")
    with pytest.raises(
        UsageError, match=r"must be one of fast, portable on this .* but got 'quick'"
    ):
        native.kernels()


def test_does_not_load(site: Path) -> None:
    write_package(site, ext="raise ImportError('undefined symbol: _ZN3mlx')")
    reason = native.unavailable()
    assert reason is not None
    assert "was built but does not load: undefined symbol: _ZN3mlx" in reason


def test_a_damaged_library_does_not_load(site: Path) -> None:
    write_package(site)
    (site / "_fake_native/_ext.py").unlink()
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (site / f"_fake_native/_ext{suffix}").write_bytes(b"not a library")
    assert "was built but does not load" in (native.unavailable() or "")


def test_other_import_errors_inside_the_package_are_bugs(site: Path) -> None:
    write_package(site)
    (site / "_fake_native/__init__.py").write_text("import no_such_module_anywhere")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        native.unavailable()


def test_installed_extension_is_found_from_the_checkout() -> None:
    """This interpreter sees the compiled package if it is installed."""
    loader._load.cache_clear()
    code = "import importlib.util as u; print(u.find_spec('_mlx_mmfree_native') is not None)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if run.stdout.strip() == "False":
        assert "was not built" in (native.unavailable() or "")
    else:
        assert native.unavailable() is None
