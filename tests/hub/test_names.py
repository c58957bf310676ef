"""Names on disk and in memory."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import find
from mlx_mmfree.models.parts.architecture import WeightNames
from tests.hub.checkpoints import tiny_model

TABLE = {
    "model.norm.weight": "norm.weight",
    "model.layers.{}.proj": "blocks.{}.inner.proj",
    "model.layers.{}.experts.{}.up": "blocks.{}.experts.{}.up_proj",
    "model.layers.{}.gate.0": "blocks.{}.gate_down_proj",
    "model.layers.{}.gate.1": "blocks.{}.gate_proj",
    "model.layers.{}.proj.unused": None,
    "positions.0": "positions.lines",
    "positions.1": "positions.columns",
    "lm_head": "head",
}


@pytest.mark.parametrize(
    ("disk", "memory"),
    [
        ("model.norm.weight", "norm.weight"),
        ("model.layers.12.proj.weight", "blocks.12.inner.proj.weight"),
        ("model.layers.0.proj.norm.weight", "blocks.0.inner.proj.norm.weight"),
        ("model.layers.0.proj.weight_scale", "blocks.0.inner.proj.scale"),
        ("model.layers.3.experts.7.up.weight", "blocks.3.experts.7.up_proj.weight"),
        ("model.layers.31.gate.0.weight", "blocks.31.gate_down_proj.weight"),
        ("model.layers.1.gate.1.norm.2.weight", "blocks.1.gate_proj.norm.2.weight"),
        ("positions.1", "positions.columns"),
        ("lm_head.weight", "head.weight"),
        ("lm_head", "head"),
    ],
)
def test_translates_both_ways(disk: str, memory: str) -> None:
    names = WeightNames(TABLE)
    assert names.to_memory(disk) == memory
    assert names.to_disk(memory) == disk


@pytest.mark.parametrize(
    "name",
    ["", "x", "model.norm", "model.layers.1", "model.layers.a.proj", "model.layers.1.gate.2"],
)
def test_unknown_names(name: str) -> None:
    names = WeightNames(TABLE)
    assert names.to_memory(name) is None
    assert not names.is_unused(name)
    with pytest.raises(KeyError):
        names.to_disk(name)


def test_unused_tensors_have_no_name_in_memory() -> None:
    names = WeightNames(TABLE)
    assert names.is_unused("model.layers.4.proj.unused")
    assert names.to_memory("model.layers.4.proj.unused") is None


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"conv_size": 4},
        {"conv_size": 4, "share_conv_kernel": False},
        {"tie_word_embeddings": True},
        {"linear_class": "dense"},
        {"use_lower_bound": False},
    ],
    ids=str,
)
def test_tables_cover_every_parameter(options: dict[str, object], is_packed: bool) -> None:
    model = tiny_model(**options)
    if is_packed:
        pack_linears(model)
    names = WeightNames(find("hgrn_bit").weight_names)
    memory = [name for name, _ in tree_flatten(model.parameters())]
    disk = [names.to_disk(name) for name in memory]
    assert [names.to_memory(name) for name in disk] == memory
    assert len(set(disk)) == len(disk)


# by architecture, the bias of the logits and its second name
BIASES = {
    "big_bird": ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    "fnet": ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    "longformer": ("lm_head.bias", "lm_head.decoder.bias"),
    "reformer": ("lm_head.decoder.bias", "lm_head.bias"),
}
# the embedding, and the names of its copies
COPIES = {
    "big_bird": ("bert.embeddings.word_embeddings", ["cls.predictions.decoder"]),
    "fnet": ("fnet.embeddings.word_embeddings", ["cls.predictions.decoder"]),
    "longformer": ("longformer.embeddings.word_embeddings", ["lm_head.decoder"]),
    "marian": (
        "model.shared",
        ["lm_head", "model.encoder.embed_tokens", "model.decoder.embed_tokens"],
    ),
}


def _written(folder: Path, name: str) -> tuple[Path, dict[str, mx.array]]:
    """The file of a model of random weights, and its tensors."""
    architecture = find(name)
    mx.random.seed(1)
    save_model(folder, architecture.build(architecture.config.from_hub(architecture.tiny)))
    file = folder / "model.safetensors"
    tensors = dict(mx.load(str(file)))
    mx.eval(tensors)
    return file, tensors


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BIASES)
def test_either_name_of_a_bias_is_read(tmp_path: Path, name: str) -> None:
    """Transformers 5.24 does the same: a tensor found under one name alone is tied to the other."""
    first, second = BIASES[name]
    file, tensors = _written(tmp_path / "m", name)
    bias = mx.arange(60.0)
    for added in ({first: bias}, {second: bias}, {first: bias, second: mx.array(bias)}):
        others = {key: each for key, each in tensors.items() if key not in (first, second)}
        mx.save_safetensors(str(file), others | added)
        model = load_model(tmp_path / "m")
        found = model.head.bias if name == "reformer" else model.logits_bias
        assert mx.array_equal(found, bias)
    mx.save_safetensors(str(file), others)
    with pytest.raises(CheckpointError, match=f"lacks tensors .* '{first}'"):
        load_model(tmp_path / "m")


def test_the_bias_that_reformer_applies_is_that_of_the_decoder(tmp_path: Path) -> None:
    """Once it was trained by transformers 5, which keeps the other as it was."""
    file, tensors = _written(tmp_path / "m", "reformer")
    bias = mx.arange(60.0)
    both = {"lm_head.bias": mx.zeros(60), "lm_head.decoder.bias": bias}
    mx.save_safetensors(str(file), tensors | both)
    model = load_model(tmp_path / "m")
    assert mx.array_equal(model.head.bias, bias)
    save_model(tmp_path / "again", model)
    written = mx.load(str(tmp_path / "again/model.safetensors"))
    assert "lm_head.bias" not in written and mx.array_equal(written["lm_head.decoder.bias"], bias)


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_tied_tensors_must_be_equal(tmp_path: Path, name: str) -> None:
    original, copies = COPIES[name]
    file, tensors = _written(tmp_path / "m", name)
    pairs = [(f"{original}.weight", f"{copy}.weight") for copy in copies]
    pairs += [BIASES[name]] if name in BIASES else []
    same = {copy: mx.array(tensors[first]) for first, copy in pairs}
    mx.save_safetensors(str(file), tensors | same)
    load_model(tmp_path / "m")
    for first, copy in pairs:
        mx.save_safetensors(str(file), tensors | same | {copy: tensors[first] + 1})
        with pytest.raises(CheckpointError, match=f"'{copy}' in .* must equal '{first}'"):
            load_model(tmp_path / "m")


def test_swin_of_older_files(tmp_path: Path) -> None:
    """Microsoft's files, and timm's before 0.9, merge patches at the end of the stage before."""
    file, tensors = _written(tmp_path / "m", "swin")
    images = mx.random.normal((1, 22, 18, 3))
    want = load_model(tmp_path / "m")(images)
    older = {}
    for name, array in tensors.items():
        name = name.replace("head.fc.", "head.").replace("layers.1.down", "layers.0.down")
        older[name] = array
    assert {"head.weight", "layers.0.downsample.reduction.weight"} <= older.keys()
    assert not older.keys() & {"head.fc.weight", "layers.1.downsample.reduction.weight"}
    mx.save_safetensors(str(file), older)
    assert mx.array_equal(load_model(tmp_path / "m")(images), want)
