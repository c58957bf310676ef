"""Whole numbers of requests: each is taken or refused in one line, by the name of what holds it."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.conftest import CALLING, with_template
from tests.whole_numbers import NUMBERS, changed, fault, paths_of_integers

pytestmark = pytest.mark.serve

_SAMPLING: dict[str, Any] = {
    "top_k": 5,
    "min_tokens_to_keep": 1,
    "repetition_context_size": 4,
    "temperature": 1,
    "top_p": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "xtc_probability": 0,
    "xtc_threshold": 0,
    "seed": 3,
    "n": 2,
    "max_tokens": 2,
    "logit_bias": {"5": 1},
}
_MESSAGES = [{"role": "user", "content": "a"}]
_FORMAT = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 1, "maxLength": 3},
        "b": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
        "c": {"type": "integer", "minimum": 0, "maximum": 9, "multipleOf": 3},
        "d": {"const": 7},
    },
    "required": ["a", "b", "c", "d"],
    "minProperties": 1,
    "maxProperties": 4,
}
_TOOL = {"name": "f", "description": "f", "parameters": _FORMAT}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [[1, 2]], "logprobs": 2, **_SAMPLING},
    "/v1/chat/completions": {
        "messages": _MESSAGES,
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 2,
        "reasoning_budget": 1,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "f", "strict": True, "schema": _FORMAT},
        },
        **{name: value for name, value in _SAMPLING.items() if name != "max_tokens"},
    },
    "/v1/messages": {
        "model": "m",
        "messages": _MESSAGES,
        "max_tokens": 2,
        "temperature": 1,
        "top_k": 5,
        "top_p": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1},
        "tools": [{"name": "f", "input_schema": _FORMAT}],
    },
    "/v1/responses": {
        "input": "a",
        "max_output_tokens": 2,
        "top_logprobs": 0,
        "temperature": 1,
        "top_p": 1,
        "tools": [{"type": "function", "strict": False, **_TOOL}],
    },
    "/v1/embeddings": {"input": [[1, 2]], "dimensions": 32},
}


_JSON = {"Content-Type": "application/json"}


class Refused(Exception):
    """The message of an error below 500."""


@pytest.fixture(scope="module")
def client(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of a model that calls tools, with a small context, which an endless answer soon fills."""
    from mlx_mmfree.server.settings import ServedModel

    pair = with_template(tmp_path_factory.mktemp("calling") / "m", CALLING)
    with start(ServedModel("m", *pair), max_context=512) as made:
        yield made


@pytest.mark.parametrize("path", BODIES)
def test_requests(path: str, client: Any) -> None:
    def ask(body: dict[str, Any]) -> None:
        content = json.dumps({"model": "m", **body})
        answer = client.post(path, content=content, headers=_JSON)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            raise Refused(answer.json()["error"]["message"])

    body = BODIES[path]
    ask(body)
    found = [
        f"{'.'.join(map(str, key_path))}: {number} {problem}"
        for key_path in paths_of_integers(body)
        for number in NUMBERS
        if (problem := fault(ask, changed(body, key_path, number), refusals=Refused))
    ]
    assert found == []
