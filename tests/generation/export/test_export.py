"""`export_step`: what is written does what the model does, with the weights that are handed to it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlx_mmfree.errors import CheckpointError, NumericalError, UnsupportedModelError
from mlx_mmfree.generation import export, with_key_values
from mlx_mmfree.generation.export import TOLERANCE, DecodingStep, export_step, uniform
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.attention import key_values as key_value_state
from mlx_mmfree.models import Decoder, architectures, find
from mlx_mmfree.ops import use_backend
from tests.tolerances import relative_error

# some with attention, whose state has space for so many tokens
CAUSAL = {
    **{"bitnet": 256, "gla": None, "hgrn2": None, "hgrn_bit": None, "hybrid": 256, "llama": 256},
    "maple": 256,
    "minicpm": 256,
}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


def tiny(model_type: str, seed: int = 1, **options: Any) -> Decoder:
    """A model of random weights, with a vocabulary for the tokenizer of the tests."""
    mx.random.seed(seed)
    architecture = find(model_type)
    config = {**architecture.tiny, "vocab_size": 518, **options}
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    pack_linears(model)
    model.eval()
    return model


class Stranger:
    """A program that knows the files of a folder alone."""

    def __init__(self, folder: Path):
        self.described = json.loads((folder / "step.json").read_text())
        self._function: Any = mx.import_function(str(folder / "step.mlxfn"))
        name = self.described["weights_file"]
        self._weights: Any = mx.load(str(folder / name)) if name else {}
        self.state = self._function()

    def read(self, token: int) -> mx.array:
        found = self._function(mx.array([token], mx.uint32), *self.state, **self._weights)
        logits, *self.state = found
        return logits[0]

    def logits(self, tokens: Sequence[int]) -> mx.array:
        return mx.stack([self.read(token) for token in tokens])


def defined_logits(model: Decoder, tokens: Sequence[int]) -> mx.array:
    """The logits of the whole text at once, by the definitions of all operations."""
    with use_backend("reference"):
        return model(mx.array([list(tokens)]))[0][0].astype(mx.float32)


def test_the_table_has_every_kind_of_causal_model() -> None:
    assert set(CAUSAL) <= set(architectures())


@pytest.mark.sample(2)
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_stranger_computes_what_the_model_computes(
    name: str, beside: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = tiny(name)
    done = export_step(tmp_path / "out", model, tokenizer, context=5, weights_beside=beside)
    stranger = Stranger(tmp_path / "out")
    expected = defined_logits(model, TEXT)
    assert relative_error(stranger.logits(TEXT), expected) < 1e-5
    described = stranger.described
    assert done.capacity == described["most_tokens"] == CAUSAL[name]
    assert described["vocabulary"] == 518
    assert set(described["end_tokens"]) == tokenizer.eos_token_ids
    # the example begins with the prompt and goes on with the likeliest tokens
    prompt, tokens = described["example"].values()
    logits = defined_logits(model, prompt + tokens)
    assert mx.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist() == tokens
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.sample(2)
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
@pytest.mark.parametrize("name", ["hgrn_bit", "bitnet"])
def test_the_description_holds(
    name: str, beside: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = tiny(name)
    export_step(tmp_path / "out", model, tokenizer, weights_beside=beside)
    stranger = Stranger(tmp_path / "out")
    start, inner = stranger.described["start"], stranger.described["step"]
    assert start["inputs"] == [] and inner["outputs"][0]["name"] == "logits"
    for array, format in zip(stranger.state, start["outputs"], strict=True):
        assert (list(array.shape), str(array.dtype)) == (
            format["shape"],
            f"mlx.core.{format['dtype']}",
        )
        assert mx.all(array == format["initial"]).item()
    formats = [{k: v for k, v in format.items() if k != "initial"} for format in start["outputs"]]
    assert inner["inputs"][1:] == inner["outputs"][1:] == formats
    inputs = [mx.zeros(each["shape"], getattr(mx, each["dtype"])) for each in inner["inputs"]]
    named = {
        each["name"]: mx.zeros(each["shape"], getattr(mx, each["dtype"]))
        for each in inner["named_inputs"]
    }
    assert bool(named) == beside
    function: Any = mx.import_function(str(tmp_path / "out" / "step.mlxfn"))
    for array, format in zip(function(*inputs, **named), inner["outputs"], strict=True):
        assert (list(array.shape), str(array.dtype)) == (
            format["shape"],
            f"mlx.core.{format['dtype']}",
        )


def test_every_ternary_product_is_quantized_matmul(tokenizer: Tokenizer, tmp_path: Path) -> None:
    # 4 matrices of MLGRU and 2 of SwiGLU a block, or stacked, and the head
    export_step(tmp_path / "out", tiny("hgrn_bit"), tokenizer)
    operations = Stranger(tmp_path / "out").described["operations"]
    assert operations["QuantizedMatmul"] > 1 and "Matmul" not in operations


def test_weights_beside_are_those_that_count(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Nothing of the weights stays in the function: another model's weights make it the other model."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    models = [tiny("hgrn_bit", seed, **sizes) for seed in (1, 2)]
    for number, model in enumerate(models):
        export_step(tmp_path / f"{number}", model, tokenizer, weights_beside=True)
    (tmp_path / "1" / "weights.safetensors").replace(tmp_path / "0" / "weights.safetensors")
    found = Stranger(tmp_path / "0").logits(TEXT)
    assert relative_error(found, defined_logits(models[1], TEXT)) < 1e-5
    assert relative_error(found, defined_logits(models[0], TEXT)) > 0.1


def test_weights_are_written_once_and_packed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = tiny("hgrn_bit", hidden_size=256, intermediate_size=512)
    sizes = {}
    for beside in (False, True):
        folder = tmp_path / f"{beside}"
        export_step(folder, model, tokenizer, weights_beside=beside)
        sizes[beside] = (folder / "step.mlxfn").stat().st_size
    weights = (tmp_path / "True" / "weights.safetensors").stat().st_size
    # both hold the scales and biases of quantized_matmul, which are the same for all weights
    assert sizes[False] - sizes[True] == pytest.approx(weights, rel=0.02)
    assert sizes[True] < weights / 2


def test_exporting_changes_nothing_about_the_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = tiny("hgrn_bit")
    before = tree_map(mx.array, model.parameters())
    logits = model(mx.array([TEXT]))[0]
    export_step(tmp_path / "out", model, tokenizer, weights_beside=True)
    same = tree_map(lambda a, b: mx.array_equal(a, b).item(), before, model.parameters())
    assert "False" not in str(same)
    assert mx.array_equal(model(mx.array([TEXT]))[0], logits)


@pytest.mark.parametrize("name", ["hgrn_bit", "bitnet"])
def test_a_token_outside_the_vocabulary_gives_nan(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export_step(tmp_path / "out", tiny(name), tokenizer)
    stranger = Stranger(tmp_path / "out")
    assert mx.all(mx.isfinite(stranger.read(517))).item()
    assert mx.all(mx.isnan(stranger.read(518))).item()


def test_a_full_state_gives_nan(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_value_state, "GROWTH_STEP", 20)
    done = export_step(tmp_path / "out", tiny("bitnet"), tokenizer, context=17)
    assert done.capacity == 20
    stranger = Stranger(tmp_path / "out")
    assert mx.all(mx.isfinite(stranger.logits([3] * 20))).item()
    assert mx.all(mx.isnan(stranger.read(3))).item()


def test_a_state_that_grows_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = with_key_values(tiny("bitnet"), max_kv_size=9)
    with pytest.raises(UnsupportedModelError, match="GQA keeps one that grows") as caught:
        export_step(tmp_path / "out", model, tokenizer)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_operation_that_mlx_cannot_write_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled: Any = mx.custom_function(lambda x: 2 * x)
    doubled.vjp(lambda inputs, cotangents, outputs: 2 * cotangents)
    first = DecodingStep._next

    def changed(self: DecodingStep, *arguments: Any) -> list[mx.array]:
        logits, *state = first(self, *arguments)
        return [doubled(logits), *state]

    monkeypatch.setattr(DecodingStep, "_next", changed)
    with pytest.raises(UnsupportedModelError, match="primitive CustomTransforms"):
        export_step(tmp_path / "out", tiny("hgrn_bit"), tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_thrown_away(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = export.write_safetensors

    def damaged(file: Path, plan: Sequence[Any]) -> None:
        whole(file, plan)
        tensors = dict(mx.load(str(file)))
        tensors["norm.weight"] = tensors["norm.weight"] * 1.001
        mx.eval(tensors)
        mx.save_safetensors(str(file), tensors)

    monkeypatch.setattr(export, "write_safetensors", damaged)
    with pytest.raises(CheckpointError, match="gives others"):
        export_step(tmp_path / "out", tiny("hgrn_bit"), tokenizer, weights_beside=True)
    assert not list(tmp_path.iterdir())


def test_a_step_that_computes_something_else_is_thrown_away(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DecodingStep._next
    monkeypatch.setattr(
        DecodingStep,
        "_next",
        lambda self, *given: [-first(self, *given)[0], *first(self, *given)[1:]],
    )
    with pytest.raises(CheckpointError, match=f"within {TOLERANCE} of the largest"):
        export_step(tmp_path / "out", tiny("hgrn_bit"), tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_finite_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = tiny("hgrn_bit")
    model.norm.weight = model.norm.weight * mx.nan
    with pytest.raises(NumericalError):
        export_step(tmp_path / "out", model, tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_replaced_only_when_asked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = tiny("hgrn_bit")
    export_step(tmp_path / "out", model, tokenizer, weights_beside=True)
    with pytest.raises(CheckpointError, match="new or empty folder"):
        export_step(tmp_path / "out", model, tokenizer)
    (tmp_path / "out" / "config.json").write_text("{}")
    export_step(tmp_path / "out", model, tokenizer, overwrite=True)
    assert not (tmp_path / "out" / "weights.safetensors").exists()
    with pytest.raises(ValueError, match="'context' must be at least 1 but got 0"):
        export_step(tmp_path / "other", model, tokenizer, context=0)


def test_numbers_that_are_all_alike() -> None:
    assert uniform(mx.full((2, 3), -1)) == -1
    assert uniform(mx.array([0.0, 1.0])) is None
    assert uniform(mx.zeros((0,))) is None
