"""Models that embed texts: conversion, cards and uploads, and Gemma 3 beside transformers and mlx-lm."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import embed, embed_tokens, load, load_model
from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.hub import convert, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint.embedding_files import files_of_pooling, read_embedding_use
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.hub.publish.upload import plan_upload
from mlx_mmfree.layers import PackedBitLinear
from mlx_mmfree.models import TextEmbedder, find
from tests.hub.embedder_folder import embedder_folder
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
TEXTS = ["The queen gave a robe.", "No."]
FAMILIES = ["qwen3", "gemma3_text"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedder") / "model"
    return embedder_folder(path, pooling="mean_tokens", model_type=request.param)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("to", "formats"),
    [("mlx", None), ("hf", None), ("hf", FloatFormats(keep_masters=True))],
    ids=["mlx", "hf", "masters"],
)
def test_conversions_embed_the_same(folder: Path, tmp_path: Path, to: Any, formats: Any) -> None:
    report = convert(open_checkpoint(folder), tmp_path / "out", to=to, formats=formats)
    assert report.is_lossless and report.logits_difference == 0
    assert report.total.source_bytes == open_checkpoint(folder).nbytes
    model, tokenizer = load(tmp_path / "out")
    assert isinstance(model, TextEmbedder) and model.embedding.pooling == "mean"
    assert len(packed_linears(model)) == 14
    assert mx.array_equal(embed(model, tokenizer, TEXTS), embed(*load(folder), TEXTS))
    files = plan_upload(tmp_path / "out", "me/embedder").files
    assert {
        "modules.json",
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
    } <= files.keys()


def test_card_and_other_programs(folder: Path, tmp_path: Path) -> None:
    from mlx_mmfree.hub.publish.model_card import ModelCard

    card = ModelCard("me/embedder", "mlx", "mmfree convert")
    report = convert(open_checkpoint(folder), tmp_path / "out", card=card)
    answers = {each.runtime: each.opens for each in report.openings}
    assert answers["mlx-lm"] is False
    text = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: feature-extraction" in text and "mlx_lm" not in text
    assert "mmfree embed --model me/embedder --text" in text


def test_a_norm_in_each_linear_has_no_format_in_gguf(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no norm inside"):
        convert(open_checkpoint(embedder_folder(tmp_path / "m")), tmp_path / "out", to="gguf")


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "lasttoken"])
def test_dense_ones_keep_their_pooling_in_gguf(tmp_path: Path, pooling: str) -> None:
    folder = embedder_folder(tmp_path / "m", pooling=pooling, quantization_config=None)
    convert(open_checkpoint(folder), tmp_path / "out", to="gguf")
    want, got = (load(path, dtype=mx.float32) for path in (folder, tmp_path / "out"))
    assert (
        isinstance(got[0], TextEmbedder) and got[0].embedding.pooling == want[0].embedding.pooling
    )
    assert relative_error(embed(*got, TEXTS), embed(*want, TEXTS)) <= FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_masters_are_trained_further(tmp_path: Path, family: str) -> None:
    folder = embedder_folder(tmp_path / "m", model_type=family)
    masters = load_model(folder, packed=False, dtype=mx.float32)
    assert not packed_linears(masters)
    save_model(tmp_path / "again", masters)
    tokens = mx.array([[5, 6, 7]])
    want = masters(tokens)[0]
    assert mx.array_equal(load_model(tmp_path / "again", packed=False)(tokens)[0], want)


def test_what_a_model_is_made_for(tmp_path: Path) -> None:
    """With norms in its projections, one that has a head writes texts, unless it has a pooling."""
    folder = embedder_folder(tmp_path / "m")
    weights = mx.load(str(folder / "model.safetensors"))
    renamed = {name.replace("rms_norm", "norm"): array for name, array in weights.items()}
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"], config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    model = load_model(folder)
    assert isinstance(model, TextEmbedder) and len(packed_linears(model)) == 14
    headed = {**renamed, "lm_head.weight": renamed["model.embed_tokens.weight"]}
    mx.save_safetensors(str(folder / "model.safetensors"), headed)
    model = load_model(folder)
    assert not isinstance(model, TextEmbedder) and len(packed_linears(model)) == 14
    (folder / "modules.json").write_text("[]")
    assert isinstance(load_model(folder), TextEmbedder)


def packed_linears(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, PackedBitLinear)]


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "first"), (3, "last")])
def test_poolings_of_gguf(tmp_path: Path, number: int, pooling: str) -> None:
    files = files_of_pooling(number)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert read_embedding_use(tmp_path).pooling == pooling


def test_other_poolings_of_gguf() -> None:
    assert files_of_pooling(0) == files_of_pooling(None) == {}
    for number in (4, -1, True, "mean", [3]):
        with pytest.raises(UnsupportedModelError, match="'pooling_type' must be one of"):
            files_of_pooling(number)


def gemma(**values: Any) -> Any:
    architecture = find("gemma3_text")
    return architecture.config.from_hub({**architecture.tiny, **values})


def test_both_formats_of_rotary_positions_say_the_same() -> None:
    older = {"rope_theta": 5e5, "rope_local_base_freq": 3e3}
    older["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    newer = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
        }
    }
    config = gemma(**older)
    assert config == gemma(**newer) and config.local_theta == 3e3 and config.rotation.factor == 4
    assert gemma(layer_types=["sliding_attention", "full_attention"]) == gemma(
        sliding_window_pattern=2
    )


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (
            {"use_bidirectional_attention": True},
            UnsupportedModelError,
            "use_bidirectional_attention",
        ),
        ({"attn_logit_softcapping": 50.0}, UnsupportedModelError, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, UnsupportedModelError, "final_logit_softcapping"),
        ({"hidden_activation": "silu"}, UnsupportedModelError, "hidden_activation"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "each of the 2 layers"),
        ({"layer_types": ["a", "full_attention"]}, CheckpointError, "each of the 2 layers"),
        ({"layer_types": [["a"], 1]}, CheckpointError, "each of the 2 layers"),
        ({"sliding_window": 0}, CheckpointError, "sliding_window"),
        ({"sliding_window_pattern": -1}, CheckpointError, "sliding_window_pattern"),
        (
            {"sliding_window_pattern": 2, "_sliding_window_pattern": 3},
            CheckpointError,
            "must be equal",
        ),
        ({"query_pre_attn_scalar": 0}, CheckpointError, "query_pre_attn_scalar"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            UnsupportedModelError,
            "must be default or linear",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            UnsupportedModelError,
            "'rope_type' of 'sliding_attention' must be default",
        ),
        (
            {
                "rope_local_base_freq": 1e4,
                "rope_parameters": {"sliding_attention": {"rope_theta": 1e3}},
            },
            CheckpointError,
            "must be equal",
        ),
        ({"rope_parameters": {"sliding_attention": 3}}, CheckpointError, "must be an object"),
    ],
    ids=str,
)
def test_descriptions_that_are_refused(
    values: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        gemma(**values)


ROTATIONS = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "scaled-queries": {"query_pre_attn_scalar": 20},
    "rotations": {"rope_parameters": ROTATIONS},
    "layers": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
}


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", VARIANTS)
def test_gemma_beside_transformers(tmp_path: Path, name: str) -> None:
    """A text that is longer than the window, whole and in chunks, and what is written is read back."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    given = {**sizes, **heads, "sliding_window": 6, "query_pre_attn_scalar": 16, **VARIANTS[name]}
    torch.manual_seed(0)
    theirs = Gemma3ForCausalLM(Gemma3TextConfig(**given)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.2)
        tokens = torch.randint(3, 96, (2, 20))
        want = mx.array(theirs(tokens).logits.numpy())
    theirs.save_pretrained(tmp_path / "theirs")
    ours, ids = load_model(tmp_path / "theirs", dtype=mx.float32), mx.array(tokens.numpy())
    assert relative_error(ours(ids)[0], want) <= FLOAT32
    first, state = ours(ids[:, :11])
    chunks = mx.concatenate([first, ours(ids[:, 11:], state)[0]], axis=1)
    assert relative_error(chunks, want) <= FLOAT32
    save_model(tmp_path / "ours", ours)
    with torch.no_grad():
        back = Gemma3ForCausalLM.from_pretrained(tmp_path / "ours").eval()(tokens).logits.numpy()
    assert relative_error(mx.array(back), want) <= FLOAT32


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_gemma_in_the_widths_of_the_published_model(tmp_path: Path) -> None:
    """Two layers of 270M, dense, on a text that is longer than the window."""
    import torch
    from transformers import Gemma3TextConfig, Gemma3TextModel

    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
    sizes = {"vocab_size": 4096, "hidden_size": 640, "intermediate_size": 2048}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    torch.manual_seed(0)
    given = {**sizes, **heads, **layers, "sliding_window": 512, "query_pre_attn_scalar": 256}
    theirs = Gemma3TextModel(Gemma3TextConfig(**given)).eval()
    tokens = torch.randint(3, 4096, (1, 700))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.05)
        want = theirs(tokens).last_hidden_state[0, -1].numpy()
    theirs.save_pretrained(tmp_path / "m")
    model = load_model(tmp_path / "m", dtype=mx.float32)
    assert isinstance(model, TextEmbedder)
    got = embed_tokens(model, mx.array(tokens.numpy()))
    assert relative_error(got, mx.array(want / np.linalg.norm(want))[None]) <= FLOAT32


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("interval", [2, 3])
def test_gemma_beside_mlx_lm(tmp_path: Path, interval: int) -> None:
    from mlx_lm.utils import load_model as load_theirs

    # mlx-lm rounds the root of the dims to bfloat16, which 8 survives
    config = gemma(
        hidden_size=64, num_hidden_layers=6, sliding_window_pattern=interval, initializer_range=0.2
    )
    mx.random.seed(3)
    ours = find("gemma3_text").build(config)
    save_model(tmp_path / "m", ours)
    theirs, _ = load_theirs(tmp_path / "m")
    tokens = mx.array(np.random.default_rng(0).integers(3, 60, (1, 20)))
    assert relative_error(ours(tokens)[0], theirs(tokens)) <= FLOAT32


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("keep_masters", [False, True], ids=["packed", "masters"])
def test_transformers_opens_what_is_written(
    folder: Path, tmp_path: Path, keep_masters: bool
) -> None:
    import torch
    from transformers import AutoModel

    formats = FloatFormats(keep_masters=keep_masters)
    convert(open_checkpoint(folder), tmp_path / "out", to="hf", formats=formats)
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch_dtype": "float32"}))
    tokens = np.random.default_rng(0).integers(3, 500, (2, 12))
    with torch.no_grad():
        theirs = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
        want = theirs(torch.tensor(tokens)).last_hidden_state.numpy()
    got, _ = load_model(tmp_path / "out", dtype=mx.float32)(mx.array(tokens))
    assert relative_error(got, mx.array(want)) <= FLOAT32
