"""A hybrid in MLX's format, run by mlx-lm with the model file that lies beside it."""

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mmfree.hub import convert, open_checkpoint, save_model
from mlx_mmfree.hub.adapters.adapter_folder import write_adapter
from mlx_mmfree.hub.conversion.to_folder import MODEL_FILE
from mlx_mmfree.layers.lora import add_adapters
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts.mixers import find_token_mixer
from tests.hub.checkpoints import GOLDENS, weight_only
from tests.tolerances import TOLERANCE, relative_error

# mlx-lm lets MLX fuse its operations
pytestmark = pytest.mark.usefixtures("unfused")

TERNARY = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
WINDOW = {"name": "sliding_window_attention", "num_heads": 4, "num_kv_heads": 2, "window": 5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TOKENS = mx.random.randint(0, 60, (1, 37), key=mx.random.key(0))

MODELS: dict[str, dict[str, Any]] = {
    "mlgru": {"token_mixer": "mlgru"},
    "mlgru with options": {
        "token_mixer": [
            {"name": "mlgru", "conv_size": 3, "stacking": "recurrence", "hidden_dims": 40},
            {"name": "mlgru", "conv_size": 2, "share_conv": False, "bias": True},
            {"name": "mlgru", "stacking": "all", "output_gate": "sigmoid"},
        ],
        "num_hidden_layers": 3,
    },
    "gla": {"token_mixer": ["gla", {"name": "gla", "num_heads": 2, "key_dims": 24, "bias": True}]},
    "hgrn2": {"token_mixer": ["hgrn2", {"name": "hgrn2", "num_heads": 4, "head_dim": 6}]},
    "window": {"token_mixer": [WINDOW, "sliding_window_attention"]},
    "each": {
        "token_mixer": ["mlgru", "attention", "gla", "hgrn2", WINDOW],
        "num_hidden_layers": 5,
        "attention_bias": True,
        "rope_scaling": LLAMA3,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    "qwen3": {"base_model_type": "qwen3", "token_mixer": ["attention", "mlgru"]},
    "minicpm": {
        "base_model_type": "minicpm",
        "token_mixer": ["gla", "attention"],
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 16.0,
    },
    "bitnet": {
        "base_model_type": "bitnet",
        "rope_theta": 500000.0,
        "token_mixer": [WINDOW, "attention"],
        "hidden_act": "relu2",
    },
    "1bitLLM": {"base_architectures": ["BitnetForCausalLM"], "token_mixer": ["gla", "attention"]},
}


def written(folder: Path, linears: str, **changes: Any) -> Path:
    """A random hybrid in MLX's format."""
    hybrid = find("hybrid")
    config = {**hybrid.tiny, "hidden_size": 48, "initializer_range": 0.3, **changes}
    del config["quantization_config"]
    if linears != "dense":
        config["quantization_config"] = dict(TERNARY)
    if linears == "normed":
        config["quantization_config"] |= {"use_rms_norm": True, "rms_norm_eps": 1e-5}
    if linears == "partly":
        dense = ["lm_head", "layers.0.token_mixer.gate_proj", "layers.1.self_attn.q_proj"]
        config["quantization_config"]["modules_to_not_convert"] = dense
    mx.random.seed(1)
    model: Decoder = hybrid.build(hybrid.config.from_hub(config))
    for name, array in parameters(model).items():
        if name.endswith((".bias", "_norm.weight")):
            array[:] = array + 0.3 * mx.random.normal(array.shape)
    tokenizer = GOLDENS / "tokenizer_bpe" if config["vocab_size"] > 500 else None
    save_model(folder / "s", model, tokenizer)
    convert(open_checkpoint(folder / "s"), folder / "m")
    return folder / "m"


def by_mlx_lm(folder: Path) -> nn.Module:
    from mlx_lm.utils import load_model

    assert json.loads((folder / "config.json").read_text())["model_file"] == "mmfree_model.py"
    return load_model(folder, trust_remote_code=True)[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "linears"),
    [
        *((name, "ternary") for name in MODELS),
        *((name, "dense") for name in MODELS if name not in ("bitnet", "1bitLLM")),
        ("each", "normed"),
        ("each", "partly"),
        ("mlgru with options", "normed"),
    ],
)
def test_logits_are_ours_in_one_chunk_and_in_several(
    tmp_path: Path, name: str, linears: str
) -> None:
    folder = written(tmp_path, linears, **MODELS[name])
    ours = weight_only(folder)(TOKENS)[0]
    theirs = by_mlx_lm(folder)
    assert relative_error(theirs(TOKENS), ours) <= TOLERANCE[mx.float32]
    cache, parts, start = theirs.make_cache(), [], 0
    for end in (21, 22, 23, 30, 37):
        parts.append(theirs(TOKENS[:, start:end], cache=cache))
        start = end
    assert relative_error(mx.concatenate(parts, axis=1), ours) <= TOLERANCE[mx.float32]
    cache = theirs.make_cache()
    parts = [theirs(TOKENS[:, n : n + 1], cache=cache) for n in range(TOKENS.shape[1])]
    assert relative_error(mx.concatenate(parts, axis=1), ours) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("linears", ["dense", "ternary"])
def test_mlx_lm_generates_what_one_pass_gives(tmp_path: Path, linears: str) -> None:
    from mlx_lm import batch_generate, load
    from mlx_lm.generate import generate_step

    conv = {"name": "mlgru", "conv_size": 3}
    mixers = [conv, "attention", "gla", "hgrn2", WINDOW]
    folder = written(tmp_path, linears, **MODELS["each"] | {"token_mixer": mixers}, vocab_size=518)
    theirs, tokenizer = load(str(folder), trust_remote_code=True)
    prompt = list(range(40, 57))
    steps = generate_step(mx.array(prompt), theirs, max_tokens=6, prefill_step_size=5)
    tokens = [int(token) for token, _ in steps]
    ours = weight_only(folder)
    for _ in range(6):
        logits = ours(mx.array([prompt]))[0][0, -1]
        prompt.append(int(mx.argmax(logits).item()))
    assert tokens == prompt[17:]
    prompts = [list(range(60, 70)), list(range(80, 83)), list(range(100, 107))]
    together = batch_generate(theirs, tokenizer, prompts, max_tokens=9).texts
    alone = [batch_generate(theirs, tokenizer, [p], max_tokens=9).texts[0] for p in prompts]
    assert together == alone and len(set(alone)) == 3


@pytest.mark.sample(2)
@pytest.mark.parametrize("linears", ["dense", "ternary", "normed"])
def test_adapters_have_the_same_meaning(tmp_path: Path, linears: str) -> None:
    from mlx_lm.tuner.utils import load_adapters

    folder = written(tmp_path, linears, **MODELS["each"])
    ours, theirs = weight_only(folder), by_mlx_lm(folder)
    plain = ours(TOKENS)[0]
    add_adapters(ours, lambda name, _: name.endswith("_proj"), kind="lora", rank=4, scale=2.0)
    changed = [
        (name, value + 0.1 * mx.random.normal(value.shape))
        for name, value in tree_flatten(ours.trainable_parameters())
    ]
    ours.update(tree_unflatten(changed))
    write_adapter(tmp_path / "adapter", ours, {})
    theirs = load_adapters(theirs, str(tmp_path / "adapter"))
    theirs.eval()
    ours.eval()
    want = ours(TOKENS)[0]
    assert relative_error(theirs(TOKENS), want) <= TOLERANCE[mx.float32]
    assert relative_error(plain, want) > 100 * TOLERANCE[mx.float32]


def test_a_mixer_that_the_file_does_not_know_is_reported(tmp_path: Path) -> None:
    sink = {"name": "attention_sink", "num_heads": 4}
    config = {**find("hybrid").tiny, "token_mixer": ["mlgru", sink]}
    save_model(tmp_path / "s", find("hybrid").build(find("hybrid").config.from_hub(config)))
    report = convert(open_checkpoint(tmp_path / "s"), tmp_path / "m")
    answer = next(each for each in report.openings if each.runtime == "mlx-lm")
    assert answer.opens is False and "no such architecture" in answer.note
    assert not (tmp_path / "m" / "mmfree_model.py").exists()


def test_yarn_that_mlx_lm_rotates_otherwise_is_reported(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4,
        "attention_factor": 3.0,
    }
    hybrid = find("hybrid")
    for mixers, opens in ((["mlgru", "attention"], False), (["mlgru", "gla"], True)):
        config = {**hybrid.tiny, "token_mixer": mixers, "rope_scaling": scaling}
        model = hybrid.build(hybrid.config.from_hub(config))
        save_model(tmp_path / "s", model, overwrite=True)
        report = convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", overwrite=True)
        answer = next(each for each in report.openings if each.runtime == "mlx-lm")
        assert answer.opens is opens


def test_the_model_file_has_the_options_of_the_mixers(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("hybrid_file", MODEL_FILE)
    assert spec is not None and spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    of_the_model = ("self", "dims", "linear", "rope", "position_bias", "is_causal")
    assert set(file.MIXERS) - {"attention", "matmul_free"} == {
        "gla",
        "hgrn2",
        "mlgru",
        WINDOW["name"],
    }
    for name in set(file.MIXERS) - {"attention", "matmul_free"}:
        ours = inspect.signature(find_token_mixer(name).__init__).parameters
        theirs = inspect.signature(file.MIXERS[name]).parameters
        for option in [option for option in ours if option not in of_the_model]:
            assert theirs[option].default == ours[option].default
