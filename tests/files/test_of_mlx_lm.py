"""The error for an unknown architecture speaks of mlx-lm, which is not imported for it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.files.plugins import of_mlx_lm
from mlx_mmfree.models import find

UTILS = """
raise ImportError("it must not be imported")
MODEL_REMAPPING = {
    "renamed": "a_model",  # a note
}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed mlx-lm that fails where it is imported."""
    folder = tmp_path / "site" / "mlx_lm"
    (folder / "models").mkdir(parents=True)
    (folder / "__init__.py").write_text(UTILS)
    (folder / "utils.py").write_text(UTILS)
    (folder / "models" / "a_model.py").write_text(
        "import mlx\n\n\nclass Model(nn.Module):\n    pass\n"
    )
    (folder / "models" / "cache.py").write_text("class KVCache:\n    pass\n")
    monkeypatch.delitem(sys.modules, "mlx_lm", raising=False)
    monkeypatch.syspath_prepend(folder.parent)
    return folder


@pytest.mark.parametrize("model_type", ["a_model", "renamed"])
def test_its_command_is_named(package: Path, model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mlx-lm has it: mlx_lm\.generate --model"):
        find(model_type)
    assert "mlx_lm" not in sys.modules


@pytest.mark.parametrize(
    "model_type", ["other", "cache", "../a_model", "models/a_model", "", ["a"], None]
)
def test_what_it_lacks_is_reported(package: Path, model_type: Any) -> None:
    assert of_mlx_lm(model_type) == "The installed mlx-lm does not have it either."


def test_files_of_another_version(package: Path) -> None:
    (package / "utils.py").unlink()
    assert "has it" in of_mlx_lm("a_model") and "does not" in of_mlx_lm("renamed")


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "is not installed: pip install mlx-lm" in of_mlx_lm("a_model")


@pytest.mark.interop
def test_the_installed_one() -> None:
    code = (
        "import sys; from mlx_mmfree.files.plugins import of_mlx_lm;"
        "assert all('has it:' in of_mlx_lm(name) for name in ('mistral', 'phi3', 'gemma2'));"
        "assert 'not have it' in of_mlx_lm('cache'); assert 'mlx_lm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
