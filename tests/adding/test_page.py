"""The text model that the page on models adds is saved, loaded, made ternary and refused by name."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree import load_model, load_plugin, save_model
from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.hub import convert, open_checkpoint
from mlx_mmfree.hub.conversion.to_folder import ternarized
from mlx_mmfree.models import find

PAGE = Path(__file__).parents[2] / "mlx_mmfree/models/README.md"


def test_the_page_adds_a_model(tmp_path: Path) -> None:
    file = tmp_path / "tanh_llama.py"
    file.write_text(re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])
    load_plugin(file)
    architecture = find("tanh_llama")
    model = architecture.build(architecture.config.from_hub(architecture.tiny))
    save_model(tmp_path / "model", model)
    tokens = mx.array([[1, 2, 3]])
    source = open_checkpoint(tmp_path / "model")
    assert mx.array_equal(load_model(source)(tokens)[0], model(tokens)[0])
    convert(ternarized(source), tmp_path / "ternary", check=True)
    with pytest.raises(UnsupportedModelError, match="'to' must be mlx or hf"):
        convert(source, tmp_path / "gguf", to="gguf")
