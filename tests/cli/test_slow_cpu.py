"""Commands say once that the compiled CPU kernels are missed, and how to get them."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts import loading
from mlx_mmfree.native import loader
from mlx_mmfree.ops import use_backend

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="a GPU does not need the CPU kernels"
)


@pytest.fixture(autouse=True)
def not_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    loading._warn_of_slow_cpu.cache_clear()
    monkeypatch.setattr(loader, "PACKAGE", "_mlx_mmfree_absent")
    loader._load.cache_clear()
    yield
    loading._warn_of_slow_cpu.cache_clear()
    loader._load.cache_clear()


def generate(folder: Path) -> int:
    return main(["generate", "--model", str(folder), "--prompt", "a", "--max-tokens", "1"])


def test_one_warning_with_the_hint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder) == 0 and generate(folder) == 0
    shown = capsys.readouterr().err
    assert shown.count("warning:") == 1
    assert "takes 10 to 20 times as long" in shown
    assert "the CPU extension was not built" in shown and "pip install" in shown


def test_who_asks_for_plain_operations_is_not_warned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with use_backend("reference"):
        assert generate(folder) == 0
    assert "warning:" not in capsys.readouterr().err


def test_built_kernels_need_no_warning(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    loader._load.cache_clear()
    if reason := loader.unavailable():
        pytest.skip(reason)
    assert generate(folder) == 0
    assert "warning:" not in capsys.readouterr().err
