"""Processes that use a Hub: the environment of the client is read when it is imported.

A process answers many calls, since to start one takes a second.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from mlx_mmfree.errors import MMFreeError


class HubClient:
    """A process of its own with a home of its own.

    Args:
        url: The Hub's address.
        home: Where downloads and the login are kept.
        token: The login, if any.
        environment: Further variables.
    """

    def __init__(self, url: str, home: Path, token: str | None = None, **environment: str):
        home.mkdir(exist_ok=True)
        with open(home / "messages.txt", "a") as messages:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.hub.hub_client"],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                env=self.environment(url, home, token) | environment,
            )

    @staticmethod
    def environment(url: str, home: Path, token: str | None) -> dict[str, str]:
        inherited = ("PATH", "PYTHONPATH", "OPENBLAS_CORETYPE")
        return {
            **{name: os.environ[name] for name in inherited if name in os.environ},
            "HOME": str(home),
            "HF_ENDPOINT": url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_ETAG_TIMEOUT": "20",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "MLX_MMFREE_CACHE": "0",
            "NO_PROXY": "127.0.0.1",
            "OPENBLAS_NUM_THREADS": "1",
            **({} if token is None else {"HF_TOKEN": token}),
        }

    def start(self, function: str, *arguments: Any) -> None:
        """Begins a call and does not wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([function, list(arguments)]) + "\n")
        self._process.stdin.flush()

    def call(self, function: str, *arguments: Any) -> Any:
        """The result of a function of this file; its `MMFreeError` is raised here."""
        self.start(function, *arguments)
        return self.answer()

    def answer(self) -> Any:
        """The result of the call that was begun."""
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise MMFreeError(answer["error"])
        return answer["result"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def logits(name: str, revision: str | None = None) -> Any:
    """The logits of a model for some tokens."""
    import mlx.core as mx

    from mlx_mmfree.hub import load_model

    return load_model(name, revision)(mx.array([[1, 7, 3, 39, 0]]))[0].tolist()


def encode(name: str) -> list[int]:
    """The tokens of a text."""
    from mlx_mmfree.hub import load_tokenizer

    return load_tokenizer(name).encode("Hello")


def folder(name: str, revision: str | None = None, patterns: list[str] | None = None) -> str:
    """Where a repository lies on this machine."""
    from mlx_mmfree.hub.remote.source import find_source

    chosen = {} if patterns is None else {"patterns": tuple(patterns)}
    return str(find_source(name, revision).fetch(**chosen))


def dataset(name: str) -> str:
    """Where the splits of a dataset lie on this machine."""
    from mlx_mmfree.hub.remote.datasets import fetch_splits

    return str(fetch_splits(name, [[".jsonl"], [".csv", ".csv.gz"]])[0])


def command(*arguments: str) -> tuple[int, str, str]:
    """Status, output and messages of the program `mmfree`."""
    from mlx_mmfree.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def serve() -> None:
    functions = {f.__name__: f for f in (logits, encode, folder, dataset, command)}
    for line in sys.stdin:
        function, arguments = json.loads(line)
        try:
            answer = {"result": functions[function](*arguments)}
        except MMFreeError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
