"""A confined process answers, keeps its limits, and outlives nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_mmfree.platform.confinement import loop, policy, process
from mlx_mmfree.platform.confinement.chunks import Builder
from mlx_mmfree.platform.confinement.process import (
    Branch,
    ConfinedProcess,
    LimitError,
    TimeLimitError,
)
from tests.platform import confined_work

ROOT = Path(__file__).parents[2]
CPU_SECONDS = 60.0
MEMORY_BYTES = 256 * 2**20


@pytest.fixture
def confined() -> Iterator[ConfinedProcess]:
    made = ConfinedProcess(confined_work.__name__, (), MEMORY_BYTES)
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_gone(process_id: int) -> bool:
    """Returns whether a process that is no child of this one has ended."""
    shown = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(process_id)], capture_output=True, text=True
    )
    return shown.stdout.strip() in ("", "Z", "Z+", "Zs")


def test_one_process_answers_all(confined: ConfinedProcess) -> None:
    assert confined.process_id is None
    value = [1, "\ud800\u4e00", {"a": None}, 1.5]
    assert confined.ask(("repeat", value), CPU_SECONDS) == {"value": value}
    first = confined.process_id
    modules = confined.ask(("modules", None), CPU_SECONDS)["value"]
    assert confined.process_id == first
    assert not {"mlx", "numpy", "jinja2", "mlx_mmfree.hub.checkpoint.load"} & set(modules)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (("compute", None), r"it runs for over 0\.1 seconds"),
        (("allocate", 2**40), "it takes over 256 MB of memory"),
        (("exit", 7), "its process ended with status 7"),
        (("end", int(signal.SIGSEGV)), "its process was ended by SIGSEGV"),
        (("unknown", None), "ValueError: unknown"),
        (("repeat", "a" * (MEMORY_BYTES // 4)), "it is given over 64 MB, which is too much"),
    ],
    ids=["time", "memory", "exit", "signal", "error", "request"],
)
def test_failures_are_reported_and_the_next_request_is_answered(
    confined: ConfinedProcess, request_: tuple[str, object], reason: str
) -> None:
    with pytest.raises(LimitError, match=reason):
        confined.ask(request_, 0.1)
    assert confined.ask(("repeat", 1), CPU_SECONDS) == {"value": 1}


def test_a_process_that_died_meanwhile_is_started_anew(confined: ConfinedProcess) -> None:
    confined.ask(("repeat", 1), CPU_SECONDS)
    running = confined._running
    assert running is not None
    running.process.kill()
    running.process.wait()
    assert confined.ask(("repeat", 2), CPU_SECONDS) == {"value": 2}


def test_a_process_that_only_waits_is_ended(
    confined: ConfinedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined.ask(("repeat", 1), CPU_SECONDS)
    monkeypatch.setattr(process, "PATIENCE_S", 0.1)
    with pytest.raises(LimitError, match="its process does not answer"):
        confined.ask(("wait", None), CPU_SECONDS)
    assert confined.process_id is None


def test_memory_that_a_request_leaves_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop._Side, "given", Builder(), raising=False)
    for most, failed in ((None, False), (2**40, False), (2**10, True)):
        monkeypatch.setattr(loop._Side, "most_bytes", most, raising=False)
        (answer,) = map(
            json.loads,
            loop._answer(lambda request: {"value": request}, CPU_SECONDS, ("items", [5])),
        )
        assert answer == ({"failure": "MemoryError", "message": ""} if failed else {"value": 5})


@pytest.mark.skipif(shutil.which("ps") is None, reason="there is no program 'ps'")
def test_memory_is_watched_where_the_kernel_does_not(
    confined: ConfinedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined.watches_memory = True
    confined.ask(("repeat", 1), CPU_SECONDS)
    monkeypatch.setattr(confined, "_memory_bytes", 64 * 2**20)
    with pytest.raises(LimitError, match="it takes over 64 MB of memory"):
        confined.ask(("hold", 128 * 2**20), CPU_SECONDS)


def test_threads_get_their_own_answers(confined: ConfinedProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda n: confined.ask(("repeat", n), CPU_SECONDS)["value"], range(200))
    assert list(answers) == list(range(200))


def test_the_module_asks_back(confined: ConfinedProcess) -> None:
    assert confined.ask(("ask", 5), CPU_SECONDS, lambda number: 10 * number) == {"value": [50, 60]}
    with pytest.raises(ZeroDivisionError):
        confined.ask(("ask", 0), CPU_SECONDS, lambda number: 1 // number)
    assert confined.ask(("repeat", 1), CPU_SECONDS) == {"value": 1}


def stored(asked: ConfinedProcess) -> list[int]:
    values: list[int] = asked.ask(("stored", None), CPU_SECONDS)["value"]
    return values


def test_a_new_process_is_asked_first() -> None:
    values = iter(range(9))
    confined = ConfinedProcess(
        confined_work.__name__, (), MEMORY_BYTES, lambda: ("store", next(values))
    )
    assert stored(confined) == [0] and stored(confined.branch(2**20)) == [0]
    with pytest.raises(LimitError, match="status 7"):
        confined.ask(("exit", 7), CPU_SECONDS)
    assert stored(confined) == [1]
    confined.close()
    confined = ConfinedProcess(confined_work.__name__, (), MEMORY_BYTES, lambda: ("unknown", 0))
    with pytest.raises(LimitError, match="ValueError: unknown"):
        confined.branch(2**20)


def test_a_branch_goes_on_by_itself(confined: ConfinedProcess) -> None:
    confined.ask(("store", 1), CPU_SECONDS)
    first, second = confined.branch(2**20), confined.branch(2**20)
    first.ask(("store", 2), CPU_SECONDS)
    third = first.branch(2**20)
    third.ask(("store", 3), CPU_SECONDS)
    assert [stored(each) for each in (confined, first, second, third)] == [
        [1],
        [1, 2],
        [1],
        [1, 2, 3],
    ]
    assert len({each.process_id for each in (confined, first, second, third)}) == 4


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (("compute", None), r"it runs for over 0\.1 seconds"),
        (("allocate", 2**25), "it takes over 16 MB of memory"),
        (("fill", 2**25), "it takes over 16 MB of memory"),
        (("exit", 7), "its process ended with status 7"),
        (("end", int(signal.SIGSEGV)), "its process was ended by SIGSEGV"),
        (("unknown", None), "ValueError: unknown"),
    ],
    ids=["time", "memory", "memory that is stored", "exit", "signal", "error"],
)
def test_a_branch_that_fails_ends_alone(
    confined: ConfinedProcess, request_: tuple[str, object], reason: str
) -> None:
    confined.ask(("store", 1), CPU_SECONDS)
    branches = [confined.branch(16 * 2**20) for _ in range(2)]
    with pytest.raises(LimitError, match=reason) as failure:
        branches[0].ask(request_, 0.1)
    assert isinstance(failure.value, TimeLimitError) is (request_[0] == "compute")
    for ask in (stored, lambda branch: branch.branch(2**20)):
        with pytest.raises(LimitError, match="its process has ended"):
            ask(branches[0])
    assert stored(branches[1]) == stored(confined) == [1]


def test_memory_of_a_branch_is_watched(
    confined: ConfinedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined.ask(("fill", 32 * 2**20), CPU_SECONDS)
    confined.watches_memory = True
    # the limit of the kernel is further off
    branch = confined.branch(128 * 2**20)
    branch.watches_memory = True
    monkeypatch.setattr(branch, "_memory_bytes", 16 * 2**20)
    branch.ask(("fill", 2**20), CPU_SECONDS)
    with pytest.raises(LimitError, match="it takes over 16 MB of memory"):
        branch.ask(("hold", 64 * 2**20), CPU_SECONDS)


def test_a_branch_is_interrupted(confined: ConfinedProcess) -> None:
    branch = confined.branch(2**20)
    process_id = branch.process_id
    assert process_id is not None
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(branch.ask, ("wait", None), CPU_SECONDS)
        until(lambda: asked.running())
        branch.interrupt()
        # it ends by itself where the interruption reaches it before the request
        with pytest.raises(LimitError, match=r"was ended by SIGKILL|ended with status 0"):
            asked.result()
    assert is_gone(process_id)


def test_branches_end_with_their_objects_and_leave_nothing(confined: ConfinedProcess) -> None:
    def used() -> Branch:
        branch = confined.branch(2**20)
        stored(branch)
        return branch

    numbers = [used().process_id for _ in range(3)]
    closed = used()
    numbers.append(closed.process_id)
    closed.close()
    for number in numbers:
        assert number is not None
        until(lambda number=number: is_gone(number))
    # what has ended is forgotten with the next
    last = used()
    assert confined.process_id is not None
    command = ["ps", "-o", "pid=", "--ppid", str(confined.process_id)]
    if sys.platform.startswith("linux"):
        shown = subprocess.run(command, capture_output=True, text=True).stdout.split()
        assert shown == [str(last.process_id)]


@pytest.mark.parametrize(
    ("row", "limits"),
    [
        ("chat templates", (policy.TEMPLATE.seconds, "s", policy.TEMPLATE.memory_bytes)),
        (
            "`tokenizer.json`",
            (policy.TOKENIZER_FILE.seconds, "s", policy.TOKENIZER_FILE.memory_bytes),
        ),
        (
            "`tokenizer.json`",
            (policy.TOKENIZED_TEXT.seconds, "s", policy.TOKENIZED_TEXT.memory_bytes),
        ),
        ("schemas", (policy.COMPILATION.seconds, "s", policy.COMPILATION.memory_bytes)),
        ("schemas", (policy.FOLLOWING.seconds, "s", policy.FOLLOWING.memory_bytes)),
        ("bodies above", (policy.BODY.memory_a_unit, "bytes a byte", policy.BODY.memory_bytes)),
        ("parquet files", (policy.PARQUET_PART.seconds, "s", policy.PARQUET_PART.memory_bytes)),
        (
            "parquet files",
            (policy.PARQUET_PART.memory_a_unit, "bytes a byte", policy.PARQUET_PART.memory_bytes),
        ),
    ],
)
def test_the_page_names_the_limits(row: str, limits: tuple[float, str, int]) -> None:
    lines = (ROOT / ".github" / "SECURITY.md").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"| {row}")]
    number, unit, memory_bytes = limits
    size = f"{memory_bytes // policy.MB} MB".replace("1024 MB", "1 GB")
    assert f"{number:g} {unit}" in line and size in line


PROGRAM = """
import os, sys
from dataclasses import replace
from pathlib import Path
from mlx_mmfree.tokenizer.chat import ChatTemplate, _renderer
import mlx_mmfree.tokenizer.chat as module
def render(source):
    return ChatTemplate(source, Path("folder")).render({"messages": []})
assert render("ready") == "ready"
print(_renderer.process_id, flush=True)
module.TEMPLATE = replace(module.TEMPLATE, seconds=1)
"""
ENDLESS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4


def program(lines: str) -> "tuple[subprocess.Popen[str], int]":
    """A program that rendered a template, and the process that did."""
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + lines],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert started.stdout is not None
    return started, int(started.stdout.readline())


@pytest.mark.sample(2)
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_the_process_ends_with_its_program(sign: signal.Signals) -> None:
    started, confined_id = program(f"print('now', flush=True); render({ENDLESS!r})")
    assert started.stdout is not None
    assert started.stdout.readline() == "now\n"
    started.send_signal(sign)
    _, shown = started.communicate(timeout=120)
    assert started.returncode == -sign
    assert ("KeyboardInterrupt" in shown) is (sign == signal.SIGINT)
    if sign == signal.SIGINT:
        # an interrupted program ends it; otherwise its own time does
        assert is_gone(confined_id)
    until(lambda: is_gone(confined_id))


def test_an_idle_process_ends_with_its_program() -> None:
    started, confined_id = program("print('now', flush=True); sys.stdin.read()")
    assert not is_gone(confined_id)
    started.kill()
    started.communicate(timeout=120)
    until(lambda: is_gone(confined_id))


def test_a_forked_program_starts_its_own() -> None:
    started, _ = program(
        "child = os.fork()\n"
        "assert _renderer.process_id is None or child\n"
        "text = render('a' if child else 'b')\n"
        "if not child: os._exit(0 if text == 'b' else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print(text, render('c'), flush=True)\n"
    )
    shown, faults = started.communicate(timeout=120)
    assert (shown, started.returncode) == ("a c\n", 0), faults
