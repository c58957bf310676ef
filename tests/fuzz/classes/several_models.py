"""Hostile requests to a server of several models with adapters, which change no text of another."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mmfree.hub import load
from mlx_mmfree.hub.adapters.adapter import attach, with_adapter
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter, write_adapter
from mlx_mmfree.training.fine_tuning.fine_tune import adapt_layers
from tests.fuzz import dialects
from tests.fuzz.base_model import make_base
from tests.fuzz.case import FuzzClass
from tests.fuzz.classes.request_bodies import Refusal, judge
from tests.fuzz.hostile import ODD_VALUES, damage_json
from tests.server.conftest import CALLING

_BASES = ("llama", "hgrn", "mamba2")
_NAMES = tuple(name for base in _BASES for name in (base, f"{base}-tuned", f"{base}-alias"))
_ODD_NAMES = ("", "m", "LLAMA", "llama/", "../hgrn", "hgrn-tuned ", "claude-x", "gpt-9", "a" * 5000)
_PROMPTS = ("a b c", "the cat sat on", "1 2 3 4 5 6 7 8 9 10")
_SCRIPT, _LINK = "script.json", "models"
_COMPLETIONS = "/v1/completions"


def make_sources(folder: Path) -> None:
    """Models with a chat template, each with an adapter that changes what it writes."""
    for base in _BASES:
        make_base(folder / base, base)
        file = folder / base / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CALLING}))
        model, _ = load(folder / base)
        attach(model, None)
        adapt_layers(model, kind="lora", rank=4, scale=20.0)
        for name, array in tree_flatten(model.trainable_parameters()):
            if name.endswith("lora_b"):
                array[:] = mx.random.normal(array.shape)
        write_adapter(folder / f"{base}-adapter", model, {"model": base})


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Writes requests, sound and damaged, to models that there are and that there are not."""
    target.mkdir()
    (target / _LINK).symlink_to(sources)
    requests = []
    for _ in range(rng.choice((1, 2, 4))):
        name = rng.choice((*_NAMES, *_NAMES, rng.choice(_ODD_NAMES), rng.choice(ODD_VALUES)))
        path = rng.choice((_COMPLETIONS, "/v1/embeddings", *dialects.PATHS))
        if path in dialects.PATHS:
            body = dialects.draw(path, rng, [])
        else:
            given = {"prompt" if path == _COMPLETIONS else "input": rng.choice(_PROMPTS)}
            body = {**given, **({"max_tokens": 3} if path == _COMPLETIONS else {})}
        data = json.dumps({**body, "model": name}).encode()
        if rng.random() < 0.5:
            data = damage_json(data, rng)
        requests.append((path, data.decode()))
    (target / _SCRIPT).write_text(json.dumps(requests))
    return f"{[(path, data[-200:]) for path, data in requests]}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Sends the requests; after each of them every model writes what it always does."""
    client, before = _client((folder / _LINK).resolve())
    refused = None
    for path, data in json.loads((folder / _SCRIPT).read_text()):
        headers = {"Content-Type": "application/json"}
        try:
            judge(client.post(path, content=data.encode(), headers=headers), path)
        except Refusal as refusal:
            refused = refusal
        name, prompt = rng.choice(_NAMES), rng.choice(_PROMPTS)
        if (found := _written(client, name, prompt)) != before[name, prompt]:
            raise AssertionError(f"{name} writes {found!r} in place of {before[name, prompt]!r}")
    if refused is not None:
        raise refused


def _written(client: Any, name: str, prompt: str) -> str:
    body = {"model": name, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = client.post(_COMPLETIONS, json=body).json()
    text: str = answer["choices"][0]["text"]
    return text


@cache
def _client(folder: Path) -> tuple[Any, dict[tuple[str, str], str]]:
    """A client of a server of all models, and what each writes after each prompt."""
    from starlette.testclient import TestClient

    from mlx_mmfree.generation.sessions import Sessions
    from mlx_mmfree.server.app import make_app
    from mlx_mmfree.server.run import make_service
    from mlx_mmfree.server.settings import ServedModel, Settings

    served = []
    sessions = None
    for base in _BASES:
        model, tokenizer = load(folder / base)
        tuned = with_adapter(model, read_adapter(folder / f"{base}-adapter"))
        tuned.eval()
        sessions = sessions or Sessions(model, memory_bytes=10**6)
        own = sessions.for_model(model), sessions.for_model(tuned)
        served += [
            ServedModel(base, model, tokenizer, own[0], aliases=(f"{base}-alias",)),
            ServedModel(f"{base}-tuned", tuned, tokenizer, own[1]),
        ]
    service = make_service(served, Settings(max_body_bytes=10**6, max_context=256), sessions)
    client = TestClient(
        make_app(service), base_url="http://127.0.0.1", raise_server_exceptions=False
    )
    client.__enter__()
    before = {(n, prompt): _written(client, n, prompt) for n in _NAMES for prompt in _PROMPTS}
    for base in _BASES:
        texts = [[before[n, p] for p in _PROMPTS] for n in (base, f"{base}-alias", f"{base}-tuned")]
        # otherwise nothing would tell them apart
        assert texts[0] == texts[1] != texts[2], base
    return client, before


CLASS = FuzzClass(
    make_sources,
    mutate,
    exercise,
    refusals=(Refusal,),
    count=30,
    batch=400,
    packages=("starlette", "llguidance", "uvicorn", "httpx2"),
)
