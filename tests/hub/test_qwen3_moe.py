"""Qwen3 with a mixture of experts: as Qwen publishes it, as mlx-lm has it, and as GGUF."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.generation import generate
from mlx_mmfree.hub import convert, load, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.publish.runtimes import opening
from mlx_mmfree.layers.lora import add_adapters
from tests.hub.checkpoints import GOLDENS, edit_json, edit_tensors
from tests.hub.gguf_files import Stored, byte_level_metadata, stored, write_gguf
from tests.hub.test_gguf_q2_0 import q2_0
from tests.tolerances import TOLERANCE, relative_error

TOKENS = mx.array([[1, 7, 3, 39, 0, 12, 5, 22, 9]])
FLOAT32 = TOLERANCE[mx.float32]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 384,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 518,
}


def matrices_of_hub() -> dict[str, np.ndarray]:
    """Matrices that are ternary in groups of 128 inputs, by their Hub names."""
    dims, inner, rng = 128, 128, np.random.default_rng(3)
    shapes = {"model.embed_tokens": (518, dims), "lm_head": (518, dims)}
    for n in range(2):
        layer = f"model.layers.{n}"
        heads = {"q": (256, dims), "k": (128, dims), "v": (128, dims), "o": (dims, 256)}
        shapes |= {f"{layer}.self_attn.{name}_proj": shape for name, shape in heads.items()}
        for expert in range(6):
            module = f"{layer}.mlp.experts.{expert}"
            shapes |= {f"{module}.{name}_proj": (inner, dims) for name in ("gate", "up")}
            shapes[f"{module}.down_proj"] = (dims, inner)
    found = {}
    for name, (rows, columns) in shapes.items():
        trits = rng.integers(-1, 2, (rows, columns // 128, 128)).astype(np.float32)
        scales = rng.uniform(0.05, 0.2, (rows, columns // 128, 1)).astype(np.float16)
        found[name] = (trits * scales.astype(np.float32)).reshape(rows, columns)
    return found


def other_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    sizes: dict[str, tuple[int, ...]] = {"model.norm": (128,)}
    for n in range(2):
        layer = f"model.layers.{n}"
        sizes |= {f"{layer}.{name}_layernorm": (128,) for name in ("input", "post_attention")}
        sizes |= {f"{layer}.self_attn.{name}_norm": (64,) for name in "qk"}
        sizes[f"{layer}.mlp.gate"] = (6, 128)
    return {
        name: rng.normal(len(size) == 1, 0.1, size).astype(np.float32)
        for name, size in sizes.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as Qwen publishes it, a tensor for each expert."""
    target = tmp_path_factory.mktemp("qwen3_moe") / "hub"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    tensors = {**matrices_of_hub(), **other_tensors()}
    arrays = {f"{name}.weight": mx.array(values) for name, values in tensors.items()}
    mx.save_safetensors(str(target / "model.safetensors"), arrays, {"format": "pt"})
    for file in (GOLDENS / "tokenizer_bpe").glob("tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


def logits(source: Path) -> mx.array:
    return load_model(source, dtype=mx.float32)(TOKENS)[0]


@pytest.mark.usefixtures("unfused")  # mlx-lm lets MLX fuse its operations
def test_mlx_lm_computes_the_same(folder: Path, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    want = logits(folder)
    convert(open_checkpoint(str(folder)), tmp_path / "m")
    for source in (folder, tmp_path / "m"):
        theirs, _ = load_with_mlx_lm(source)
        assert relative_error(want, theirs(TOKENS)) <= 2e-5, source
        assert relative_error(logits(source), want) <= FLOAT32


@pytest.fixture(scope="module", params=[2, 4])
def quantised(request: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as mlx-lm quantises it, with routers of 8 bits."""
    from mlx_lm.utils import load_model as load_with_mlx_lm
    from mlx_lm.utils import quantize_model

    target = tmp_path_factory.mktemp("quantised")
    theirs, config = load_with_mlx_lm(folder)
    theirs, config = quantize_model(theirs, config, 64, request.param)
    own = config["quantization"]["model.layers.0.mlp.gate"]
    assert (own["bits"], own["group_size"]) == (8, 64)
    arrays = dict(tree_flatten(theirs.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), arrays)
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.usefixtures("unfused")
def test_what_mlx_lm_quantised_loads(quantised: Path) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    theirs, _ = load_with_mlx_lm(quantised)
    assert relative_error(logits(quantised), theirs(TOKENS)) <= 2e-5
    routers = [m.channel_mixer.router.weight for m in load_model(quantised).blocks]
    assert [(each.shape, each.dtype) for each in routers] == 2 * [((6, 128), mx.float32)]


@pytest.mark.usefixtures("unfused")
def test_what_mlx_lm_quantised_is_converted(quantised: Path, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    report = convert(open_checkpoint(str(quantised)), tmp_path / "m")
    assert report.logits_difference <= FLOAT32
    assert relative_error(logits(tmp_path / "m"), logits(quantised)) <= FLOAT32
    theirs, _ = load_with_mlx_lm(tmp_path / "m")
    assert relative_error(theirs(TOKENS), logits(quantised)) <= 2e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scales": mx.zeros((6, 1))}, r"gate\.scales' must be there with shape \(6, 2\)"),
        ({"biases": None}, r"gate\.biases' must be there with shape \(6, 2\).* is missing"),
        (
            {"weight": mx.zeros((6, 16), mx.uint32)},
            r"gate\.weight' must be there with shape \(6, 32\)",
        ),
    ],
    ids=["scales", "biases", "weight"],
)
def test_damaged_codes_of_a_router_are_refused(
    quantised: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    for file in quantised.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    named = {f"model.layers.1.mlp.gate.{key}": value for key, value in changes.items()}
    edit_tensors(tmp_path / "model.safetensors", **named)
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path)


def test_codes_of_experts_in_another_dtype_are_refused(quantised: Path, tmp_path: Path) -> None:
    for file in quantised.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "model.layers.1.mlp.switch_mlp.up_proj.weight"
    codes = mx.load(str(quantised / "model.safetensors"))[name]
    assert codes.ndim == 3 and codes.dtype == mx.uint32
    edit_tensors(tmp_path / "model.safetensors", **{name: codes.astype(mx.int32)})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight'.* but"):
        load_model(tmp_path)


@pytest.mark.interop
def test_transformers_computes_the_same(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = mx.array(theirs(torch.tensor(TOKENS.tolist())).logits.numpy())
    assert relative_error(logits(folder), want) <= 2e-5


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
}


def gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return f"{GGUF_NAMES[name]}.weight"
    _, _, number, inner = name.split(".", 3)
    return f"blk.{number}.{GGUF_NAMES[inner]}.weight"


def write_file(file: Path, **changes: Any) -> Path:
    """A file as CAT-Q's: type 42 with a scale for 128 inputs, experts stacked."""
    found, tensors = matrices_of_hub(), dict[str, Stored]()
    for n in range(2):
        for name in ("gate", "up", "down"):
            module = f"model.layers.{n}.mlp.experts"
            each = np.stack([found.pop(f"{module}.{expert}.{name}_proj") for expert in range(6)])
            tensors[f"blk.{n}.ffn_{name}_exps.weight"] = (42, each.shape, q2_0(each, 128)[0])
    for name, values in found.items():
        tensors[gguf_name(name)] = (42, values.shape, q2_0(values, 128)[0])
    for name, values in other_tensors().items():
        tensors[gguf_name(name)] = stored("F32", values)
    values = {
        "embedding_length": 128,
        "block_count": 2,
        "feed_forward_length": 384,
        "context_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
        "expert_count": 6,
        "expert_used_count": 2,
        "expert_feed_forward_length": 128,
        **changes,
    }
    named = {f"qwen3moe.{key}": value for key, value in values.items() if value is not None}
    metadata = {"general.architecture": "qwen3moe", "general.file_type": 41, **named}
    return write_gguf(file, metadata | byte_level_metadata("qwen2"), tensors)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes", [{}, {"expert_weights_norm": True, "expert_gating_func": 1}], ids=str
)
def test_gguf_of_cat_q(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    file = write_file(tmp_path / "model-catq-q2_0.gguf", **changes)
    # the router multiplies with what the file holds, float32
    assert relative_error(logits(file), logits(folder)) <= FLOAT32
    kinds = [type(module) for module in load_model(file).modules()]
    assert nn.QuantizedLinear in kinds or nn.QuantizedEmbedding in kinds


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_weights_norm": False}, "'qwen3moe.expert_weights_norm' must be True"),
        ({"expert_gating_func": 2}, "'qwen3moe.expert_gating_func' must be 1"),
        ({"expert_shared_count": 1}, "'qwen3moe.expert_shared_count' must be absent"),
        ({"expert_count": None}, "'qwen3moe.expert_count' must be given"),
        ({"expert_used_count": 7}, "'num_experts_per_tok' must be at most"),
    ],
    ids=str,
)
def test_other_gguf_files_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        load_model(write_file(tmp_path / "m.gguf", **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_topk_prob": False}, "'norm_topk_prob' must be true"),
        ({"norm_topk_prob": ...}, "'norm_topk_prob' must be true"),
        ({"decoder_sparse_step": 2}, "'decoder_sparse_step' must be 1"),
        ({"mlp_only_layers": [0]}, r"'mlp_only_layers' must be \[\]"),
        ({"num_experts_per_tok": 7}, "'num_experts_per_tok' must be at most 'num_experts'"),
        ({"num_local_experts": 4}, "'num_experts' and 'num_local_experts' must be equal"),
        ({"use_sliding_window": True}, "'use_sliding_window' must be False"),
        ({"num_experts": 5}, r"gate\.weight' .* must have shape \(5, 128\)"),
    ],
    ids=str,
)
def test_other_descriptions_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        load_model(tmp_path)


def test_newer_names_of_transformers(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    edit_json(
        tmp_path / "config.json",
        **{"num_experts": ..., "num_local_experts": 6, "rope_theta": ..., "rope_parameters": rope},
    )
    assert mx.array_equal(logits(tmp_path), logits(folder))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("to", "kind"), [("mlx", None), ("gguf", None), ("gguf", "Q2_0")])
def test_conversions_lose_nothing(folder: Path, tmp_path: Path, to: Any, kind: Any) -> None:
    report = convert(open_checkpoint(str(folder)), tmp_path / "m", to=to, gguf_type=kind)
    assert report.logits_difference <= FLOAT32
    [source] = [*(tmp_path / "m").glob("*.gguf")] or [tmp_path / "m"]
    assert relative_error(logits(source), logits(folder)) <= FLOAT32


def test_the_format_of_transformers_says_that_it_is_another(folder: Path, tmp_path: Path) -> None:
    report = convert(open_checkpoint(str(folder)), tmp_path / "m", to="hf")
    found = opening(report.openings, "transformers")
    assert found is not None and not found.opens and "each expert" in found.note
    assert relative_error(logits(tmp_path / "m"), logits(folder)) <= FLOAT32


def test_it_writes_and_learns(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder)
    assert generate(model, tokenizer, "Hi", max_tokens=4)
    save_model(tmp_path / "saved", model, tokenizer)
    assert mx.array_equal(load_model(tmp_path / "saved")(TOKENS)[0], model(TOKENS)[0])
    model.freeze()
    names = add_adapters(model, lambda path, module: "token_mixer" in path, kind="lora", rank=2)
    assert len(names) == 8

    def loss(model: Any) -> mx.array:
        found = model(TOKENS)[0][:, :-1]
        return nn.losses.cross_entropy(found, TOKENS[:, 1:], reduction="mean")

    before, gradients = nn.value_and_grad(model, loss)(model)
    model.update(
        nn.utils.tree_map(lambda w, g: w - 0.02 * g, model.trainable_parameters(), gradients)
    )
    assert loss(model).item() < before.item()
