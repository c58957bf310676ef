"""A model that is served with drafts gives the same texts."""

from collections.abc import Callable
from typing import Any

import pytest

from mlx_mmfree.generation.scheduling.drafting import Drafting
from tests.server.conftest import stream

pytestmark = pytest.mark.serve


def test_texts_stay_what_they_are(
    start: Callable[..., Any], demo_model: Any, monkeypatch: Any
) -> None:
    from mlx_mmfree.server.settings import ServedModel

    steps: list[int] = []
    step = Drafting.step

    def counted(self: Drafting, row: Any) -> list[int]:
        tokens = step(self, row)
        steps.append(len(tokens))
        return tokens

    monkeypatch.setattr(Drafting, "step", counted)
    served = ServedModel("drafted", *demo_model, None, demo_model[0])
    with start(served) as client:
        bodies = [
            {"model": name, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
            for name in ("demo", "drafted")
        ]
        plain, drafted = (client.post("/v1/completions", json=body).json() for body in bodies)
        assert drafted["choices"] == plain["choices"]
        assert drafted["usage"]["completion_tokens"] == 24
        assert max(steps) == 4
        shown = stream(client, **bodies[1])
        text = "".join(event["choices"][0]["text"] for event in shown if event["choices"])
        assert text == plain["choices"][0]["text"]


@pytest.mark.parametrize("temperature", [0, 0.4])
def test_drafts_from_the_text_change_nothing(start: Callable[..., Any], temperature: float) -> None:
    story = "The dog ran to the tree. The dog ran to the tree. The dog ran"
    body = {"prompt": story, "max_tokens": 60, "temperature": temperature, "seed": 3}
    texts = []
    for drafts in (False, True):
        with start(ngram_drafts=drafts) as client:
            answers = [client.post("/v1/completions", json=body).json() for _ in range(2)]
            texts += [answer["choices"][0]["text"] for answer in answers]
    assert len(set(texts)) == 1
