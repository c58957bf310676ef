"""Models of `mmfree train` open in mlx-lm and llama.cpp, where they have the architecture."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml

from mlx_mmfree.cli import main
from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.hub import convert, load_model, open_checkpoint
from mlx_mmfree.hub.publish.runtimes import opening
from mlx_mmfree.models import find
from tests.hub.checkpoints import weight_only
from tests.hub.test_gguf_q2_0 import assert_texts_are_those_of_llama_cpp
from tests.tolerances import TOLERANCE, relative_error

TOKENS = mx.array([[5, 77, 130, 9, 260]])
TERNARY = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "ternary llama": TERNARY | WIDE,
    "qwen3": {},
    "qwen3_5_text": {"linear_value_head_dim": 8, "num_hidden_layers": 2},
    "minicpm": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "hgrn_bit": {},
    "gla": {},
    "rwkv7": {},
    # of whose dims the root is exact in bfloat16, in which mlx-lm has it
    "gemma3_text": {"hidden_size": 64, "tie_word_embeddings": True, "sliding_window_pattern": 2},
}
"""Of these llama.cpp has none, and mlx-lm some."""
IN_MLX_LM = ("hgrn_bit", "gemma3_text")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains a small model of a type for two steps, once."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("The dog saw the old cat by the river. " * 300)
    done: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in done:
            kind = name.split()[-1]
            model = {
                **find(kind).tiny,
                "model_type": kind,
                "vocab_size": 300,
                **(MODELS | OTHERS)[name],
            }
            settings = {
                "model": model,
                "output": name,
                "stages": [{"until": 1, "weights": {"text.txt": 1}}],
                **{"steps": 2, "batch_size": 2, "sequence_length": 16, "warmup_steps": 1},
            }
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump(settings))
            assert main(["train", "--config", str(file)]) == 0
            done[name] = folder / name / "model"
        return done[name]

    return train


@pytest.mark.interop
@pytest.mark.usefixtures("unfused")  # mlx-lm lets MLX fuse its operations
@pytest.mark.parametrize("name", [*MODELS, *IN_MLX_LM])
def test_mlx_lm_computes_the_same(trained: Any, name: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    report = convert(open_checkpoint(trained(name)), tmp_path / "m")
    answer = opening(report.openings, "mlx-lm")
    assert answer is not None and answer.opens
    needs_flag = "--trust-remote-code" in answer.note
    theirs, _ = load_with_mlx_lm(tmp_path / "m", trust_remote_code=needs_flag)
    want = weight_only(tmp_path / "m")(TOKENS)[0]
    assert relative_error(theirs(TOKENS), want) <= TOLERANCE[mx.float32]


@pytest.mark.interop
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_writes_the_same(trained: Any, name: str, tmp_path: Path) -> None:
    report = convert(open_checkpoint(trained(name)), tmp_path / "m", to="gguf")
    answer = opening(report.openings, "llama.cpp")
    assert answer is not None and answer.opens
    [file] = (tmp_path / "m").glob("*.gguf")
    assert_texts_are_those_of_llama_cpp(file, load_model(file), TOKENS[0].tolist())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused_with_the_reason(trained: Any, name: str, tmp_path: Path) -> None:
    source = open_checkpoint(trained(name))
    with pytest.raises(
        UnsupportedModelError, match=f"'model_type' '{name}', which this library does"
    ):
        convert(source, tmp_path / "g", to="gguf")
    answer = opening(convert(source, tmp_path / "m").openings, "mlx-lm")
    assert answer is not None and answer.opens == (name in IN_MLX_LM)
    assert answer.opens or answer.note == "it has no such architecture"
