"""The promises of pyproject.toml."""

import tomllib
from pathlib import Path

import pytest
import yaml

from mlx_mmfree import __version__

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


def test_the_changelog_has_this_version() -> None:
    changelog = (ROOT / ".github/CHANGELOG.md").read_text()
    assert f"\n## {__version__}\n" in changelog


def test_jobs_wait_for_jobs_that_are_there() -> None:
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(file.read_text())["jobs"]
        assert all(set(job.get("needs", [])) <= jobs.keys() for job in jobs.values())


def test_releases_are_published_without_a_password() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert release["permissions"] == {"contents": "read"}
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()
    assert set(publish["needs"]) == release["jobs"].keys() - {"publish"}


def test_wheels_are_built_for_every_python_that_is_promised() -> None:
    names = PROJECT["project"]["classifiers"]
    promised = {name.rsplit(" ", 1)[1] for name in names if "Python :: 3." in name}
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    linux = set(release["jobs"]["linux"]["strategy"]["matrix"]["python"])
    macos = {
        f"3.{each.removeprefix('cp3').removesuffix('-*')}"
        for each in PROJECT["tool"]["cibuildwheel"]["build"].split()
    }
    assert linux == macos == promised
