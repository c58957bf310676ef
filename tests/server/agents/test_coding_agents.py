"""Codex and Claude Code, as they are, against models that call their tools."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.agents.models import (
    ANIMALS,
    CLAUDE,
    CODEX,
    FOX_ANSWER,
    MODELS,
    OWL_ANSWER,
    WORDS,
    Server,
)

pytestmark = pytest.mark.agents


def _lines(
    programs: Path, server: Server, home: Path, *command: str, **variables: str
) -> list[dict[str, Any]]:
    """The lines of JSON that a program prints, which has a home of its own."""
    inherited = {key: os.environ[key] for key in ("TMPDIR", "LANG") if key in os.environ}
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        command,
        cwd=server.files,
        env=inherited | {"PATH": path, "HOME": str(home), "NO_PROXY": "*"} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]


def _check_prompt(server: Server, model: str) -> None:
    """The last prompt holds the calls, their results, and what was left out."""
    name, prompt = server.prompts()[-1]
    assert name == model
    found = [prompt.rfind(text) for text in (WORDS["fox"], FOX_ANSWER, ANIMALS)]
    assert -1 < found[0] < found[1] < found[2]
    # before or after the other result, as they were ready
    assert prompt.count("A picture was left out") == 1


@pytest.mark.parametrize("model", MODELS)
def test_codex(model: str, server: Server, programs: Path, tmp_path: Path) -> None:
    folder = tmp_path / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "mmfree"\n[model_providers.mmfree]\n'
        f'name = "mmfree"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\n'
    )
    begin = ("codex", "exec", "--json", "--skip-git-repo-check")
    first = _lines(programs, server, tmp_path, *begin, CODEX)
    items = [line["item"] for line in first if line["type"] == "item.completed"]
    ran = [item for item in items if item["type"] == "command_execution"]
    assert [item["aggregated_output"] for item in ran] == [WORDS["fox"]]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == [FOX_ANSWER]
    second = _lines(programs, server, tmp_path, *begin, "resume", "--last", ANIMALS)
    items = [line["item"] for line in second if line["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == [OWL_ANSWER]
    _check_prompt(server, model)


@pytest.mark.parametrize("model", MODELS)
def test_claude_code(model: str, server: Server, programs: Path, tmp_path: Path) -> None:
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "ENABLE_TOOL_SEARCH": "false",
    }
    begin = ("claude", "-p", "--output-format", "stream-json", "--verbose")
    first = _lines(programs, server, tmp_path, *begin, CLAUDE, **variables)
    blocks = [
        block
        for line in first
        if line["type"] in ("assistant", "user")
        for block in line["message"]["content"]
    ]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    reads = [{"file_path": str(server.files / name)} for name in ("fox.txt", "owl.png")]
    assert [call["input"] for call in calls] == [{}, *reads]
    # results of calls that run at once come as they are ready
    found = {block["tool_use_id"]: block for block in blocks if block["type"] == "tool_result"}
    refused, fox, owl = (found[call["id"]] for call in calls)
    assert refused["is_error"] and WORDS["fox"] in fox["content"]
    assert owl["content"][0]["type"] == "image"
    [last] = [line for line in first if line["type"] == "result"]
    assert last["result"] == FOX_ANSWER
    second = _lines(programs, server, tmp_path, *begin, "-c", ANIMALS, **variables)
    [last] = [line for line in second if line["type"] == "result"]
    assert last["result"] == OWL_ANSWER
    _check_prompt(server, model)
