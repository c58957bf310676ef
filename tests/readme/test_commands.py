"""Every command and every Python block of the README files runs as it is written.

A section is one shell script, in a folder of its own, beside a stand-in of the Hub that serves tiny
models under the published names. The lines with which a user installs are run by `.ci/run`.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_mmfree.cli.parts.registry import command_names
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import TOKEN, HubServer
from tests.readme.documents import BENCHMARKS, FOLDERS, MAIN, ROOT, Section, sections
from tests.readme.stand_ins import write_repositories, write_working_folder

RUN_BY_CI = ("git clone ", "pip ", "python3 -m venv ")
# .ci/release runs these, but for Homebrew's
RUN_BY_RELEASE = ("brew ", "pipx ", "uv ")
# the tests of the server run these against one that is running
RUN_BY_SERVER = ("curl ",)
# the test of the program in C++ runs what these lines run
RUN_BY_CPP = ("cmake ", "build/decode/decode ")
# lm-evaluation-harness, its datasets and matplotlib are not at hand; measurements and distillations
# take long
ONLY_PARSED = (
    "mmfree evaluate ",
    "python examples/benchmarks/",
    "python -m tests.generation.ngram_speed",
    "mmfree show attention ",
    "mmfree classify --picture ",
    "mmfree serve ",
    "mmfree bench --config ",
    "mmfree distil ",
    "mmfree ternarize ",
    "mmfree calibrate ",
    "mmfree launch -n 2 train --config examples/demo_model/longer/",
)
# pytest runs these by itself, and the examples with `--quick`
RUN_BY_PYTEST = ("python -m pytest ", "python examples/")
# a shell goes on where a command between $( ) fails
COMPLAINTS = ("Traceback", "command not found", "No module named")
TYPED = "Hello\n/exit\n"
SHIMS = {
    "mmfree": "-m mlx_mmfree",
    "python": "",
    "python3": "",
    "register-python-argcomplete": "-m argcomplete.scripts.register_python_argcomplete",
}


def is_name(command: str) -> bool:
    """Returns whether it only names a command, which needs flags to run."""
    words = command.split()
    if words[0] != "mmfree" or len(words) != 2:
        return False
    assert words[1] in command_names(), command
    parser = importlib.import_module(f"mlx_mmfree.cli.{words[1]}").build_parser()
    return any(action.required for action in parser._actions)


def lines_to_run(section: Section) -> list[str]:
    return [
        line
        for line in section.commands()
        if not (
            line.startswith(
                (
                    *RUN_BY_CI,
                    *RUN_BY_RELEASE,
                    *RUN_BY_SERVER,
                    *RUN_BY_CPP,
                    *RUN_BY_PYTEST,
                    *ONLY_PARSED,
                )
            )
            or is_name(line)
        )
    ]


def scripts() -> list[Section]:
    """The sections that have something to run that none before them had."""
    found: list[Section] = []
    seen: set[str] = set()
    for file in (MAIN, *FOLDERS):
        for section in sections(file):
            commands = [line for line in lines_to_run(section) if not line.startswith("export ")]
            wanted = {*commands, *section.blocks("python")}
            if wanted - seen:
                found.append(section)
            seen |= wanted
    return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(write_repositories(tmp_path_factory.mktemp("hub"))) as server:
        yield server


@pytest.fixture
def environment(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    """The programs of this interpreter come first, and the Hub is the stand-in."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, arguments in SHIMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    return HubClient.environment(hub.url, tmp_path, TOKEN) | {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
    }


# sections that take more than some seconds
LONG = {".: Fine-tune", "mlx_mmfree/training: Memory"}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "section",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.exhaustive] * (each.name in LONG))
        for each in scripts()
    ],
)
def test_section_runs(section: Section, environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    write_working_folder(folder)
    lines = list(dict.fromkeys(lines_to_run(section)))
    if code := "\n".join(section.blocks("python")):
        (folder / "block.py").write_text(code)
        lines.append("python block.py")
    finished = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment,
        input=TYPED,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stderr
    assert not [words for words in COMPLAINTS if words in finished.stderr], finished.stderr
    assert finished.stdout.strip()


@pytest.mark.parametrize("file", [MAIN, *FOLDERS], ids=lambda file: file.parent.name)
def test_what_is_not_run_is_parsed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for section in sections(file):
        for line in section.commands():
            if line.startswith(ONLY_PARSED):
                _, name, *flags = shlex.split(line.replace("python -m ", "python "))
                program = name.removesuffix(".py").rpartition("/")[2]
                module = program if "/" in name or "." in name else f"mlx_mmfree.cli.{name}"
                importlib.import_module(module).build_parser().parse_args(flags)


def test_what_is_installed_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[<>=;]", line)[0] for line in project["dependencies"]}
    lines = [line for section in sections(MAIN) for line in section.commands()]
    wanted = [match[1] for line in lines if (match := re.match(r"pip install (\S+)", line))]
    assert wanted
    for target in (text.strip('"') for text in wanted):
        extra = re.fullmatch(r"\.(?:\[([\w,]+)\])?", target)
        if extra:
            names = {*extra[1].split(",")} if extra[1] else set()
            assert names <= project["optional-dependencies"].keys(), target
        else:
            # the library itself, as a user installs it
            assert target in required or target.startswith("mlx-mmfree["), target
