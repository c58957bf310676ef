"""Servers of this library and of others for the same model, and clients that ask them."""

import http.client
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from random_models import random_model, write_tokenizer

from mlx_mmfree import demo
from mlx_mmfree.errors import MeasurementError, UsageError
from mlx_mmfree.evaluation.audit.skeleton import presets
from mlx_mmfree.evaluation.benchmark import check_ending, child_environment
from mlx_mmfree.hub import convert, open_checkpoint, save_model
from mlx_mmfree.tokenizer.tokenizer import Tokenizer

OWN, MLX_LM, LLAMA_CPP = "mlx_mmfree", "mlx-lm", "llama.cpp"

_TERNARY_LLAMA = {
    "model_type": "llama",
    "quantization_config": {"quant_method": "bitnet"},
    "torch_dtype": "bfloat16",
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    **presets(),
    "small-llama": {
        **_TERNARY_LLAMA,
        "vocab_size": 2048,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    # llama.cpp does not read the architecture of BitNet-2B-4T
    "bitnet-2b-llama": {**presets()["bitnet-2b-4t"], **_TERNARY_LLAMA},
}
"""Configurations of models that get random weights, by name."""

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
    """Returns whether the server gives its list of models, which all have."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_END_SECONDS)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


_TIMEOUT_SECONDS = 600.0
_NEVER = -100


@dataclass(frozen=True)
class Answer:
    """One answer as a client saw it.

    Attributes:
        sent: When the request was sent, in seconds of `time.perf_counter`.
        chunks: When each chunk of text came.
        ended: When the answer had ended.
        text: Its text.
        prompt_tokens, cached_tokens, completion_tokens: As the server counts them.
    """

    sent: float
    chunks: tuple[float, ...]
    ended: float
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Question:
    """The requests to a server.

    Attributes:
        prompt: The text to continue.
        tokens: Length of the answer.
        end: Tokens that would end it before, which are forbidden.
    """

    prompt: str
    tokens: int
    end: tuple[int, ...]


def ask_all(server: Server, clients: Sequence[Sequence[Question]]) -> list[Answer]:
    """The answers to clients that ask at the same time, each one question after the other.

    Raises:
        MeasurementError: A request was refused, or its answer is not whole.
    """
    model = server.model or get(server, "/v1/models")["data"][0]["id"]

    def ask_in_turn(questions: Sequence[Question]) -> list[Answer]:
        return [ask(server, model, question) for question in questions]

    with ThreadPoolExecutor(len(clients)) as pool:
        return [answer for found in pool.map(ask_in_turn, clients) for answer in found]


def get(server: Server, path: str) -> Any:
    """The JSON that a server gives under a path."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        return json.load(connection.getresponse())
    finally:
        connection.close()


def ask(server: Server, model: str, question: Question) -> Answer:
    """One greedy answer, streamed."""
    body = {
        "model": model,
        "prompt": question.prompt,
        "max_tokens": question.tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {str(token): _NEVER for token in question.end},
    }
    connection = http.client.HTTPConnection(HOST, server.port, timeout=_TIMEOUT_SECONDS)
    sent = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return _read(server.program, connection.getresponse(), sent)
    except (OSError, http.client.HTTPException) as error:
        raise MeasurementError(f"[bench] the server of {server.program} failed: {error}") from error
    finally:
        connection.close()


def _read(program: str, response: http.client.HTTPResponse, sent: float) -> Answer:
    if response.status != http.HTTPStatus.OK:
        reported = response.read().decode(errors="replace")[:500]
        raise MeasurementError(
            f"[bench] the server of {program} refused a request with status {response.status}: "
            f"{reported}"
        )
    chunks, texts = [], []
    usage: Mapping[str, Any] | None = None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise MeasurementError(f"[bench] the server of {program} failed: {event['error']}")
        if text := "".join(choice["text"] for choice in event["choices"]):
            chunks.append(time.perf_counter())
            texts.append(text)
        usage = event.get("usage") or usage
    if usage is None or not chunks:
        raise MeasurementError(f"[bench] the server of {program} broke off an answer.")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        sent,
        tuple(chunks),
        time.perf_counter(),
        "".join(texts),
        usage["prompt_tokens"],
        details.get("cached_tokens", 0),
        usage["completion_tokens"],
    )


_WORDS = ("frog", "river", "bird", "hill", "snow", "winter", "story", "apple", "music", "garden")


def prompt(tokenizer: Tokenizer, tokens: int, seed: str) -> str:
    """Random words, about so many tokens, another text for each seed."""
    text = " ".join(random.Random(seed).choices(_WORDS, k=tokens))
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:tokens])


@contextmanager
def checkpoint(model: str | None) -> Iterator[str]:
    """The folder or repository of a model.

    Args:
        model: Folder or Hub repository; a name of `SHAPES`, which gets random weights; or
            `None` for the bundled model.
    """
    if model is None or model not in SHAPES:
        yield str(demo.path()) if model is None else model
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, model)
        save_model(folder, random_model(SHAPES[model]))
        write_tokenizer(folder, SHAPES[model]["vocab_size"])
        yield str(folder)
