"""A stand-in for the Hub in a process of its own. Its threads would keep another from forking."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _http

from mlx_mmfree.hub.remote import cache_content
from tests.hub.hub_server import HubServer, Repository

_END, _ASK = b"", b"?"


class HubProcess:
    """A Hub that ends with the `with` block.

    Args:
        folder: Where the process notes what it holds.
        folders: As for `HubServer`.

    Attributes:
        url: Its address.
    """

    def __init__(self, folder: Path, folders: Mapping[str, Path] | None = None):
        self._notes = folder / "hub.json"
        answers, questions = os.pipe(), os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(questions[1])
            _serve(questions[0], answers[1], self._notes, folders)
        os.close(questions[0])
        os.close(answers[1])
        self._question, self._answer = questions[1], answers[0]
        self.url = os.read(self._answer, 1000).decode().strip()

    def repositories(self) -> dict[str, Repository]:
        """The present contents of the Hub."""
        os.write(self._question, _ASK)
        os.read(self._answer, 1)
        noted = json.loads(self._notes.read_text())
        return {
            name: Repository(
                {
                    branch: {file: bytes.fromhex(content) for file, content in files.items()}
                    for branch, files in entry["branches"].items()
                },
                entry["is_private"],
            )
            for name, entry in noted.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._question)
        os.close(self._answer)
        os.waitpid(self._process, 0)


def log_in(url: str, token: str) -> Callable[[], None]:
    """Makes a child use a Hub with a login. It repeats at once what the Hub refuses."""

    def prepare() -> None:
        constants.ENDPOINT = hf_api.ENDPOINT = url
        path = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "".join(path[1:])
        constants.HF_HUB_OFFLINE = False
        cache_content.delay_s = lambda headers, tries: 0.0
        # the client tries some requests again by itself
        _http.time = SimpleNamespace(sleep=lambda seconds: None)
        os.environ |= {"HF_TOKEN": token, "NO_PROXY": "127.0.0.1"}

    return prepare


def _serve(questions: int, answers: int, notes: Path, folders: Mapping[str, Path] | None) -> None:
    """Serves until the other end of the questions is closed, and ends the process."""
    try:
        with HubServer(folders) as hub:
            os.write(answers, hub.url.encode() + b"\n")
            while os.read(questions, 1) != _END:
                notes.write_text(json.dumps(_described(hub)))
                os.write(answers, b"\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _described(hub: HubServer) -> dict[str, Any]:
    return {
        name: {
            "is_private": repository.is_private,
            "branches": {
                branch: {file: content.hex() for file, content in files.items()}
                for branch, files in list(repository.branches.items())
            },
        }
        for name, repository in list(hub.repositories.items())
    }
