"""What pyproject.toml promises."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_built_and_run_with_the_same_range_of_mlx() -> None:
    built, run = (
        {requirement for requirement in requirements if requirement.startswith("mlx")}
        for requirements in (
            PROJECT["build-system"]["requires"],
            PROJECT["project"]["dependencies"],
        )
    )
    assert len(run) == 2
    assert built == run


@pytest.mark.parametrize("extra", ["test", "plot", "dev"])
def test_extras_do_not_ask_for_torch(extra: str) -> None:
    requirements = PROJECT["project"]["optional-dependencies"][extra]
    assert not [r for r in requirements if r.startswith(("torch", "transformers", "peft", "timm"))]


def test_core_does_not_ask_for_torch_or_transformers() -> None:
    requirements = PROJECT["project"]["dependencies"]
    assert not [r for r in requirements if r.startswith(("torch", "transformers"))]


def test_native_sources_do_not_promise_an_own_build_file() -> None:
    assert not (ROOT / "setup.py").exists()
    assert not (ROOT / "CMakeLists.txt").exists()
