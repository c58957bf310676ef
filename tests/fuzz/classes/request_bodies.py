"""Bodies of requests to the server: odd values, names, numbers, depths and bytes."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from mlx_mmfree.hub import load
from tests.fuzz import dialects
from tests.fuzz.base_model import BASES, link_base, make_base
from tests.fuzz.case import FuzzClass
from tests.fuzz.hostile import (
    ODD_VALUES,
    RAW_JSON,
    damage_bytes,
    damage_json,
    odd_text,
    random_entry,
    with_raw_json,
)
from tests.server.conftest import CALLING

_BODY, _PATH = "body", "path"
_KINDS = ("values", "values", "texts", "names", "raw", "part", "part", "part", "bytes", "alone")
_SOUND = 0.25
"""The share of conversations that stay as they are, and must be answered or refused by a message."""
_TOOL = {"type": "function", "function": {"name": "f", "parameters": dialects.SCHEMA}}
_COMMON: dict[str, Any] = {
    "max_tokens": 4,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "seed": 3,
    "stop": ["a", "\n"],
    "logit_bias": {"5": -3.5, "517": 1},
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "repetition_penalty": 1.2,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "me",
}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["Hello", "you"], "logprobs": 2, "echo": False},
    "/v1/embeddings": {"input": ["Hello", "you"], "encoding_format": "base64", "dimensions": 16},
}


_HOSTILE_SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]},
    {"$ref": "file:///etc/passwd"},
    {"type": "string", "pattern": "(a*)*b(((a|b){40}){40}){40}"},
    {"type": "string", "pattern": "a{1000000}"},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
    {"type": "integer", "multipleOf": 1e-300},
    {"enum": []},
    {"enum": [str(n) for n in range(20_000)]},
    {"not": {}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"properties": {"a" * 10_000: {}}, "required": ["b"]},
    {"type": "object", "minProperties": 10**6},
    {"format": "date-time", "type": "string"},
    False,
    True,
    {},
)


class Refusal(Exception):
    """The message of an answer that refuses a request."""


def make_sources(folder: Path) -> None:
    """A model of each kind, with a tokenizer that has a chat template, of some with calls of tools."""
    for base in BASES:
        make_base(folder / base, base)
    for base in BASES[:2]:
        file = folder / base / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CALLING}))


def _some_of(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A body without some of what may be left out."""
    always = ("prompt", "input")
    return {name: value for name, value in body.items() if name in always or rng.random() < 0.4}


def _odd_texts(body: dict[str, Any], rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 2))):
        node, key = random_entry(body, rng)
        if key is not None:
            node[key] = odd_text(rng)
    return json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()


def _odd_names(body: dict[str, Any], rng: random.Random) -> bytes:
    others = ("chat_template", "adapter", "model_path", "functions", "best_of", "tools", "x")
    body[rng.choice(others)] = rng.choice((*ODD_VALUES, [_TOOL], "/etc/passwd"))
    return json.dumps(body).encode()


def _odd_part(body: dict[str, Any], rng: random.Random) -> bytes:
    """A sound body with damage inside what it holds of messages or schemas."""
    names = [name for name, value in body.items() if isinstance(value, (dict, list))]
    if not names:
        return _odd_names(body, rng)
    name = rng.choice(names)
    if name == "response_format" and rng.random() < 0.7:
        body[name]["json_schema"]["schema"] = rng.choice(_HOSTILE_SCHEMAS)
    else:
        body[name] = json.loads(damage_json(json.dumps(body[name]).encode(), rng))
    return json.dumps(body).encode()


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Writes a hostile body for one of the addresses."""
    target.mkdir()
    base = rng.choice(BASES)
    link_base(target, sources / base)
    path = rng.choice((*_BODIES, *dialects.PATHS, *dialects.PATHS))
    kind = rng.choice(_KINDS)
    if path in dialects.PATHS:
        body = dialects.draw(path, rng, _stored)
        kind = "sound" if rng.random() < _SOUND else kind
    else:
        common = {} if path == "/v1/embeddings" else _COMMON
        body = json.loads(json.dumps(_some_of(common | _BODIES[path], rng)))
    if kind == "sound":
        data = json.dumps(body).encode()
    elif kind == "values":
        data = damage_json(json.dumps(body).encode(), rng)
    elif kind == "texts":
        data = _odd_texts(body, rng)
    elif kind == "names":
        data = _odd_names(body, rng)
    elif kind == "part":
        data = _odd_part(body, rng)
    elif kind == "raw":
        data = with_raw_json(body, rng).encode()
    elif kind == "bytes":
        data = damage_bytes(json.dumps(body).encode(), rng)
    else:
        data = rng.choice(RAW_JSON).encode()
    (target / _BODY).write_bytes(data)
    (target / _PATH).write_text(path)
    return f"{kind} for {path} of {base}: {data[:300]!r}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Sends the body. The answer is sound, or an error below 500 in the format of the address."""
    headers = {"Content-Type": "application/json"}
    body = (folder / _BODY).read_bytes()
    path = (folder / _PATH).read_text()
    asked = client((folder / "base").resolve(), max_body_bytes=10**6, max_context=512)
    answer = asked.post(path, content=body, headers=headers)
    judge(answer, path)
    if path == dialects.RESPONSES:
        _look_again(asked, answer, rng)


def _look_again(asked: Any, answer: Any, rng: random.Random) -> None:
    """A response is kept if it was to be, until it is deleted."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        *_, last, _ = answer.text.split("\n\n")
        made = json.loads(last.partition("data: ")[2])["response"]
    else:
        made = answer.json()
    address = f"{dialects.RESPONSES}/{made['id']}"
    found = asked.get(address)
    assert (found.status_code == 200) == made["store"], found.text
    if made["store"]:
        assert found.json() == made
        _stored.append(made["id"])
        del _stored[:-20]
        if rng.random() < 0.3:
            assert asked.delete(address).status_code == 200
            assert asked.get(address).status_code == 404


_stored: list[str] = []
"""Names of responses of this process, some of which are deleted or belong to another model's server."""


def judge(answer: Any, path: str = "") -> None:
    """Takes an answer that is sound.

    Raises:
        Refusal: It is an error below 500 in the format of its address, or ends with one.
        AssertionError: It is anything else.
    """
    if answer.status_code >= 500 or "Traceback" in answer.text:
        raise AssertionError(f"status {answer.status_code}: {answer.text:.500}")
    if answer.status_code != 200:
        raise Refusal(_message(answer.json(), path))
    if answer.headers["content-type"].startswith("text/event-stream"):
        # what ends a text before its time is reported in the stream
        error = dialects.check_stream(path, answer.text)
        if error is not None:
            kind = error.get("type") or error["code"]
            if kind in ("api_error", "server_error", "model_error"):
                raise AssertionError(f"the stream ends with {error}")
            raise Refusal(error["message"])
    elif answer.json().get("error"):
        raise AssertionError(f"an error with status 200: {answer.text:.500}")


def _message(body: dict[str, Any], path: str) -> str:
    """The message of an error, in the format of its address."""
    is_anthropic = path.startswith(dialects.MESSAGES)
    names = {"type", "message"} | (set() if is_anthropic else {"param", "code"})
    if body["error"].keys() != names or (body.get("type") == "error") != is_anthropic:
        raise AssertionError(f"an error of another format: {body!r:.500}")
    message: str = body["error"]["message"]
    return message


@cache
def client(base: Path, **settings: Any) -> Any:
    """A client of a server of a model with some settings, which runs until the process ends."""
    from starlette.testclient import TestClient

    from mlx_mmfree.generation.sessions import Sessions
    from mlx_mmfree.server.app import make_app
    from mlx_mmfree.server.run import make_service
    from mlx_mmfree.server.settings import ServedModel, Settings

    model, tokenizer = load(base)
    sessions = Sessions(model, memory_bytes=10**7)
    service = make_service(
        [ServedModel("m", model, tokenizer, sessions)],
        Settings(**settings),
        sessions,
    )
    made = TestClient(make_app(service), base_url="http://127.0.0.1", raise_server_exceptions=False)
    made.__enter__()
    return made


CLASS = FuzzClass(
    make_sources,
    mutate,
    exercise,
    refusals=(Refusal,),
    count=150,
    # models take longer to load than a request to be answered
    batch=400,
    packages=("starlette", "llguidance", "uvicorn", "httpx2"),
)
