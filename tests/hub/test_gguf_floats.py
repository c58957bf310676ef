"""Tensors that a GGUF file stores in float32 stay so where a model computes in 16 bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.files.gguf_file import read_parts
from mlx_mmfree.hub import convert, load_model, needed_bytes, open_checkpoint
from mlx_mmfree.layers.matrix import matrices, parameters
from tests.hub.checkpoints import GOLDENS, logits, tiny_transformer
from tests.hub.gguf_files import metadata_of, tensors_of, write_gguf
from tests.tolerances import TOLERANCE, relative_error

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "initializer_range": 0.1,
    "attention_bias": True,
}
FILES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama, F16": ("llama", "F16", "F16", {"linears": None, "mlp_bias": True}),
    "llama, I2_S": ("llama", "I2_S", "F16", {"mlp_bias": True}),
    "qwen3, BF16": ("qwen3", "BF16", "BF16", {"linears": None}),
    "minicpm, Q8_0": ("minicpm", "Q8_0", "Q8_0", {"linears": None}),
}


def biased(file: Path, kind: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A file, and its biases as they were written."""
    architecture, linears, embedding, options = FILES[kind]
    model = tiny_transformer(architecture, **SIZES | options)
    mx.random.seed(4)
    biases = {}
    for path, module in model.named_modules():
        if "bias" in module:
            # 16 bits hold none of these
            module.bias = 1 + 1e-4 * mx.random.normal(module.bias.shape)
            biases[path] = np.array(module.bias)
    tensors = tensors_of(model, architecture, linears, embedding)
    return write_gguf(file, metadata_of(model, architecture), tensors), biases


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", FILES)
def test_biases_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    file, biases = biased(tmp_path / "m.gguf", kind)
    model = load_model(file)
    assert model.dtype in (mx.float16, mx.bfloat16)
    modules = dict(model.named_modules())
    for path, want in biases.items():
        assert modules[path].bias.dtype == mx.float32
        assert np.array_equal(np.array(modules[path].bias), want), path
    assert logits(model).dtype == model.dtype
    if "I2_S" not in kind:
        # codes of activations may differ where a value lies between two
        exact = logits(load_model(file, dtype=mx.float32))
        assert relative_error(logits(model), exact) <= TOLERANCE[model.dtype]
    nbytes = sum(array.nbytes for array in parameters(model).values())
    assert needed_bytes(open_checkpoint(file)) == nbytes
    convert(open_checkpoint(file), tmp_path / "converted")
    again = load_model(tmp_path / "converted")
    assert mx.array_equal(logits(again), logits(model))
    assert load_model(file, dtype=model.dtype).blocks[0].token_mixer.key_proj.bias.dtype == (
        model.dtype
    )


CASES = ("gguf_qwen3_q2_0", "gguf_maple_q2_0", "gguf_qwen35_q2_0", "gguf_qwen35_pq2_0_rotated")


@pytest.mark.parametrize("case", CASES)
def test_all_of_published_formats_stay(case: str) -> None:
    """Gains, the router, rates, their biases, taps and signs, where all other floats are cast."""
    file = GOLDENS / case / "model.gguf"
    checkpoint = open_checkpoint(file)
    exact, cast = (
        load_model(replace(checkpoint, dtype=dtype)) for dtype in (mx.float32, mx.bfloat16)
    )
    of_matrices = {
        f"{path}.{key}"
        for path, matrix in matrices(exact).items()
        for key in ("weight", "scales", "biases", "scale")
        if not path.endswith("router")
    }
    floats = parameters(exact).keys() - of_matrices
    got, want = parameters(cast), parameters(exact)
    for name in floats:
        assert got[name].dtype == mx.float32 and mx.array_equal(got[name], want[name]), name
    kinds = [each.kind.name for _, each in read_parts(file)[1]]
    assert len(floats) >= kinds.count("F32") > 0
