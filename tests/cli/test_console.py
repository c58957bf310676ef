"""The console program: commands, exit statuses, one line for each mistake."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mlx_mmfree import __version__
from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts.command import argument_errors, command
from mlx_mmfree.cli.parts.registry import command_names
from mlx_mmfree.errors import CheckpointError, UsageError

ROOT = Path(__file__).parents[2]


def test_commands_are_found_by_file_name() -> None:
    assert {"convert", "generate"} <= set(command_names())
    files = {file.stem for file in (ROOT / "mlx_mmfree" / "cli").glob("*.py")}
    shared = {
        "__init__",
        "console",
        "flags",
        "loading",
        "process_group",
        "prompts",
        "reports",
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
    assert main(["xyzzy"]) == 2
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


@pytest.mark.exhaustive
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


def test_help_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert "usage: mmfree <command>" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ending:
        main(["help", "generate"])
    assert ending.value.code == 0
    assert "usage: mmfree generate" in capsys.readouterr().out
    assert main(["help", "generat"]) == 2
    assert "the command must be one of" in capsys.readouterr().err


def test_the_package_runs_as_a_module() -> None:
    out, _ = run("-m", "mlx_mmfree", "--version").communicate(timeout=60)
    assert out == f"mmfree {__version__}\n"


def test_messages_name_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--model", "no such model"]) == 2
    shown = capsys.readouterr().err
    assert "error: --model must be an existing folder" in shown and "path_or_repo" not in shown
    target = str(ROOT / "tests")
    demo = str(ROOT / "mlx_mmfree" / "demo")
    assert main(["convert", "--model", demo, "--mlx-path", target]) == 2
    shown = capsys.readouterr().err
    assert "[convert] --mlx-path must be a new or empty folder but" in shown
    assert "Pass --overwrite to" in shown
    assert main(["generate", "--draft-model", "no such draft", "-m", "1"]) == 2
    assert "error: --draft-model must be an existing folder" in capsys.readouterr().err
    assert main(["lora", "--train", "--report-to", "seed"]) == 2
    assert "--report-to must be wandb or tensorboard but got 'seed'." in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--seed", "--max-tokens", "--top-k", "--wired-limit"])
def test_numbers_too_large_for_mlx_are_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", flag, "1" * 23]) == 2
    shown = capsys.readouterr().err
    assert f"argument {flag}" in shown and " to " in shown and shown.count("\n") == 1


def test_what_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending_with(PermissionError(13, "Permission denied", "/x"))(None) == 2
    assert capsys.readouterr().err == (
        "error: the system refused: [Errno 13] Permission denied: '/x'.\n"
    )


@pytest.mark.parametrize("arguments", [["help"], ["help", "models"]])
def test_a_full_output_is_one_line(arguments: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "mlx_mmfree", *arguments],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert process.returncode == 2
    assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1


def in_shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line.format(mmfree=f"'{sys.executable}' -m mlx_mmfree")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_closed_streams() -> None:
    done = in_shell("{mmfree} --version >&-")
    assert done.returncode == 2
    assert "standard output must be open but is closed" in done.stderr
    for closed in ("<&-", "2>&-"):
        assert in_shell(f"{{mmfree}} --version {closed}").stdout == f"mmfree {__version__}\n"


def test_a_prompt_from_a_closed_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "--prompt", "-"]) == 2
    shown = capsys.readouterr().err
    assert "standard input must hold the prompt" in shown and shown.count("\n") == 1
    # this stands for the closed input
    sys.stdin.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ImportError", "RuntimeError"])
def test_ctrl_c_during_imports(error: str, tmp_path: Path) -> None:
    # numpy and extension modules make errors of their own of a KeyboardInterrupt
    (tmp_path / "tokenizers.py").write_text(
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        f"except KeyboardInterrupt:\n    raise {error} from None\n"
    )
    process = subprocess.run(
        [sys.executable, "-m", "mlx_mmfree", "generate", "-m", "1"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (130, "\n")


def test_importing_the_package_or_a_command_loads_no_mlx() -> None:
    code = (
        "import sys, mlx_mmfree, mlx_mmfree.cli, mlx_mmfree.cli.generate, mlx_mmfree.cli.chat\n"
        "print([name for name in ('mlx', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    out, _ = run("-c", code).communicate(timeout=60)
    assert out == "[]\n"


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from mlx_mmfree.cli import main; main(['--help'])\n"
        "print([name for name in sys.modules if name.startswith(('mlx', 'numpy', 'yaml'))])"
    )
    out, _ = run("-c", code).communicate(timeout=60)
    loaded = out.splitlines()[-1]
    assert "mlx_mmfree.cli.parts.command" in loaded
    assert "mlx_mmfree.cli.lora" not in loaded and "numpy" not in loaded and "'mlx'" not in loaded
