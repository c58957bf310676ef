"""`mmfree launch`: how a group of processes ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.cli.launch import main, wait
from mlx_mmfree.training.results import read_log
from tests.process_group import ROOT
from tests.training.conftest import config, run_values  # noqa: F401

LAUNCH = [sys.executable, "-m", "mlx_mmfree", "launch"]
ENVIRONMENT = os.environ | {
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
WAITS = "import time; print(flush=True); time.sleep(600)"
BACKENDS = ["ring", *(["mpi"] if shutil.which("mpirun") else [])]
"""The backends that can connect processes on this machine."""


def _python(program: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program], text=True, start_new_session=True, **options
    )


def _ready(program: str) -> "subprocess.Popen[str]":
    """A process that has come as far as to print its first line."""
    process = _python(program, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        output.readline()
    return process


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def _ranks(launcher: int) -> list[int]:
    """The processes that a launcher has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [int(child) for child in children.split()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_in_two_processes(config: Path, backend: str) -> None:  # noqa: F811
    command_line = [
        *LAUNCH,
        "-n",
        "2",
        "--backend",
        backend,
        "--",
        "train",
        "--config",
        str(config),
    ]
    done = subprocess.run(
        command_line, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    log = read_log(config.parent / "run/log.jsonl")
    assert log[0]["processes"] == 2
    assert len([record for record in log if "loss" in record]) == 6
    assert (config.parent / "run" / "model" / "model.safetensors").exists()


@pytest.mark.exhaustive
def test_a_run_in_one_process(config: Path) -> None:  # noqa: F811
    words = [*LAUNCH, "-n", "1", "train", "--config", str(config)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert read_log(config.parent / "run/log.jsonl")[0]["processes"] == 1


def test_signals_are_handled_as_before_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    assert main(["-n", "2", "models", "--help"]) == 0
    assert [signal.getsignal(number) for number in numbers] == handlers


def test_mpi_without_mpirun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["--backend", "mpi", "train"]) == 2
    assert "--backend must be ring where there is no 'mpirun' but got 'mpi'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_process_gives_its_status(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = f"import os, signal; signal.signal({number}, 0) if {number} != 9 else 0; "
    processes = [_ready(WAITS), _python(killed + f"os.kill(os.getpid(), {number})")]
    assert wait(processes, grace_s=0.3) == 128 + number
    assert processes[0].returncode == -signal.SIGTERM
    assert capsys.readouterr().err.splitlines() == [
        f"Process 1 of 2 was ended by {number.name} (status {128 + number}).",
        "Process 0 of 2 was ended by SIGTERM (status 143).",
    ]


def test_the_first_that_fails_gives_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    # as soon as the other notices the loss, it fails with a status of its own
    dies = "import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 9)"
    notices = "import sys; sys.stdin.read(); raise SystemExit(2)"
    read, write = os.pipe()
    first = _python(notices, stdin=read)
    second = _python(dies, stdin=subprocess.PIPE, stdout=write)
    os.close(read)
    os.close(write)
    assert second.stdin is not None
    with second.stdin as reported:
        reported.write("now\n")
    assert wait([first, second]) == 128 + signal.SIGKILL
    assert capsys.readouterr().err.splitlines() == [
        "Process 1 of 2 was ended by SIGKILL (status 137).",
        "Process 0 of 2 ended with status 2.",
    ]


def test_one_that_ignores_the_end_is_killed() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS
    process = _ready(deaf)
    assert wait([process, _python("raise SystemExit(3)")], grace_s=0.3) == 3
    assert process.returncode == -signal.SIGKILL


def test_what_a_killed_process_started_is_ended_too() -> None:
    starts = (
        "import os, subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {WAITS!r}], stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    process = _python(starts, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        child = int(output.readline())
    assert wait([process]) == 128 + signal.SIGKILL
    while _is_running(child):
        time.sleep(0.01)


@pytest.mark.exhaustive
def test_a_mistake_at_the_start_gives_its_status(tmp_path: Path) -> None:
    command_line = [*LAUNCH, "-n", "2", "train", "--config", str(tmp_path / "none.yaml")]
    done = subprocess.run(
        command_line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.count("must be a readable YAML file") == 2
    assert "Process 0 of 2 ended with status 2." in done.stderr
    assert "Process 1 of 2 ended with status 2." in done.stderr


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="lists processes through /proc")
def test_a_killed_rank_and_a_killed_launcher_leave_nobody(config: Path) -> None:  # noqa: F811
    config.write_text(config.read_text().replace("steps: 6\n", "steps: 100000\n"))
    for victim, status in ((1, 128 + signal.SIGKILL), (None, -signal.SIGKILL)):
        launcher = subprocess.Popen(
            [*LAUNCH, "train", "--config", str(config)],
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        before = len(read_log(config.parent / "run" / "log.jsonl"))
        while len(read_log(config.parent / "run" / "log.jsonl")) < before + 3:
            assert launcher.poll() is None
            time.sleep(0.02)
        ranks = _ranks(launcher.pid)
        assert len(ranks) == 2
        os.kill(launcher.pid if victim is None else ranks[victim], signal.SIGKILL)
        assert launcher.wait(timeout=300) == status
        while any(_is_running(rank) for rank in ranks):
            time.sleep(0.02)


@pytest.mark.exhaustive
def test_ctrl_c_reaches_all(config: Path) -> None:  # noqa: F811
    config.write_text(config.read_text().replace("steps: 6\n", "steps: 100000\n"))
    run = config.parent / "run"
    process = subprocess.Popen(
        [*LAUNCH, "train", "--config", str(config)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and len(read_log(run / "log.jsonl")) < 4:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT
    assert error.count("[training] SIGINT stopped the run after step") == 2
    assert (run / "checkpoint").exists()


@pytest.mark.parametrize("words", [[], ["launch"], ["traim"]])
def test_other_commands_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "the command must be one of audit, " in capsys.readouterr().err
