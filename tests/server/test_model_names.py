"""The names that models have in requests, and the list of them in both vendors' formats."""

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.cli.serve import build_parser, flags_of_models, served_models
from mlx_mmfree.errors import UsageError
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder
from tests.server.test_refusals import error_of

pytestmark = pytest.mark.serve

BODY = {"prompt": "a", "max_tokens": 1}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
}


def alone(*served: Any) -> Any:
    """A client of a server of these models and no others."""
    from starlette.testclient import TestClient

    from mlx_mmfree.server.app import make_app
    from mlx_mmfree.server.run import make_service
    from mlx_mmfree.server.settings import Settings

    return TestClient(make_app(make_service(served, Settings())), base_url="http://127.0.0.1")


def test_names_of_agents_go_to_the_only_model(
    chat_model: tuple[Decoder, Tokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    from mlx_mmfree.server.settings import ServedModel

    served = ServedModel("mine", *chat_model, aliases=("other", "claude-own"))
    adapted = ServedModel("mine:tales", *chat_model)
    with alone(served, adapted) as client, caplog.at_level(logging.INFO):
        for path, body in PATHS.items():
            for name in ("mine", "other", "claude-own", "claude-haiku-9", "gpt-7-mini", None):
                answer = client.post(path, json={"model": name, **body})
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == "mine"
            assert client.post(path, json={"model": "claudette", **body}).status_code == 404
        for name in ("claude-haiku-9", "gpt-7-mini"):
            assert caplog.text.count(f"Requests for '{name}' go to mine, the only model.") == 1
        assert "claude-own" not in caplog.text


def test_names_of_agents_are_refused_beside_several_models(client: Any) -> None:
    error = error_of(client.post("/v1/completions", json={"model": "gpt-7", **BODY}), 404)
    assert "one of 'demo', 'chat' but got 'gpt-7'" in error["message"]


def test_names_by_flags(tmp_path: Path, demo_model: tuple[Decoder, Tokenizer]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = ["--model", str(tmp_path / "a")]
    both = [*first, "--model", str(tmp_path / "b")]

    def names(*flags: str) -> list[list[str]]:
        each = flags_of_models(build_parser().parse_args(flags))
        return [own.served_model_name for own in each]

    assert names(*first, "--served-model-name", "x", "y=z") == [["x", "y=z"]]
    assert names(*first, "--served-model-name", "a=x", "--served-model-name", "y") == [["x", "y"]]
    assert names(*both, "--served-model-name", "b=x", "b=y") == [[], ["x", "y"]]
    (own,) = flags_of_models(
        build_parser().parse_args([*first, "--served-model-name", "x", "y", "--max-tokens", "5"])
    )
    (served,) = served_models(own, *demo_model, None)
    assert (served.name, served.aliases) == ("x", ("y",))
    for flags, words in (
        ([*both, "--served-model-name", "x"], "must be MODEL=NAME with one of the models a, b"),
        ([*both, "--served-model-name", "a="], "must be MODEL=NAME"),
        ([*both, "--served-model-name", "c=x"], "must be MODEL=NAME"),
        ([*both, "--served-model-name", "a=b"], "a name of their own each time but got b, b"),
        ([*first, "--served-model-name", "x", "x"], "a name of their own each time but got x, x"),
    ):
        with pytest.raises(UsageError, match=words):
            names(*flags)


def test_the_list_has_both_formats_and_pages(
    start: Callable[..., Any], demo_model: tuple[Decoder, Tokenizer]
) -> None:
    from mlx_mmfree.server.settings import ServedModel

    with start(*(ServedModel(f"m{n}", *demo_model) for n in range(3))) as client:

        def page(**query: Any) -> dict[str, Any]:
            answer = client.get("/v1/models", params=query)
            assert answer.status_code == 200, answer.text
            listed: dict[str, Any] = answer.json()
            ids = [model["id"] for model in listed["data"]]
            assert [listed["first_id"], listed["last_id"]] == (
                [ids[0], ids[-1]] if ids else [None] * 2
            )
            return listed | {"ids": ids}

        every = page()
        assert every["ids"] == ["demo", "chat", "m0", "m1", "m2"] and not every["has_more"]
        for model in every["data"]:
            assert (model["type"], model["object"]) == ("model", "model")
            assert model["display_name"] == model["id"]
            assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
            assert client.get(f"/v1/models/{model['id']}").json() == model
        found: list[str] = []
        after: dict[str, Any] = {}
        while True:
            listed = page(limit=2, **after)
            found += listed["ids"]
            if not listed["has_more"]:
                break
            after = {"after_id": listed["last_id"]}
        assert found == every["ids"]
        before = page(limit=2, before_id="m2")
        assert before["ids"] == ["m0", "m1"] and before["has_more"]
        first = page(limit=2, before_id="m0")
        assert first["ids"] == ["demo", "chat"] and not first["has_more"]
        assert page(before_id="demo")["ids"] == page(after_id="m2")["ids"] == []
        for query in ("limit=0", "limit=1001", "limit=x", "after_id=x", "before_id="):
            error_of(client.get(f"/v1/models?{query}"), 400)
