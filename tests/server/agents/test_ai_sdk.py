"""The conversation through the AI SDK of Node, with each of its providers."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.agents import models
from tests.server.agents.models import CALLS, FOX_ANSWER, MODELS, OWL_ANSWER, REASONING, Server

pytestmark = pytest.mark.agents

PROVIDERS = ("responses", "chat", "compatible", "anthropic")
SHOWS_REASONING = {"compatible", "anthropic"}
"""OpenAI's own interfaces show summaries of it at most."""


@pytest.fixture(scope="module")
def seen(server: Server, programs: Path) -> dict[tuple[str, str, bool], Any]:
    """Each provider's view of a conversation with each model, whole and as a stream."""
    names = "AGAIN ANIMALS BROKEN DESCRIPTION FIRST LATER PARAMETERS PICTURE REFUSED SYSTEM WORDS"
    texts = {name.lower(): getattr(models, name) for name in names.split()}
    reported = json.dumps({"url": server.url, "models": [*MODELS], "texts": texts})
    program = Path(__file__).with_name("ai_sdk.mjs")
    finished = subprocess.run(
        [programs / "node", program, reported], capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == 0, finished.stderr
    lines = [json.loads(line) for line in finished.stdout.splitlines()]
    return {tuple(line["key"]): line["seen"] for line in lines}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_conversation(
    provider: str, model: str, streams: bool, seen: dict[tuple[str, str, bool], Any]
) -> None:
    found = seen[provider, model, streams]
    assert "error" not in found, found["error"]
    assert [tuple(call) for call in found["calls"]] == CALLS
    assert found["texts"] == [FOX_ANSWER, OWL_ANSWER]
    reasons = MODELS[model].opens is not None and provider in SHOWS_REASONING
    assert found["reasoning"] == (REASONING if reasons else "")
