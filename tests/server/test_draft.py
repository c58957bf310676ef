"""A model that is served with a draft model gives the same texts."""

from collections.abc import Callable
from typing import Any

import pytest

from mlx_mmfree.generation.scheduling.scheduler import Drafting
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
