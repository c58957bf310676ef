"""`mmfree fuse` on small models."""

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.hub import load, load_model
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter, write_adapter, write_peft_adapter
from mlx_mmfree.layers import PackedBitLinear
from mlx_mmfree.layers.lora import LoRALinear, add_adapters
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import TOKEN, HubServer, Repository
from tests.tolerances import TOLERANCE, relative_error

Captured = pytest.CaptureFixture[str]
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
TEXT = "Once upon a time, there was a little girl. She lived in a small house. " * 3


def adapter(folder: Path, target: Path, seed: int = 1) -> Path:
    model = load_model(folder)
    mx.random.seed(seed)
    add_adapters(model, lambda name, _: name.endswith("down_proj"), rank=2, scale=2.0)
    changed = [
        (name, value + 0.1 * mx.random.normal(value.shape))
        for name, value in tree_flatten(model.trainable_parameters())
    ]
    model.update(tree_unflatten(changed))
    write_adapter(target, model, {"model": "/home/someone/base", "iters": 3})
    return target


@pytest.fixture
def adapter_path(attention_folder: Path, tmp_path: Path) -> Path:
    return adapter(attention_folder, tmp_path / "adapter")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def fuse(model: Path, adapter_path: Path, target: Path, *flags: object) -> int:
    named = ("--model", model, "--adapter-path", adapter_path, "--save-path", target)
    return main(["fuse", *map(str, (*named, *flags))])


def adapted_logits(folder: Path, adapter_path: Path) -> mx.array:
    return attach(load_model(folder), read_adapter(adapter_path)).eval()(TOKENS)[0]


@pytest.mark.parametrize("is_peft", [False, True], ids=["mlx-lm", "peft"])
def test_the_adapter_is_kept_beside_the_base(
    is_peft: bool, attention_folder: Path, adapter_path: Path, tmp_path: Path, capsys: Captured
) -> None:
    if is_peft:
        model = attach(load_model(attention_folder), read_adapter(adapter_path))
        shutil.rmtree(adapter_path)
        write_peft_adapter(adapter_path, model)
    target = tmp_path / "fused"
    assert fuse(attention_folder, adapter_path, target) == 0
    assert f"--model {target} --adapter-path {target}" in capsys.readouterr().out
    want = adapted_logits(attention_folder, adapter_path)
    assert mx.array_equal(adapted_logits(target, target), want)
    base, tokenizer = load(target)
    assert mx.array_equal(base(TOKENS)[0], load_model(attention_folder)(TOKENS)[0])
    assert tokenizer.encode("A dog")
    described = json.loads((target / "adapter_config.json").read_text())
    assert described.keys() == {"fine_tune_type", "lora_parameters", "num_layers"}
    card = (target / "README.md").read_text()
    assert "--adapter-path" in card and str(tmp_path) not in card
    assert main(["upload", "--path", str(target), "--repo", "me/tiny", "--dry-run"]) == 0
    assert "adapters.safetensors" in capsys.readouterr().out
    converted = ("--mlx-path", str(tmp_path / "converted"), "--no-verify")
    assert main(["convert", "--model", str(target), *converted]) == 0
    assert "also holds an adapter, which was not converted" in capsys.readouterr().err


def test_ternary_again_prints_what_it_costs(
    attention_folder: Path, adapter_path: Path, text_file: Path, tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "fused"
    flags = ("--form", "ternary", "--data", text_file)
    assert fuse(attention_folder, adapter_path, target, *flags) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    losses = dict(re.findall(r"^(.+): (\d+\.\d{4}) nats", "\n".join(lines), re.M))
    for name, flags in {
        "base": ("--model", attention_folder),
        "base + adapter": ("--model", attention_folder, "--adapter-path", adapter_path),
        "ternary": ("--model", target),
    }.items():
        assert main(["perplexity", "--json", "--data", str(text_file), *map(str, flags)]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert float(losses[name]) == pytest.approx(mx.log(figures["perplexity"]).item(), abs=2e-4)
    change = float(losses["ternary"]) - float(losses["base + adapter"])
    assert change != 0
    assert float(last.split("by ")[1].split()[0]) == pytest.approx(change, abs=2e-4)
    assert f"| ternary | {losses['ternary']} |" in (target / "README.md").read_text()
    fused = load_model(target)
    assert type(fused.blocks[0].channel_mixer.down_proj) is PackedBitLinear


def test_loss_on_the_samples_of_a_folder(
    attention_folder: Path, adapter_path: Path, tmp_path: Path, capsys: Captured
) -> None:
    line = {"prompt": "Who was it?", "completion": "A little girl."}
    data = tmp_path / "data"
    data.mkdir()
    flags = ("--form", "ternary", "--data", data)
    assert fuse(attention_folder, adapter_path, tmp_path / "fused", *flags) == 2
    assert "must hold a test.jsonl or a valid.jsonl" in capsys.readouterr().err
    (data / "valid.jsonl").write_text(json.dumps(line))
    shown = []
    for mask in ((), ("--mask-prompt",)):
        target = tmp_path / f"fused{len(mask)}"
        assert fuse(attention_folder, adapter_path, target, *flags, *mask) == 0
        shown.append(re.findall(r": (\d+\.\d{4}) nats a token, p", capsys.readouterr().out))
    model, tokenizer = load(attention_folder)
    sample = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": line["prompt"]},
            {"role": "assistant", "content": line["completion"]},
        ],
        add_generation_prompt=False,
    )
    logits = model(mx.array([sample[:-1]]))[0]
    want = nn.losses.cross_entropy(logits, mx.array([sample[1:]]), reduction="mean")
    assert len(shown[0]) == len(shown[1]) == 3
    assert float(shown[0][0]) == pytest.approx(want.item(), abs=1e-4)
    assert shown[0] != shown[1]


def test_peft_holds_the_adapter_alone(
    attention_folder: Path, adapter_path: Path, tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "peft"
    assert fuse(attention_folder, adapter_path, target, "--form", "peft") == 0
    assert f"Wrote the adapter alone to {target}, for PEFT" in capsys.readouterr().out
    assert sorted(file.name for file in target.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    got, want = (adapted_logits(attention_folder, path) for path in (target, adapter_path))
    assert relative_error(got, want) <= TOLERANCE[mx.float32]


def test_dense_form_of_a_matmul_free_model_is_refused_before_anything_is_measured(
    tmp_path: Path, text_file: Path, capsys: Captured
) -> None:
    path = adapter(demo.path(), tmp_path / "adapter")
    flags = ("--form", "dense", "--data", text_file)
    assert fuse(demo.path(), path, tmp_path / "fused", *flags) == 2
    found = capsys.readouterr()
    assert "has a norm inside" in found.err and not found.out


def test_dense_layers_hold_the_sum(
    attention_folder: Path, adapter_path: Path, tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "fused"
    assert fuse(attention_folder, adapter_path, target, "--form", "dense") == 0
    assert "was not measured" in capsys.readouterr().out
    model = attach(load_model(attention_folder), read_adapter(adapter_path))
    layer = model.blocks[0].channel_mixer.down_proj
    assert isinstance(layer, LoRALinear)
    base = mx.eye(layer.base.input_dims)
    layer.base._quantize_activations = False
    fused = load_model(target).blocks[0].channel_mixer.down_proj
    assert fused.weight.dtype == mx.float32
    assert relative_error(fused.weight.T, layer(base)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--form", "ternary"), "--data must be given with '--form ternary'"),
        (("--form", "dense"), "--form must be 'ternary'"),
        (("--data", "missing.txt"), "must be a UTF-8 text file"),
        (("--upload-repo", "no-owner"), "'owner/name'"),
        (("--adapter-path", "missing"), "must be a folder"),
        (("--save-path", "."), "must not be or hold what is read"),
    ],
)
def test_refused(
    flags: tuple[str, ...],
    reason: str,
    folder: Path,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter_path = adapter(folder, tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    assert fuse(folder, adapter_path, tmp_path / "fused", *flags) == 2
    shown = capsys.readouterr()
    assert reason in shown.err and shown.err.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["adapter"]


def test_uploaded_with_its_adapter(
    attention_folder: Path, adapter_path: Path, tmp_path: Path
) -> None:
    files = {file.name: file.read_bytes() for file in attention_folder.iterdir()}
    target = tmp_path / "fused"
    with HubServer() as hub, HubClient(hub.url, tmp_path / "home", TOKEN) as client:
        hub.repositories["them/tiny"] = Repository(branches={"main": files})
        flags = ("--adapter-path", str(adapter_path), "--save-path", str(target))
        flags += ("--model", "them/tiny", "--upload-repo", "me/tuned")
        status, out, err = client.call("command", "fuse", *flags)
        assert status == 0, err
        assert f"Uploaded to {hub.url}/me/tuned" in out
        uploaded = hub.repositories["me/tuned"].branches["main"]
    assert uploaded == {file.name: file.read_bytes() for file in target.iterdir()}
    assert "adapters.safetensors" in uploaded
    card = uploaded["README.md"].decode()
    assert "base_model: them/tiny\nbase_model_relation: adapter" in card
