import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("starlette") is None:
    # without the extra 'serve' there is no server
    collect_ignore_glob = ["*.py"]

INSTALL = "npm ci --prefix tests/server/agents"
"""Brings Node and the clients from npm."""
PROGRAMS = Path(__file__).parent / "node_modules" / ".bin"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of all models, for every client."""
    from tests.server.agents.models import Server

    with Server(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder with Node and the clients from npm."""
    if not (PROGRAMS / "node").exists():
        pytest.skip(f"needs Node and its packages: {INSTALL}")
    return PROGRAMS
