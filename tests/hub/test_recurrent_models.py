"""Recurrent models from their folders: loaded, written, converted, generating."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.generation import generate
from mlx_mmfree.hub import load, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter
from mlx_mmfree.models import find
from tests.formula import numbers
from tests.generation.models import DELTA_RULES
from tests.hub.checkpoints import GOLDENS, TOKENS, logits, tiny_of
from tests.tolerances import TOLERANCE, relative_error

KINDS = ("hgrn", "hgrn2", "gla", "retnet", *DELTA_RULES)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16, as published, with a tokenizer."""
    kind = request.param
    architecture = find(kind)
    # with which no key is so short that its direction is lost in bfloat16
    mx.random.seed(2)
    sizes = {"vocab_size": 518, "initializer_range": 0.3}
    model = architecture.build(architecture.config.from_hub({**architecture.tiny, **sizes}))
    model.set_dtype(mx.bfloat16)
    folder = tmp_path_factory.mktemp(kind) / "model"
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return folder


@pytest.mark.sample(2)
def test_it_is_loaded_as_stored(folder: Path) -> None:
    logits, _ = load_model(folder)(TOKENS)
    assert logits.dtype == mx.bfloat16 and mx.isfinite(logits).all().item()
    exact, _ = load_model(folder, dtype=mx.float32)(TOKENS)
    assert relative_error(logits, exact) <= TOLERANCE[mx.bfloat16]


@pytest.mark.sample(2)
def test_it_generates_the_likeliest_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load(folder)
    ids = tokenizer.encode("The dog")
    for _ in range(6):
        ids.append(mx.argmax(model(mx.array([ids]))[0][0, -1]).item())
    want = tokenizer.decode(ids[-6:])
    assert generate(model, tokenizer, "The dog", max_tokens=6) == want
    flags = ["-p", "The dog", "-m", "6", "--temp", "0", "--ignore-chat-template"]
    assert main(["generate", "--model", str(folder), *flags]) == 0
    assert want.strip() in capsys.readouterr().out


@pytest.mark.sample(2)
def test_it_is_converted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mlx"
    assert main(["convert", "--model", str(folder), "--mlx-path", str(target)]) == 0
    assert "no: it has no such architecture" in capsys.readouterr().out
    assert mx.array_equal(load_model(target)(TOKENS)[0], load_model(folder)(TOKENS)[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", DELTA_RULES)
def test_an_adapter_is_trained_and_fused(kind: str, tmp_path: Path) -> None:
    folder, data = tmp_path / "model", tmp_path / "data"
    save_model(folder, tiny_of(kind, vocab_size=518), GOLDENS / "tokenizer_bpe")
    data.mkdir()
    lines = [{"prompt": f"Number {n}?", "completion": "The cat."} for n in range(4)]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    adapter = ["--model", str(folder), "--adapter-path", str(tmp_path / "adapter")]
    flags = ["--train", "--iters", "3", "--batch-size", "2", "--learning-rate", "1e-2"]
    assert main(["lora", *adapter, "--data", str(data), *flags]) == 0
    fuse = ["fuse", *adapter, "--format", "dense", "--save-path", str(tmp_path / "fused")]
    assert main(fuse) == 0
    model = load_model(folder)
    before = logits(model)
    learned = logits(attach(model, read_adapter(tmp_path / "adapter")))
    assert relative_error(learned, before) > 0.1
    assert relative_error(logits(load_model(tmp_path / "fused")), learned) <= TOLERANCE[mx.float32]


def test_unfused_names_are_written_as_fused(tmp_path: Path) -> None:
    """A norm beside its gate has another name in the library than one fused with it."""
    source = GOLDENS / "fla_gla_unfused"
    model = load_model(source)
    save_model(tmp_path / "m", model)
    written = open_checkpoint(tmp_path / "m")
    assert "model.layers.0.attn.g_norm.weight" in open_checkpoint(source).tensors
    assert "model.layers.0.attn.g_norm_swish_gate.weight" in written.tensors
    assert written.config.get("fuse_norm", True)
    assert mx.array_equal(load_model(tmp_path / "m")(TOKENS)[0], model(TOKENS)[0])


def test_a_wider_recurrence_has_as_many_lower_bounds(tmp_path: Path) -> None:
    """The layout of flash-linear-attention 0.6; its recurrence in float64 gave the logits."""
    dims, wide, hidden, vocab = 30, 60, 64, 47
    config = {"model_type": "hgrn", "hidden_size": dims, "expand_ratio": 2, "vocab_size": vocab}
    config |= {"intermediate_size": hidden, "num_hidden_layers": 2, "norm_eps": 1e-6}
    tensors = {
        "model.embeddings.weight": numbers((vocab, dims), "e", 1.0),
        "lm_head.weight": numbers((vocab, dims), "h", 0.3),
        "model.norm.weight": 1 + numbers((dims,), "n", 0.3),
        "model.lower_bounds": numbers((2, wide), "lb", 1.0),
    }
    shapes = {f"attn.{name}_proj": (wide, dims) for name in "ifg"}
    shapes |= {"attn.o_proj": (dims, wide), "attn_norm": (dims,), "mlp_norm": (dims,)}
    shapes |= {"attn.g_norm": (wide,), "mlp.down_proj": (dims, hidden)}
    shapes |= {f"mlp.{name}_proj": (hidden, dims) for name in ("gate", "up")}
    for n in range(2):
        for key, shape in shapes.items():
            name = f"model.layers.{n}.{key}"
            tensors[f"{name}.weight"] = (len(shape) == 1) + numbers(shape, name, 0.3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), {n: mx.array(each) for n, each in tensors.items()}
    )
    want = [0.10945, 0.11825, 0.31413, 0.14316, -1.22165, 1.55417, 1.43311, 0.60295]
    logits, _ = load_model(tmp_path)(mx.array([[1, 5, 9, 33, 20, 41, 7]]))
    assert logits[0, -1, :8].tolist() == pytest.approx(want, abs=1e-4)


# mlx-lm lets MLX fuse its operations
@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("rwkv7", {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 3}),
        ("mamba2", {"n_groups": 1, "time_step_limit": [0.0, float("inf")]}),
    ],
)
def test_mlx_lm_computes_the_same(
    kind: str, sizes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    architecture = find(kind)
    mx.random.seed(2)
    config = {**architecture.tiny, **sizes, "vocab_size": 518, "initializer_range": 0.3}
    model = architecture.build(architecture.config.from_hub(config))
    save_model(tmp_path / "hf", model, GOLDENS / "tokenizer_bpe")
    target = tmp_path / "mlx"
    assert main(["convert", "--model", str(tmp_path / "hf"), "--mlx-path", str(target)]) == 0
    assert "mlx-lm        yes" in capsys.readouterr().out
    want, _ = load_model(target)(TOKENS)
    assert relative_error(load_with_mlx_lm(target)[0](TOKENS), want) <= TOLERANCE[mx.float32]


def test_infinity_is_read_under_its_key_alone(tmp_path: Path) -> None:
    architecture = find("mamba2")
    save_model(tmp_path / "m", architecture.build(architecture.config.from_hub(architecture.tiny)))
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    # as transformers writes it, since JSON has no infinity
    assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert load_model(tmp_path / "m").config.time_step_limit == (0.0, float("inf"))
    config["time_step_limit"] = [0.0, float("inf")]
    file.write_text(json.dumps(config))
    assert load_model(tmp_path / "m").config.time_step_limit == (0.0, float("inf"))
    for wrong in (
        config | {"layer_norm_epsilon": float("inf")},
        config | {"unknown": [float("inf")]},
        config | {"nested": {"time_step_limit": float("inf")}},
        config | {"time_step_limit": [0.0, float("nan")]},
        config | {"time_step_limit": [0.0, -float("inf")]},
        config | {"time_step_limit": [[0.0, float("inf")]]},
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match="must have finite numbers but got"):
            load_model(tmp_path / "m")
    file.write_text(json.dumps(config | {"layer_norm_epsilon": {"__float__": "NaN"}}))
    with pytest.raises(CheckpointError, match="'layer_norm_epsilon' must be a number from"):
        load_model(tmp_path / "m")
    file.write_text(json.dumps(config).replace("Infinity", "1e999"))
    with pytest.raises(CheckpointError, match="must have finite numbers but got 1e999"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("bound", [None, "absent"])
def test_a_safe_gate_needs_its_bound(bound: Any) -> None:
    architecture = find("kda")
    config = {**architecture.tiny, "safe_gate": True, **({} if bound else {"lower_bound": None})}
    with pytest.raises(CheckpointError, match="'lower_bound' must be given where 'safe_gate'"):
        architecture.config.from_hub(config)
    assert architecture.config.from_hub(config | {"lower_bound": -5.0}).lower_bound == -5.0
    assert architecture.config.from_hub(config | {"safe_gate": False}).lower_bound is None
