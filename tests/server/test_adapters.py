"""Adapters as models of their own, beside the model whose weights they share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree import generate, load
from mlx_mmfree.cli.serve import build_parser, served_models
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter, write_adapter
from mlx_mmfree.models import Decoder
from mlx_mmfree.training.fine_tuning.fine_tune import adapt_layers

pytestmark = pytest.mark.serve

PROMPT = "Once upon a time"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """The folder of an adapter for the model in the package."""
    from mlx_mmfree import demo

    model, _ = load(demo.path())
    mx.random.seed(1)
    adapt_layers(model, kind="lora", rank=4, scale=2.0)
    for name, array in tree_flatten(model.trainable_parameters()):
        if name.endswith("lora_b"):
            array[:] = mx.random.normal(array.shape)
    write_adapter(tmp_path / "adapter", model, {"model": "demo"})
    return tmp_path / "adapter"


def test_each_adapter_is_a_model(
    adapter: Path, demo_model: tuple[Decoder, Tokenizer], start: Callable[..., Any]
) -> None:
    from mlx_mmfree import demo

    model, tokenizer = demo_model
    args = build_parser().parse_args(
        ["--adapter", f"tales={adapter}", "--adapter", f"more={adapter}"]
    )
    base, *adapted = served_models(args, model, tokenizer, Sessions(model, memory_bytes=10**6))
    assert [served.name for served in (base, *adapted)] == ["demo", "demo:tales", "demo:more"]
    shared = dict(tree_flatten(model.parameters()))
    for served in adapted:
        arrays = dict(tree_flatten(served.model.parameters()))
        again = {name.replace(".base.", "."): array for name, array in arrays.items()}
        # the very arrays of the model, not copies
        assert all(again[name] is array for name, array in shared.items())
    with start(*adapted) as client:
        listed = [entry["id"] for entry in client.get("/v1/models").json()["data"]]
        texts = {}
        for name in ("demo", "demo:tales", "demo:more"):
            body = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["model"] == name
            known = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            # what one model has read is not known to another, unless its weights are the same
            assert (known > 0) == (name == "demo:more")
            texts[name] = answer["choices"][0]["text"]
    assert listed == ["demo", "chat", "demo:tales", "demo:more"]
    alone, _ = load(demo.path())
    want = generate(attach(alone, read_adapter(adapter)).eval(), tokenizer, PROMPT, max_tokens=12)
    assert texts["demo:tales"] == want != texts["demo"]
    assert texts["demo"] == generate(model, tokenizer, PROMPT, max_tokens=12)
