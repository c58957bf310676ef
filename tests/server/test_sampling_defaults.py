"""Requests sample as they say, then as the server, the model's files or its makers do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.hub import save_model
from tests.server.conftest import with_template

pytestmark = pytest.mark.serve

EFFORTS = (
    "{%- set effort = reasoning_effort | default('xhigh') -%}"
    "{%- if effort not in ['low', 'medium', 'xhigh', 'deep'] -%}"
    "{{- raise_exception('Unsupported reasoning effort: ' ~ effort) -}}{%- endif -%}"
    "{%- if reasoning_effort in ['deep'] -%}[deep]{%- endif -%}"
    "{%- if not messages[0].content -%}{{ raise_exception('No words.') }}{%- endif -%}"
    "{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{%- if add_generation_prompt %}[assistant]<think>"
    "{%- if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)
QUESTION = [{"role": "user", "content": "Is a fox an animal?"}]
PATHS = {
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 12},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 12, "store": False},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 12},
}


def served(folder: Path, template: str | None = None, **values: Any) -> Any:
    from mlx_mmfree.server.settings import ServedModel

    model, tokenizer = with_template(folder, template)
    if values:
        (folder / "generation_config.json").write_text(json.dumps(values))
    return ServedModel("m", model, tokenizer)


def written(client: Any, path: str, **body: Any) -> str:
    """The text of one answer, whatever its interface."""
    answer = client.post(path, json={"model": "m", **PATHS[path], **body})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    parts = found.get("choices") or found.get("output") or found.get("content")
    return json.dumps([part.get("message") or part.get("content") or part for part in parts])


@pytest.mark.parametrize("path", PATHS)
def test_every_interface_takes_the_models_own(
    start: Callable[..., Any], tmp_path: Path, path: str
) -> None:
    with start(served(tmp_path / "m", do_sample=False)) as client:
        greedy = {written(client, path) for _ in range(3)}
    assert len(greedy) == 1
    with start(served(tmp_path / "n", temperature=1.0, top_k=1)) as client:
        assert {written(client, path)} == greedy
        # what a request gives wins
        warm = {written(client, path, temperature=1.0) for _ in range(2)}
        assert warm == greedy
    with start(served(tmp_path / "o", do_sample=True, temperature=2.0)) as client:
        assert {written(client, path, temperature=0)} == greedy
        assert len({written(client, path) for _ in range(4)}) > 1


def test_what_counts_first(tmp_path: Path) -> None:
    from mlx_mmfree.server.schemas import ChatRequest
    from mlx_mmfree.server.settings import Sampling

    own = {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    model = served(tmp_path / "m", **own)
    body = ChatRequest(messages=QUESTION, top_k=3)
    values = Sampling({"temp": 0.4}).values_for(body, model.suggested(True))
    assert (values["temp"], values["top_k"], values["top_p"]) == (0.4, 3, 1.0)
    assert values["repetition_penalty"] == 1.2 and values["repetition_context_size"] > 10**5
    body = ChatRequest(messages=QUESTION, repetition_penalty=1.1, presence_penalty=0.0)
    values = Sampling({"presence_penalty": 1.5}).values_for(body, model.suggested(True))
    assert (values["repetition_penalty"], values["repetition_context_size"]) == (1.1, 20)
    assert values["presence_penalty"] == 0.0


def test_refused_efforts_are_named_with_the_templates_own(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    with start(served(tmp_path / "m", EFFORTS)) as client:
        efforts = {
            "/v1/chat/completions": {"reasoning_effort": "high"},
            "/v1/responses": {"reasoning": {"effort": "high"}},
            "/v1/messages": {"output_config": {"effort": "high"}},
        }
        for path, effort in efforts.items():
            answer = client.post(path, json={"model": "m", **PATHS[path], **effort})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "'reasoning_effort' must be low or medium or xhigh or deep" in error["message"]
            assert "but got 'high': Unsupported reasoning effort: high" in error["message"]
            assert error.get("param", "reasoning_effort") == "reasoning_effort"
        # the messages are at fault, whatever the effort
        empty = [{"role": "user", "content": ""}]
        body = {"model": "m", "messages": empty, "reasoning_effort": "low"}
        error = client.post("/v1/chat/completions", json=body).json()["error"]
        assert "No words." in error["message"] and error["param"] != "reasoning_effort"


def test_a_server_does_not_start_with_an_effort_that_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = with_template(tmp_path / "template", EFFORTS)
    save_model(tmp_path / "m", model, tokenizer)
    assert main(["serve", "--model", str(tmp_path / "m"), "--reasoning-effort", "high"]) == 2
    error = capsys.readouterr().err
    assert "--reasoning-effort must be low or medium or xhigh or deep" in error


def test_no_effort_is_no_reasoning(start: Callable[..., Any], tmp_path: Path) -> None:
    settings = {"template_variables": {"reasoning_effort": "high"}}
    with start(served(tmp_path / "m", EFFORTS), **settings) as client:
        # the template would refuse the server's own
        written(client, "/v1/chat/completions", reasoning_effort="none")
        written(client, "/v1/chat/completions", reasoning_effort="low")
