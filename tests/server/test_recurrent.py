"""Models whose states forget by keys, or decay, are served like others."""

from collections.abc import Callable
from typing import Any

import pytest

from mlx_mmfree import generate
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.hub import Tokenizer
from tests.generation.models import DELTA_RULES
from tests.hub.checkpoints import GOLDENS, tiny_of

pytestmark = pytest.mark.serve
PROMPT = "Once upon a time"


@pytest.mark.parametrize("kind", DELTA_RULES)
def test_texts_are_those_of_generate(start: Callable[..., Any], kind: str) -> None:
    from mlx_mmfree.server.settings import ServedModel

    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")
    model = tiny_of(kind, vocab_size=tokenizer.vocab_size)
    sessions = Sessions(model, memory_bytes=10**8)
    own = [
        ServedModel("plain", model, tokenizer, sessions.for_model(model)),
        ServedModel("drafted", model, tokenizer, None, tiny_of(kind, 4, vocab_size=518)),
    ]
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    with start(*own) as client:
        for name in ("plain", "drafted"):
            answer = client.post("/v1/completions", json={"model": name, **body}).json()
            text = answer["choices"][0]["text"]
            assert text == generate(model, tokenizer, PROMPT, max_tokens=8)
        # a session goes on from what it has read and written
        longer = f"{PROMPT}{text} The"
        again = client.post("/v1/completions", json={"model": "plain", **body, "prompt": longer})
        want = generate(model, tokenizer, longer, max_tokens=8)
        assert again.json()["choices"][0]["text"] == want
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
