"""Commands with a model whose layers have several mixers, as distillation makes it."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.generation.states import with_key_values
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter
from mlx_mmfree.hub.conversion.fuse import fuse
from mlx_mmfree.layers import PackedBitLinear, pack_linears
from mlx_mmfree.layers.lora import adapted_layers
from mlx_mmfree.models import Decoder, find
from tests.hub.checkpoints import GOLDENS
from tests.tolerances import TOLERANCE, relative_error

WINDOW = {"name": "sliding_window_attention", "num_heads": 4, "window": 6}
MIXERS = ["mlgru", "attention", "gla", WINDOW]
TEXT = "The dog sees the cat. A number is a number. "
PROMPT = mx.array([list(range(40, 60))])


@pytest.fixture(params=["dense", "ternary"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    hybrid = find("hybrid")
    changes = {"token_mixer": MIXERS, "num_hidden_layers": 4, "initializer_range": 0.1}
    config = {**hybrid.tiny, **changes, "vocab_size": 520}
    if request.param == "dense":
        del config["quantization_config"]
    mx.random.seed(0)
    model: Decoder = hybrid.build(hybrid.config.from_hub(config))
    pack_linears(model)
    save_model(tmp_path / "model", model, GOLDENS / "tokenizer_bpe")
    return tmp_path


@pytest.fixture(autouse=True)
def without_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_mmfree.training.trainer.plot_run", lambda *_: True)


def data_in(folder: Path) -> Path:
    data = folder / "data"
    data.mkdir()
    for name, count in (("train", 4), ("valid", 2)):
        lines = [json.dumps({"text": TEXT * 3})] * count
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    return data


@pytest.mark.exhaustive
def test_an_adapter_is_trained_used_and_merged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = ["--model", str(folder / "model")], ["--adapter-path", str(folder / "adapter")]
    flags = ["--data", str(data_in(folder)), "--iters", "3", "--batch-size", "2"]
    flags += ["--learning-rate", "1e-2"]
    assert main(["lora", "--train", *base, *adapter, *flags]) == 0
    model = attach(load_model(folder / "model"), read_adapter(folder / "adapter"))
    names = set(adapted_layers(model))
    for number, projection in enumerate(("forget", "query", "forget_down", "query")):
        assert f"blocks.{number}.token_mixer.{projection}_proj" in names
    want = model(PROMPT)[0]
    assert relative_error(want, load_model(folder / "model")(PROMPT)[0]) > 0.01
    capsys.readouterr()
    assert main(["generate", *base, *adapter, "-p", "The dog", "-m", "5", "--temp", "0"]) == 0
    adapted = capsys.readouterr().out
    assert main(["generate", *base, "-p", "The dog", "-m", "5", "--temp", "0"]) == 0
    assert adapted.split("Prompt:")[0] != capsys.readouterr().out.split("Prompt:")[0]
    format = ["--format", "dense", "--dtype", "float32", "--save-path", str(folder / "fused")]
    assert main(["fuse", *base, *adapter, *format]) == 0
    fuse(model, "dense")
    again = load_model(folder / "fused")
    modules = [module for module in again.modules() if isinstance(module, PackedBitLinear)]
    assert not modules
    assert relative_error(again(PROMPT)[0], model(PROMPT)[0]) <= TOLERANCE[mx.float32]


def test_some_dense_linears_among_ternary_ones_are_described() -> None:
    config = find("hybrid").config.from_hub({**find("hybrid").tiny})
    names = ("model.layers.0.token_mixer.gate_proj", "model.layers.1.token_mixer.key_proj")
    part = config.with_dense([*names, "model.layers.1.mlp.up_proj"])
    model = find("hybrid").build(find("hybrid").config.from_hub(part.to_hub()))
    pack_linears(model)
    first, second = model.blocks
    dense = (first.token_mixer.gate_proj, second.token_mixer.key_proj, second.channel_mixer.up_proj)
    assert not any(isinstance(module, PackedBitLinear) for module in dense)
    ternary = (first.token_mixer.input_proj, second.token_mixer.query_proj)
    ternary += (first.channel_mixer.up_proj, second.channel_mixer.gate_proj)
    assert all(isinstance(module, PackedBitLinear) for module in ternary)


def test_its_parts_and_its_perplexity_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(folder / "model")]
    assert main(["show", "model", *flags]) == 0
    shown = capsys.readouterr().out
    for kind in ("MLGRU", "GQA", "GLA", "SlidingWindowAttention"):
        assert kind in shown
    is_ternary = "PackedBitLinear" in shown
    assert main(["show", "weights", *flags]) == (0 if is_ternary else 2)
    if is_ternary:
        assert "blocks.2.token_mixer.forget_down_proj" in capsys.readouterr().out
    else:
        assert "must have ternary matrices" in capsys.readouterr().err
    (folder / "text.txt").write_text(TEXT * 8)
    text = ["--data", str(folder / "text.txt"), "--sequence-length", "32", "--json"]
    metrics = []
    for carried in (["--carry-state"], ["--no-carry-state"]):
        assert main(["perplexity", *flags, *text, *carried]) == 0
        metrics.append(json.loads(capsys.readouterr().out)["perplexity"])
    assert metrics[0] != metrics[1] and min(metrics) > 1


def test_a_limit_of_tokens_holds_where_there_is_attention(folder: Path) -> None:
    model = load_model(folder / "model")
    want, state = model(PROMPT)
    small = with_key_values(model, max_kv_size=8)
    _, limited = small(PROMPT)
    # the whole text and a window of 6, or at most 8 tokens
    for states, sizes in ((state, (20, 6)), (limited, (8, 6))):
        assert tuple(states[n].used for n in (1, 3)) == sizes
    assert relative_error(small(PROMPT[:, :8])[0], want[:, :8]) <= TOLERANCE[mx.float32]
    flags = ["--model", str(folder / "model"), "-p", "The dog", "-m", "9", "--max-kv-size", "8"]
    assert main(["generate", *flags]) == 0


def test_gguf_has_no_such_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(folder / "model"), "--to", "gguf", "--mlx-path", str(folder / "gguf")]
    assert main(["convert", *flags]) == 2
    shown = capsys.readouterr().err
    assert "--to must be mlx or hf for 'model_type' 'hybrid'" in shown and "but got 'gguf'" in shown
    assert not (folder / "gguf").exists()
