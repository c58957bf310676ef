"""Starts servers of this library and of others for the same model."""

import http.client
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ...errors import MeasurementError, UsageError
from ...hub import convert, open_checkpoint
from ..benchmark_process import check_ending, child_environment

OWN, MLX_LM, LLAMA_CPP = "mlx_mmfree", "mlx-lm", "llama.cpp"
_START_SECONDS = 300.0
_END_SECONDS = 30.0
_PAUSE_SECONDS = 0.05
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        program: `OWN`, `MLX_LM` or `LLAMA_CPP`.
        port: Where it answers.
        model: What requests call the model; `None` asks the server.
        pid: Its process.
    """

    program: str
    port: int
    model: str | None
    pid: int


def check_program(program: str) -> None:
    """Checks that a server can be started.

    Raises:
        UsageError: It is not installed. The message says what to install.
    """
    if program == MLX_LM and find_spec("mlx_lm") is None:
        raise UsageError(
            "[bench] 'compare' needs the package mlx-lm, which is not installed. Install it: "
            "pip install mlx-lm"
        )
    if program == LLAMA_CPP and not _llama_command():
        raise UsageError(
            "[bench] 'compare' needs the program llama-server or the package llama-cpp-python with its "
            "extra 'server', but neither was found. Install one: pip install 'llama-cpp-python[server]'"
        )


@contextmanager
def serving(
    program: str, model: str, clients: int, context: int, flags: Sequence[str] = ()
) -> Iterator[Server]:
    """A server of a model, from when it answers; it is ended afterwards.

    Args:
        program: `OWN`, `MLX_LM` or `LLAMA_CPP`.
        model: Folder or Hub repository; for the others it is converted first.
        clients: The most clients at the same time.
        context: The most tokens of a prompt with its answer.
        flags: Further flags of its command.

    Raises:
        MeasurementError: The server ended, or did not answer in time.
        UnsupportedModelError: The program cannot run the model.
    """
    with tempfile.TemporaryDirectory() as name, Path(name, "log").open("w+") as log:
        port = _free_port()
        command, known_as = _PROGRAMS[program](model, Path(name), port, clients, context)
        process = subprocess.Popen(
            [*command, *flags], env=child_environment(), stdout=log, stderr=log
        )
        try:
            _wait(program, process, port, Path(name, "log"))
            yield Server(program, port, known_as, process.pid)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
            process.wait()


def _own(
    model: str, folder: Path, port: int, clients: int, context: int
) -> tuple[Sequence[str], str | None]:
    flags = ["--model", model, "--host", HOST, "--port", str(port)]
    return [sys.executable, "-m", "mlx_mmfree", "serve", *flags], None


def _mlx_lm(
    model: str, folder: Path, port: int, clients: int, context: int
) -> tuple[Sequence[str], str | None]:
    convert(open_checkpoint(model), folder / "model", to="mlx", check=False)
    # the converted folder brings the file of its model, which this library wrote
    flags = ["--model", str(folder / "model"), "--host", HOST, "--port", str(port)]
    return [
        sys.executable,
        "-m",
        "mlx_lm",
        "server",
        "--trust-remote-code",
        *flags,
    ], "default_model"


def _llama_cpp(
    model: str, folder: Path, port: int, clients: int, context: int
) -> tuple[Sequence[str], str | None]:
    convert(open_checkpoint(model), folder / "model", to="gguf", check=False)
    [file] = (folder / "model").glob("*.gguf")
    flags = ["--model", str(file), "--host", HOST, "--port", str(port)]
    command = _llama_command()
    if command[0] != sys.executable:
        # the context is shared by the slots
        flags += ["--parallel", str(clients), "--ctx-size", str(clients * context)]
    else:
        flags += ["--n_ctx", str(context)]
    return [*command, *flags], None


def _llama_command() -> list[str]:
    if program := shutil.which("llama-server"):
        return [program]
    if find_spec("llama_cpp") and find_spec("uvicorn") and find_spec("sse_starlette"):
        return [sys.executable, "-m", "llama_cpp.server"]
    return []


_PROGRAMS: dict[str, Callable[..., tuple[Sequence[str], str | None]]] = {
    OWN: _own,
    MLX_LM: _mlx_lm,
    LLAMA_CPP: _llama_cpp,
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(program: str, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(port):
        status = process.poll()
        if status is not None:
            check_ending(f"the server of {program}", status or 1, log.read_text(errors="replace"))
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"[bench] the server of {program} must answer within {_START_SECONDS:g} s of its start "
                "but did not."
            )
        time.sleep(_PAUSE_SECONDS)


def _answers(port: int) -> bool:
    """Whether the server gives its list of models, which all have."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_END_SECONDS)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
