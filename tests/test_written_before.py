"""Files that the version before the package got its rooms wrote are read and mean the same.

`tests/data/written_before` holds models in each form, adapters and prompt caches of that version, and in
`expected.json` what it computed with them.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation import generate_tokens, load_prompt_cache
from mlx_mmfree.hub import load_model
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter
from tests.tolerances import TOLERANCE, relative_error

FOLDER = Path(__file__).parent / "data" / "written_before"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
TOKENS = mx.array([[1, 7, 3, 39, 0]])


def assert_as_before(logits: mx.array, name: str) -> None:
    assert relative_error(logits[0, -1], mx.array(EXPECTED[name])) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize(
    "name", ["hgrn_packed", "hgrn_mlx", "llama_packed", "llama_mlx", "llama_hf"]
)
def test_models(name: str) -> None:
    assert_as_before(load_model(FOLDER / name)(TOKENS)[0], name)


@pytest.mark.parametrize("name", ["lora_adapter", "dora_adapter"])
def test_adapters(name: str) -> None:
    model = load_model(FOLDER / "hgrn_packed")
    assert_as_before(attach(model, read_adapter(FOLDER / name)).eval()(TOKENS)[0], name)


@pytest.mark.parametrize("name", ["hgrn", "llama"])
def test_prompt_caches(name: str) -> None:
    model = load_model(FOLDER / f"{name}_packed")
    cache = load_prompt_cache(FOLDER / f"{name}_prompt.safetensors", model)
    expected = EXPECTED[f"{name}_prompt"]
    assert cache.tokens == expected["tokens"]
    going_on = generate_tokens(model, [5], state=cache.state, max_tokens=5)
    assert list(going_on) == expected["next"]
