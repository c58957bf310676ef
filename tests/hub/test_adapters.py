"""Adapter folders: written, read back, switched, and exchanged with mlx-lm and PEFT."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mmfree.cli import main as command
from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import convert, load, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import (
    holds_adapter,
    load_adapter_weights,
    read_adapter,
    why_not_in_mlx_lm,
    write_adapter,
    write_peft_adapter,
)
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.lora import AdapterKind, add_adapters
from mlx_mmfree.models import Decoder, find
from tests.hub.checkpoints import GOLDENS, weight_only
from tests.hub.test_to_mlx import mlx_lm_model
from tests.tolerances import TOLERANCE, relative_error

# mlx-lm lets MLX fuse its operations
pytestmark = pytest.mark.usefixtures("unfused")

TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
FLOAT32 = TOLERANCE[mx.float32]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
HGRN = {
    "model_type": "hgrn_bit",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}


def build(config: dict) -> Decoder:
    mx.random.seed(0)
    architecture = find(config["model_type"])
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    return model


def adapted(
    config: dict, kind: AdapterKind, names: tuple[str, ...] = ("_proj",), packed: bool = False
) -> Decoder:
    model = build(config)
    if packed:
        pack_linears(model)
    return change(model, kind, names)


def change(model: Decoder, kind: AdapterKind, names: tuple[str, ...]) -> Decoder:
    """Puts an adapter on a model that is not a fresh one."""
    add_adapters(model, lambda name, _: name.endswith(names), kind=kind, rank=4, scale=2.0)
    changed = [
        (name, value + 0.1 * mx.random.normal(value.shape))
        for name, value in tree_flatten(model.trainable_parameters())
    ]
    model.update(tree_unflatten(changed))
    return model


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("names", [("_proj",), ("query_proj", "embed", "head")])
@pytest.mark.parametrize("config", [LLAMA, HGRN], ids=["llama", "hgrn"])
def test_written_and_read_back(
    tmp_path: Path, config: dict, names: tuple[str, ...], kind: AdapterKind
) -> None:
    model = adapted(config, kind, names, packed=config is HGRN)
    want, _ = model(TOKENS)
    write_adapter(tmp_path, model, {"model": "base"})
    fresh = build(config)
    if config is HGRN:
        pack_linears(fresh)
    plain, _ = fresh(TOKENS)
    attach(fresh, read_adapter(tmp_path))
    assert relative_error(fresh(TOKENS)[0], want) <= FLOAT32
    assert relative_error(plain, want) > 100 * FLOAT32
    attach(fresh, None)
    assert mx.array_equal(fresh(TOKENS)[0], plain)


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (("blocks.1.token_mixer.query_proj", "blocks.1.token_mixer.key_proj"), 1),
        (("blocks.0.token_mixer.query_proj",), 2),
        (("embed",), 0),
    ],
    ids=["last", "first", "none"],
)
def test_layers_are_counted_from_the_end(
    tmp_path: Path, names: tuple[str, ...], count: int
) -> None:
    write_adapter(tmp_path, adapted(LLAMA, "lora", names), {})
    assert json.loads((tmp_path / "adapter_config.json").read_text())["num_layers"] == count


@pytest.mark.parametrize("config", [LLAMA, HGRN], ids=["llama", "hgrn"])
def test_adapters_are_switched(tmp_path: Path, config: dict) -> None:
    first = adapted(config, "lora", packed=config is HGRN)
    second = adapted(config, "dora", ("down_proj",), packed=config is HGRN)
    write_adapter(tmp_path / "first", first, {})
    write_adapter(tmp_path / "second", second, {})
    one, two = read_adapter(tmp_path / "first"), read_adapter(tmp_path / "second")
    model = build(config)
    if config is HGRN:
        pack_linears(model)
    plain, base = model(TOKENS)[0], dict(tree_flatten(model.parameters()))
    for adapter, source in ((one, first), (two, second), (one, first)):
        attach(model, adapter)
        assert relative_error(model(TOKENS)[0], source(TOKENS)[0]) <= FLOAT32
        assert relative_error(model(TOKENS)[0], plain) > 100 * FLOAT32
    shared = {name.replace("base.", ""): array for name, array in tree_flatten(model.parameters())}
    assert all(shared[name] is array for name, array in base.items())
    attach(model, None)
    assert mx.array_equal(model(TOKENS)[0], plain)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_mlx_lm_reads_ours(tmp_path: Path, kind: AdapterKind) -> None:
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model as load_with_mlx_lm

    save_model(tmp_path / "base", build(LLAMA))
    model = adapted(LLAMA, kind, ("query_proj", "down_proj"))
    write_adapter(tmp_path / "adapter", model, {})
    theirs, _ = load_with_mlx_lm(tmp_path / "base")
    theirs = load_adapters(theirs, str(tmp_path / "adapter"))
    theirs.eval()
    assert relative_error(model(TOKENS)[0], theirs(TOKENS)) <= FLOAT32


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_ours_reads_mlx_lm(tmp_path: Path, kind: AdapterKind) -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model as load_with_mlx_lm

    save_model(tmp_path / "base", build(LLAMA))
    theirs, _ = load_with_mlx_lm(tmp_path / "base")
    theirs.freeze()
    parameters = {"rank": 4, "scale": 3.0, "dropout": 0.0}
    linear_to_lora_layers(theirs, 1, parameters, use_dora=kind == "dora")
    changed = [
        (name, value + 0.1 * mx.random.normal(value.shape))
        for name, value in tree_flatten(theirs.trainable_parameters())
    ]
    theirs.update(tree_unflatten(changed))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), dict(changed))
    config = {"fine_tune_type": kind, "num_layers": 1, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model = attach(load_model(tmp_path / "base"), read_adapter(tmp_path))
    assert relative_error(model(TOKENS)[0], theirs(TOKENS)) <= FLOAT32


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(
    "name", ["hgrn_default", "hgrn_expand2", "bitnet_packed", "llama_autobit_rmsnorm"]
)
def test_model_files_give_adapters_the_same_meaning(
    tmp_path: Path, name: str, kind: AdapterKind
) -> None:
    from mlx_lm.tuner.utils import load_adapters

    convert(open_checkpoint(GOLDENS / name), tmp_path / "base")
    # activations stay floats in the model files
    ours, theirs = weight_only(tmp_path / "base"), mlx_lm_model(tmp_path / "base")
    # 16-bit models round at different steps
    for model in (ours, theirs):
        model.set_dtype(mx.float32)
    plain = ours(TOKENS)[0]
    # rows of the down projections of bitnet_packed are padded
    names = ("query_proj", "up_proj") if (name, kind) == ("bitnet_packed", "dora") else ("_proj",)
    change(ours, kind, names)
    write_adapter(tmp_path / "adapter", ours, {})
    reason = why_not_in_mlx_lm(ours)
    assert (reason is not None) == (name != "bitnet_packed" and kind == "dora")
    if reason:
        with pytest.raises(ValueError, match="TernaryLinear to LoRA"):
            load_adapters(theirs, str(tmp_path / "adapter"))
        return
    theirs = load_adapters(theirs, str(tmp_path / "adapter"))
    theirs.eval()
    ours.eval()
    want = ours(TOKENS)[0]
    tolerance = TOLERANCE[want.dtype]
    assert relative_error(theirs(TOKENS), want) <= tolerance
    assert relative_error(plain, want) > 5 * tolerance


# peft asks transformers for a property that transformers is about to rename
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.interop
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_exchange(tmp_path: Path, kind: AdapterKind, is_tied: bool) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    llama = LLAMA | {"tie_word_embeddings": is_tied}
    save_model(tmp_path / "base", build(llama))
    model = adapted(
        llama, kind, ("query_proj", "up_proj", "embed") if kind == "lora" else ("_proj",)
    )
    write_peft_adapter(tmp_path / "ours", model, base=str(tmp_path / "base"))
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    ids = torch.tensor(TOKENS.tolist())
    with torch.no_grad():
        logits = mx.array(theirs(ids).logits.numpy())
    assert relative_error(model(TOKENS)[0], logits) <= FLOAT32
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # the head's share their memory with the parameters of an embedding that is the head too
            if "lora_" in name and not (is_tied and "lm_head" in name):
                parameter.mul_(1.5)
        logits = mx.array(theirs(ids).logits.numpy())
    theirs.save_pretrained(tmp_path / "theirs")
    again = attach(build(llama), read_adapter(tmp_path / "theirs"))
    assert relative_error(again(TOKENS)[0], logits) <= FLOAT32


PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("peft_type", "IA3"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"(a+)+b": 2}),
        ("alpha_pattern", {"layers.[0-9]": 2}),
        ("alpha_pattern", {"q_proj": "two"}),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 2}),
        ("fan_in_fan_out", True),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("lora_bias", True),
        ("r", "four"),
        ("r", 0),
    ],
)
def test_peft_options_that_change_the_mathematics_are_refused(
    tmp_path: Path, option: str, value: object
) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": mx.ones((4, 32)), f"{name}.lora_B.weight": mx.ones((32, 4))}
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT | {option: value}))
    rule = "must have the rank 2" if value == {"q_proj": 2} else option
    with pytest.raises(CheckpointError, match=rule):
        read_adapter(tmp_path)


PATTERNS = {
    "rank_pattern": {"up_proj": 2, "^model.layers.1.self_attn.q_proj": 6},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 3, "up_proj": 10},
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.interop
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_patterns(tmp_path: Path, rslora: bool) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    save_model(tmp_path / "base", build(LLAMA))
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    options = {"r": 4, "lora_alpha": 8, "use_rslora": rslora, "init_lora_weights": False}
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], **options, **PATTERNS)
    theirs = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        logits = mx.array(theirs(torch.tensor(TOKENS.tolist())).logits.numpy())
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": True}))
    model = attach(load_model(tmp_path / "base"), read_adapter(tmp_path / "theirs"))
    assert relative_error(model(TOKENS)[0], logits) <= FLOAT32
    write_peft_adapter(tmp_path / "ours", model)
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    with torch.no_grad():
        found = mx.array(again.eval()(torch.tensor(TOKENS.tolist())).logits.numpy())
    assert relative_error(found, logits) <= FLOAT32


def test_patterns_give_layers_ranks_and_scales(tmp_path: Path) -> None:
    layers = [
        f"model.layers.{n}.{path}" for n in (0, 1) for path in ("self_attn.q_proj", "mlp.up_proj")
    ]
    ranks, scales = (4, 2, 6, 2), (3 / 4, 10 / 2, 8 / 6, 10 / 2)
    rng = np.random.default_rng(0)
    products, tensors = {}, {}
    for layer, rank, scale in zip(layers, ranks, scales, strict=True):
        a, b = rng.normal(size=(rank, 32)), rng.normal(size=(48, rank))
        products[layer] = scale * (b @ a).T
        for part, array in (("lora_A", a), ("lora_B", b)):
            tensors[f"base_model.model.{layer}.{part}.weight"] = mx.array(array.astype(np.float32))
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT | PATTERNS))
    adapter = read_adapter(tmp_path)
    for layer, want in products.items():
        parts = adapter.tensors[layer]
        got = adapter.scale * np.array(parts["lora_a"]) @ np.array(parts["lora_b"])
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_peft_scales(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": mx.ones((4, 32)), f"{name}.lora_B.weight": mx.ones((32, 4))}
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    for options, scale in (({}, 2.0), ({"use_rslora": True}, 4.0)):
        (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT | options))
        assert read_adapter(tmp_path).scale == scale


def test_norms_inside_cannot_go_to_peft(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="norm inside"):
        write_peft_adapter(tmp_path, adapted(HGRN, "lora"))


def test_dora_of_an_embedding_cannot_go_to_peft(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'embed' must not be an embedding with DoRA"):
        write_peft_adapter(tmp_path, adapted(LLAMA, "dora", ("embed",)))
    assert not list(tmp_path.iterdir())


def test_what_mlx_lm_does_not_read_is_reported() -> None:
    model = adapted(LLAMA, "dora", ("_proj", "embed"))
    assert why_not_in_mlx_lm(model) is None
    model = build(LLAMA)
    model.embed = model.embed.to_quantized(32, 4)
    reason = why_not_in_mlx_lm(change(model, "dora", ("embed",)))
    assert reason is not None and "'embed' is a quantised embedding" in reason
    model = pack_linears(build(LLAMA | {"model_type": "bitnet", "rope_theta": 500000.0}))
    reason = why_not_in_mlx_lm(change(model, "dora", ("down_proj",)))
    assert reason is not None and "are no multiple of 32" in reason


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    model = adapted(LLAMA, "lora")
    layer = model.blocks[0].token_mixer.query_proj
    layer.lora_b = mx.where(mx.arange(4)[:, None] == 2, value, layer.lora_b)
    write_adapter(tmp_path, model, {})
    assert holds_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="must be finite but holds NaN or infinity"):
        read_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="must be finite but holds NaN or infinity"):
        load_adapter_weights(adapted(LLAMA, "lora"), tmp_path / "adapters.safetensors")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "has no tensors"),
        (
            {"model.layers.0.self_attn.q_proj.weight": mx.ones((2, 2))},
            "must be lora_a, lora_b or m",
        ),
        ({"model.layers.0.self_attn.q_proj.lora_a": mx.ones((32, 4))}, "must have float tensors"),
        (
            {
                "model.layers.0.self_attn.q_proj.lora_a": mx.ones((32, 4)),
                "model.layers.0.self_attn.q_proj.lora_b": mx.ones((3, 32)),
            },
            "of one rank",
        ),
        (
            {
                "model.layers.0.self_attn.q_proj.lora_a": mx.ones((31, 4)),
                "model.layers.0.self_attn.q_proj.lora_b": mx.ones((4, 32)),
            },
            r"must have 'lora_a' of shape \(32, 4\)",
        ),
        (
            {
                "model.layers.7.self_attn.q_proj.lora_a": mx.ones((32, 4)),
                "model.layers.7.self_attn.q_proj.lora_b": mx.ones((4, 32)),
            },
            "which the model lacks",
        ),
    ],
)
def test_damaged_adapters_are_refused(
    tmp_path: Path, tensors: dict[str, mx.array], message: str
) -> None:
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"scale": 1.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        attach(build(LLAMA), read_adapter(tmp_path))


@pytest.mark.parametrize("dropout", ["1", "1.5", "-0.1", "NaN", "1e400"])
@pytest.mark.parametrize("is_peft", [True, False])
def test_impossible_dropouts_are_refused(tmp_path: Path, dropout: str, is_peft: bool) -> None:
    name = "adapter_model" if is_peft else "adapters"
    mx.save_safetensors(str(tmp_path / f"{name}.safetensors"), {"a": mx.ones(1)})
    ours = f'{{"lora_parameters": {{"scale": 1, "dropout": {dropout}}}}}'
    theirs = f'{{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "lora_dropout": {dropout}}}'
    (tmp_path / "adapter_config.json").write_text(theirs if is_peft else ours)
    with pytest.raises(CheckpointError, match=r"dropout' must be at least 0|finite numbers"):
        read_adapter(tmp_path)


def test_a_model_without_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must have an adapter"):
        write_adapter(tmp_path, build(LLAMA), {})


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must be a folder with an adapter_config\.json, or"):
        read_adapter(tmp_path / "missing")


def test_dropout_is_kept_and_off_in_evaluation(tmp_path: Path) -> None:
    model = build(LLAMA)
    add_adapters(model, lambda name, _: name.endswith("query_proj"), dropout=0.5)
    write_adapter(tmp_path, model, {})
    adapter = read_adapter(tmp_path)
    assert adapter.dropout == 0.5
    other = attach(build(LLAMA), adapter)
    other.eval()
    assert mx.array_equal(other(TOKENS)[0], other(TOKENS)[0])
    assert isinstance(other.blocks[0].token_mixer.query_proj.dropout, nn.Dropout)


def test_the_folder_of_an_adapter_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    words = "must be a model, to which {} adds an adapter, but '{}' is the folder of an adapter"
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert words.format("'adapter_path'", tmp_path) in str(error.value)
    assert command(["generate", "--model", str(tmp_path)]) == 2
    assert f"error: --model {words.format('--adapter-path', tmp_path)}" in capsys.readouterr().err
