"""Every family of models is served, and its texts equal `generate`'s."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation import generate
from mlx_mmfree.hub import load
from tests.models.families import FAMILIES

pytestmark = pytest.mark.serve
PROMPT = "The dog is"


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_generate(
    family: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    from mlx_mmfree.server.settings import ServedModel

    FAMILIES[family](tmp_path / "model")
    model, tokenizer = load(tmp_path / "model", dtype=mx.float32)
    body = {"model": "own", "max_tokens": 6, "temperature": 0}
    with start(ServedModel("own", model, tokenizer)) as client:
        answer = client.post("/v1/completions", json=body | {"prompt": PROMPT}).json()
        messages = [{"role": "user", "content": "Hello"}]
        chat_answer = client.post("/v1/chat/completions", json=body | {"messages": messages}).json()
    assert answer["choices"][0]["text"] == generate(model, tokenizer, PROMPT, max_tokens=6)
    ids = tokenizer.apply_chat_template(messages)
    want = generate(model, tokenizer, ids, max_tokens=6)
    assert chat_answer["choices"][0]["message"]["content"] == want
