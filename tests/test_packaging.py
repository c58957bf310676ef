"""The promises of pyproject.toml."""

import hashlib
import importlib
import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_mmfree import __version__
from mlx_mmfree.version import REPOSITORY

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
    text = (ROOT / ".github/workflows/release.yml").read_text()
    release = yaml.safe_load(text)
    assert release["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    jobs = release["jobs"]
    for name, environment in (("publish", "pypi"), ("rehearsal", "testpypi")):
        assert jobs[name]["permissions"] == {"id-token": "write"}
        assert jobs[name]["environment"] == environment
    built = {"source", "linux", "macos", "test"}
    assert set(jobs["files"]["needs"]) == built
    assert jobs.keys() - built == {"files", "rehearsal", "publish", "github"}


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_actions_are_pinned_by_commit(file: Path) -> None:
    used = re.findall(r"uses: *(\S+)(.*)", file.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


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
    assert set(release["jobs"]["test"]["strategy"]["matrix"]["python"]) == promised


def module(name: str) -> Any:
    """A script of `.ci`, which is no package."""
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_the_page_of_pypi_has_links_that_lead_somewhere() -> None:
    page = module("package_metadata").pypi_page()
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", page))
    assert len(links) > 10
    assert not [link for link in links if not link.startswith("https://")]
    own = [link for link in links if link.startswith(REPOSITORY)]
    for link in own:
        path = link.removeprefix(f"{REPOSITORY}/blob/v{__version__}/").partition("#")[0]
        assert (ROOT / path).exists(), link
    assert f"git clone {REPOSITORY} mlx_mmfree" in page
    assert "released yet" not in page and "released yet" in (ROOT / "README.md").read_text()


def test_placeholders_of_the_main_page_are_no_release() -> None:
    unfilled = module("check_release").unfilled
    page = (ROOT / "README.md").read_text()
    named = page.replace("git clone ADDRESS", "git clone https://github.com/me/x")
    assert unfilled("https://github.com/OWNER/x", named.replace(" OWNER/", " me/"))
    assert unfilled("https://github.com/me/x", named)
    assert not unfilled("https://github.com/me/x", named.replace(" OWNER/", " me/"))
    assert unfilled("https://github.com/me/y", named.replace(" OWNER/", " me/"))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](b/c.md#d)", "[a](https://github.com/me/x/blob/v1/b/c.md#d)"),
        ("[a](#d)", "[a](https://github.com/me/x/blob/v1/README.md#d)"),
        ("![a](b.svg)", "![a](https://raw.githubusercontent.com/me/x/v1/b.svg)"),
        (
            "[![a](b.svg)](c)",
            "[![a](https://raw.githubusercontent.com/me/x/v1/b.svg)](https://github.com/me/x/blob/v1/c)",
        ),
        ("[a](https://b.c)", "[a](https://b.c)"),
        ("`[a](b)`", "`[a](b)`"),
        ("```py\nx[a](b)\n```", "```py\nx[a](b)\n```"),
    ],
)
def test_links_become_absolute(written: str, shown: str) -> None:
    absolute = module("package_metadata").absolute
    assert absolute(written, "https://github.com/me/x", "v1") == shown


def described(mlx: str) -> str:
    return (
        f"Metadata-Version: 2.4\nProject-URL: Homepage, {REPOSITORY}\n"
        f"Requires-Dist: mlx{mlx}; sys_platform == 'darwin'\n"
        f"Requires-Dist: mlx[cpu]{mlx}; sys_platform == 'linux'\n"
        "Requires-Dist: mlx-lm<1,>=0.3; extra == 'test'\n\nA page.\n"
    )


def test_a_wheel_with_kernels_requires_the_mlx_that_it_was_built_with() -> None:
    pinned = module("pin_mlx").pinned(described("<0.33,>=0.32.4"), "0.32.5")
    assert pinned == described("==0.32.5").replace("mlx-lm==0.32.5", "mlx-lm<1,>=0.3")
    check = module("check_release").check_metadata
    kernels = 'MLX_VERSION = "0.32.5"\n'
    assert check(pinned, kernels) == []
    assert check(described("<0.33,>=0.32.4"), None) == []
    assert "exactly MLX 0.32.5" in check(described("<0.33,>=0.32.4"), kernels)[0]
    assert "a range of MLX" in check(pinned, None)[0]
    assert "lead nowhere" in check(described(">=0.32.4") + "[a](b.md)", None)[0]


@pytest.mark.parametrize("name", module("readme_commands").PREFIXES)
def test_each_installing_command_stands_once_in_the_main_page(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = module("readme_commands")
    commands.main(name)
    line = capsys.readouterr().out.strip()
    assert line.startswith(commands.PREFIXES[name]) and "`" not in line


@pytest.mark.parametrize("systems", [["macosx_14_0_arm64"], ["manylinux_2_35_x86_64"], None])
def test_every_field_of_the_formula_is_filled(tmp_path: Path, systems: list[str] | None) -> None:
    files = module("release_files")
    wheels = []
    for system in systems or files.SYSTEMS.values():
        wheels.append(tmp_path / f"mlx_mmfree-{__version__}-cp313-cp313-{system}.whl")
        wheels[-1].write_text(system)
    formula = files.formula(wheels)
    for wheel in wheels:
        address = f"{REPOSITORY}/releases/download/v{__version__}/{wheel.name}"
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        assert re.search(
            rf'url "{re.escape(address)}", using: :nounzip\n *sha256 "{digest}"', formula
        )
    assert formula.count("sha256") == len(wheels)
    assert 'depends_on "python@3.13"' in formula and f'version "{__version__}"' in formula
    assert "# begin" not in formula and "# end" not in formula
    with pytest.raises(SystemExit, match="no wheel"):
        files.formula([])


def test_a_release_has_the_notes_of_its_version() -> None:
    notes = module("release_files").notes()
    assert notes.startswith("The first version.") and "](../" not in notes


def test_failed_tests_are_sorted_by_kind(tmp_path: Path) -> None:
    failures = runpy.run_path(str(ROOT / ".github/failures.py"))
    file = tmp_path / "x.xml"
    texts = ["assert relative_error(a) &lt;= 1", "The kernel k is switched off on M1", "KeyError"]
    cases = (
        f'<testcase classname="t" name="n{n}"><failure message="{text}"/></testcase>'
        for n, text in enumerate(texts)
    )
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    kinds = [kind for kind, _, _ in failures["failures"](file)]
    switched_off, beyond = failures["KINDS"]
    assert kinds == [beyond, switched_off, failures["OTHER"]]


def test_missing_reports_are_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / ".github/failures.py"))["main"]
    main(str(tmp_path / "*.xml"))
    out = capsys.readouterr().out
    assert "No test failed" not in out and "No report of tests was written" in out
    (tmp_path / "x.xml").write_text("<testsuites/>")
    main(str(tmp_path / "x.xml"))
    assert capsys.readouterr().out == "No test failed.\n"


def test_what_repairs_wheels_finds_its_package() -> None:
    settings = PROJECT["tool"]["cibuildwheel"]
    assert "pin_mlx.py" in settings["repair-wheel-command"]
    assert settings["before-build"].endswith("pip install wheel")
