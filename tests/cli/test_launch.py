"""`mmfree launch`: how a group of processes ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_mmfree.cli.launch import main, wait
from mlx_mmfree.training.log import read_log
from tests.process_group import ROOT
from tests.training.conftest import config, run_values  # noqa: F401


def _python(program: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", program], text=True)


def test_a_run_in_two_processes(
    config: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert main(["-n", "2", "--", "train", "--config", str(config)]) == 0
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    log = read_log(config.parent / "run/log.jsonl")
    assert log[0]["processes"] == 2
    assert len([record for record in log if "loss" in record]) == 6
    assert (config.parent / "run" / "model" / "model.safetensors").exists()


def test_a_killed_process_gives_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    processes = [_python("import time; time.sleep(600)"), _python(killed)]
    assert wait(processes, grace_s=0.5) == 128 + signal.SIGKILL
    assert processes[0].returncode == -signal.SIGTERM
    assert "Process 1 of 2 ended with status 137." in capsys.readouterr().err


def test_one_that_ignores_the_end_is_killed() -> None:
    deaf = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); "
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", deaf], text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as said:
        said.readline()
    assert wait([process, _python("raise SystemExit(3)")], grace_s=0.3) == 3
    assert process.returncode == -signal.SIGKILL


def test_ctrl_c_reaches_all(config: Path) -> None:  # noqa: F811
    config.write_text(config.read_text().replace("steps: 6\n", "steps: 100000\n"))
    run = config.parent / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_mmfree", "launch", "train", "--config", str(config)],
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
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
    assert "the command must be one of bench, " in capsys.readouterr().err
