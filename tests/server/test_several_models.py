"""Several models: each is loaded when it is asked for, and leaves when others need its memory."""

import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli.serve import build_parser, flags_of_models
from mlx_mmfree.errors import UsageError
from mlx_mmfree.generation.memory import MemoryNeed
from mlx_mmfree.hub import Tokenizer, load, save_model
from mlx_mmfree.models import Decoder
from tests.server.conftest import events, with_template
from tests.server.process import ServerProcess

pytestmark = pytest.mark.serve

NEED = MemoryNeed(weights_bytes=100, state_bytes=10, activations_bytes=50)
ALONE, BOTH = 160, 270
QUESTION = [{"role": "user", "content": "Hi"}]
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


class Models:
    """A server of models that are loaded from folders, and what it has loaded.

    Attributes:
        client: Its client.
        loads: The names of what was loaded, in turn.
        models: A weak reference to each.
        broken: The names of those that cannot be loaded.
    """

    def __init__(self, pairs: dict[str, Callable[[], tuple[Decoder, Tokenizer]]]):
        self._pairs = pairs
        self.loads: list[str] = []
        self.models: list[weakref.ref[Any]] = []
        self.broken: set[str] = set()
        self.client: Any = None

    def weights(self, name: str, sessions: Any) -> Any:
        from mlx_mmfree.server.engine.weights import Weights
        from mlx_mmfree.server.settings import ServedModel

        def read() -> Sequence[ServedModel]:
            self.loads.append(name)
            if name in self.broken:
                raise ValueError("the folder /secret of this machine is broken")
            model, tokenizer = self._pairs[name]()
            self.models.append(weakref.ref(model))
            return [ServedModel(name, model, tokenizer, sessions.for_model(model))]

        return Weights([ServedModel(name, *self._pairs[name]())], read, NEED)

    def complete(self, name: str, **body: Any) -> Any:
        """The answer of a model."""
        response = self.client.post("/v1/completions", json={**COMPLETION, "model": name, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def loaded(self) -> list[str]:
        """The models in memory, as the server lists them."""
        listed = self.client.get("/v1/models").json()["data"]
        return [model["id"] for model in listed if model["loaded"]]


Serve = Callable[..., Iterator[Models]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    root = tmp_path_factory.mktemp("several")
    model, _ = with_template(root / "tokenizer", None)
    save_model(root / "talks", model, root / "tokenizer")
    return root / "talks"


@pytest.fixture
def serve(folder: Path, request: pytest.FixtureRequest) -> Callable[[int | None], Models]:
    """Starts a server of the models `a` and `c`, which continue texts, and `b`, which answers."""
    from starlette.testclient import TestClient

    from mlx_mmfree.generation.sessions import Sessions
    from mlx_mmfree.server.app import make_app
    from mlx_mmfree.server.run import make_service
    from mlx_mmfree.server.settings import Settings

    def started(budget: int | None) -> Models:
        pairs = {"a": lambda: load(demo.path()), "b": lambda: load(folder)}
        models = Models(pairs | {"c": pairs["a"]})
        sessions = Sessions(None, memory_bytes=10**8)
        weights = [models.weights(name, sessions) for name in ("a", "b", "c")]
        app = make_app(make_service(weights, Settings(), sessions, budget))
        client = TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False)
        client.__enter__()
        request.addfinalizer(lambda: client.__exit__(None, None, None))
        models.client = client
        return models

    return started


def test_a_model_is_loaded_when_it_is_asked_for(serve: Callable[..., Models]) -> None:
    models = serve(None)
    assert models.loaded() == models.loads == []
    # what is refused loads nothing
    refused = models.client.post("/v1/chat/completions", json={"model": "a", "messages": QUESTION})
    assert refused.status_code == 400
    counted = {"model": "b", "messages": QUESTION}
    assert models.client.post("/v1/messages/count_tokens", json=counted).status_code == 200
    assert models.loads == []
    answer = models.client.post("/v1/completions", json=COMPLETION).json()
    assert answer["model"] == "a" and models.loaded() == ["a"]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 4},
        "/v1/messages": {"messages": QUESTION, "max_tokens": 4},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
        "/v1/embeddings": {"input": "Hi"},
    }
    for path, body in bodies.items():
        answer = models.client.post(path, json={"model": "b", **body})
        assert answer.status_code == 200 and answer.json()["model"] == "b", answer.text
    assert models.loads == models.loaded() == ["a", "b"]
    first = models.client.post("/v1/embeddings", json={"model": "c", "input": "Hi"})
    assert first.status_code == 200 and models.loads == ["a", "b", "c"]


def test_those_used_longest_ago_leave(serve: Callable[..., Models]) -> None:
    models = serve(BOTH)
    answer = models.complete("a")
    models.complete("b")
    models.complete("a")
    models.complete("c")
    assert models.loaded() == ["a", "c"] and models.loads == ["a", "b", "c"]
    gone = models.models[1]
    assert gone() is None
    models.complete("b")
    assert models.loaded() == ["b", "c"]
    # what it has read is known when it comes back
    again = models.complete("a", prompt=COMPLETION["prompt"] + answer["choices"][0]["text"])
    known = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert known == answer["usage"]["total_tokens"] - 1
    assert models.loads == ["a", "b", "c", "b", "a"]


def test_none_that_is_under_way_leaves(serve: Callable[..., Models]) -> None:
    models = serve(ALONE)
    want = models.complete("a", max_tokens=150)["choices"][0]["text"]
    begun = threading.Event()
    ends: list[str] = []

    def long() -> str:
        body = {**COMPLETION, "model": "a", "max_tokens": 150, "stream": True}
        text = ""
        with models.client.stream("POST", "/v1/completions", json=body) as response:
            lines = list(response.iter_lines())
        for event in events("\n\n".join(line for line in lines if line)):
            text += event["choices"][0]["text"]
        ends.append("a")
        return text

    def other(name: str) -> str:
        begun.wait()
        text: str = models.complete(name)["choices"][0]["text"]
        ends.append(name)
        return text

    names = ("b", "a", "c")
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(long)
        others = [pool.submit(other, name) for name in names]
        begun.set()
        texts = [each.result() for each in others]
        assert first.result() == want
    assert texts[1] == models.complete("a")["choices"][0]["text"]
    assert len(models.loaded()) == 1
    assert {*models.loads} == {"a", "b", "c"}


def test_models_that_have_space_answer_together(serve: Callable[..., Models]) -> None:
    models = serve(BOTH)
    prompts = [f"{COMPLETION['prompt']} {n}" for n in range(12)]
    asked = [(name, prompt) for prompt in prompts for name in ("a", "b")]

    def text(pair: tuple[str, str]) -> str:
        answer = models.complete(pair[0], prompt=pair[1])
        found: str = answer["choices"][0]["text"]
        return found

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(text, asked))
    assert sorted(models.loads) == ["a", "b"]
    assert together == [text(pair) for pair in asked]


def test_models_that_have_no_space_answer_in_turn(serve: Callable[..., Models]) -> None:
    models = serve(ALONE)
    asked = [name for _ in range(4) for name in ("a", "b")]

    def text(name: str) -> str:
        found: str = models.complete(name)["choices"][0]["text"]
        return found

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(text, asked))
    assert together == [text(name) for name in asked]
    alive = [model for model in models.models if model() is not None]
    assert len(alive) == 1


FORMATS = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": QUESTION},
    "/v1/embeddings": {"input": "Hi"},
}


@pytest.mark.parametrize("path", FORMATS)
def test_an_unknown_name_is_refused(serve: Callable[..., Models], path: str) -> None:
    models = serve(None)
    response = models.client.post(path, json={"model": "d", **FORMATS[path]})
    error = response.json()["error"]
    assert response.status_code == 404 and "one of 'a', 'b', 'c' but got 'd'" in error["message"]
    kind = "not_found_error" if "messages" in path.split("/")[2] else "invalid_request_error"
    assert error["type"] == kind and models.loads == []


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/completions", True),
        ("/v1/chat/completions", False),
        ("/v1/chat/completions", True),
        ("/v1/responses", True),
        ("/v1/messages", False),
        ("/v1/messages", True),
        ("/v1/embeddings", False),
    ],
)
def test_one_that_cannot_be_loaded_fails_alone(
    serve: Callable[..., Models], path: str, stream: bool
) -> None:
    models = serve(ALONE)
    models.broken.add("b")
    body = {"model": "b", **FORMATS[path]} | ({"stream": True} if stream else {})
    response = models.client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 500 and "'b' must be loaded but cannot be" in error["message"]
    assert "secret" not in response.text
    assert error["type"] == ("api_error" if path == "/v1/messages" else "server_error")
    assert models.complete("a")["model"] == "a"
    models.broken.clear()
    assert models.client.post(path, json=body).status_code == 200


def test_flags_of_each_model(tmp_path: Path) -> None:
    for name in ("a", "b", "a:more"):
        (tmp_path / name).mkdir()
    both = ["--model", str(tmp_path / "a"), "--model", str(tmp_path / "b")]
    more = ["--adapter", "b:tales=x", "--adapter", "a:more=y", "--draft-model", "b=z"]
    first, second = flags_of_models(build_parser().parse_args([*both, *more]))
    assert (first.adapter, first.draft_model) == ([("more", "y")], None)
    assert (second.adapter, second.draft_model) == ([("tales", "x")], "z")
    (one,) = flags_of_models(build_parser().parse_args(["--draft-model", "z"]))
    assert (one.model, one.draft_model) == (None, "z")
    # one model may stand before its adapters too
    (one,) = flags_of_models(build_parser().parse_args([*both[:2], "--adapter", "a:more=y"]))
    assert one.adapter == [("more", "y")]
    with pytest.raises(
        UsageError, match="as in a:NAME=FOLDER and a=FOLDER, but one of them has 'b'"
    ):
        flags_of_models(build_parser().parse_args([*both[:2], "--adapter", "b:more=y"]))
    for flags, words in (
        (["--adapter", "tales=x"], "must name a model that is served, as in a:NAME=FOLDER"),
        (["--draft-model", "z"], "one of them has 'z'"),
        (["--draft-model", "a"], "as in a:NAME=FOLDER and a=FOLDER, but one of them has 'a'"),
        (
            ["--model", str(tmp_path / "a:more"), "--adapter", "a:more=x"],
            "got a, a:more, b, a:more",
        ),
        (["--revision", "main"], "'revision' must come with one 'model' but came with 2"),
        (["--model", str(tmp_path / "a")], "a name of its own each time but got a, b, a"),
    ):
        with pytest.raises(UsageError, match=words):
            flags_of_models(build_parser().parse_args([*both, *flags]))


SMALL = """
from mlx_mmfree.generation import memory
memory.memory_offer = lambda device: ("has", 1)
"""


def test_the_command_serves_several(folder: Path) -> None:
    import httpx2

    flags = ["--model", folder, "--model", demo.path()]
    with ServerProcess(*flags, first=SMALL) as server:
        with httpx2.Client(base_url=server.url, timeout=60) as client:
            listed = client.get("/v1/models").json()["data"]
            names = [model["id"] for model in listed]
            assert [model["kind"] for model in listed] == ["chat", "base"]
            assert not any(model["loaded"] for model in listed)
            for name in (*names, names[0]):
                answer = client.post("/v1/completions", json={**COMPLETION, "model": name})
                assert answer.status_code == 200, answer.text
                listed = client.get("/v1/models").json()["data"]
                assert [model["id"] for model in listed if model["loaded"]] == [name]
        server.process.terminate()
        assert server.wait() == 0
        assert server.log.count("has left memory") == 2, json.dumps(server.log)
