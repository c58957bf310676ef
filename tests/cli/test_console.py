"""The console program: commands, exit statuses, one line for each mistake."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mlx_mmfree import __version__
from mlx_mmfree.cli import main
from mlx_mmfree.cli.console import argument_errors, command, command_names
from mlx_mmfree.errors import CheckpointError, UsageError

ROOT = Path(__file__).parents[2]


def test_commands_are_found_by_file_name() -> None:
    assert {"convert", "generate"} <= set(command_names())
    files = {file.stem for file in (ROOT / "mlx_mmfree" / "cli").glob("*.py")}
    shared = {
        "__init__",
        "bench_table",
        "console",
        "flags",
        "loading",
        "process_group",
        "prompts",
        "sampling",
    }
    assert set(command_names()) == files - shared


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in command_names())


@pytest.mark.parametrize("name", command_names())
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([name, "--help"])
    assert ending.value.code == 0
    assert f"mmfree {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mmfree {__version__}\n"


def test_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generat"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    known = ", ".join(command_names())
    assert shown.err.startswith(f"error: [mmfree] the command must be one of {known} but got")
    assert shown.err.count("\n") == 1


def ending_with(error: BaseException) -> Callable[[Sequence[str] | None], int]:
    def fail(argv: Sequence[str] | None = None) -> int:
        raise error

    return command(fail)


def test_own_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending_with(CheckpointError("[load] two\n lines."))(None) == 2
    assert capsys.readouterr().err == "error: [load] two lines.\n"


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(ValueError, match="a bug"):
        ending_with(ValueError("a bug"))(None)


def test_refused_arguments_are_the_users_mistake() -> None:
    with pytest.raises(UsageError, match="'temp' must"), argument_errors():
        raise ValueError("'temp' must not be negative")


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending_with(KeyboardInterrupt())(None) == 130
    assert capsys.readouterr().err == "\n"


def run(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("program", ["generate.py", "convert.py"])
def test_programs_of_the_checkout(program: str) -> None:
    process = run(program, "--model", "no/such/folder")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1


def test_closed_pipe_is_silent(folder: Path) -> None:
    # The text is long enough to be written while the other end is closed.
    process = run("generate.py", "--model", str(folder), "-m", "500", "-p", "A", "--verbose", "F")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""
    process.stderr.close()
