"""`mmfree fuse` on small models."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mmfree import demo, native
from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.evaluation.audit import certify
from mlx_mmfree.evaluation.audit.section import section
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
    assert f"To use both: mmfree generate --model {target}\n" in capsys.readouterr().out
    want = adapted_logits(attention_folder, adapter_path)
    both, tokenizer = load(target)
    shown = capsys.readouterr().err
    assert shown == f"[load] '{target}' holds an adapter beside its base model; both are used.\n"
    assert mx.array_equal(both(TOKENS)[0], want)
    assert mx.array_equal(load_model(target)(TOKENS)[0], want)
    base = attach(both, None)
    assert mx.array_equal(base(TOKENS)[0], load_model(attention_folder)(TOKENS)[0])
    assert tokenizer.encode("A dog")
    described = json.loads((target / "adapter_config.json").read_text())
    assert described.keys() == {"fine_tune_type", "lora_parameters", "num_layers"}
    card = (target / "README.md").read_text()
    assert 'load("fused")' in card and str(tmp_path) not in card
    assert "Other programs see the base model alone." in " ".join(card.split())
    assert main(["upload", "--path", str(target), "--upload-repo", "me/tiny", "--dry-run"]) == 0
    assert "adapters.safetensors" in capsys.readouterr().out


@pytest.fixture
def with_adapter(
    attention_folder: Path, adapter_path: Path, tmp_path: Path, capsys: Captured
) -> Path:
    """A base model with its adapter beside it."""
    assert fuse(attention_folder, adapter_path, tmp_path / "kept") == 0
    capsys.readouterr()
    return tmp_path / "kept"


NOTICE = "holds an adapter beside its base model; both are used."


def test_commands_use_the_adapter_that_is_kept_beside_the_base(
    attention_folder: Path,
    adapter_path: Path,
    with_adapter: Path,
    text_file: Path,
    capsys: Captured,
) -> None:
    generate = (
        "generate",
        "--prompt",
        "A dog",
        "--ignore-chat-template",
        "-m",
        "8",
        "--verbose",
        "F",
    )
    both = ("--model", attention_folder, "--adapter-path", adapter_path)
    for command in (
        generate,
        ("perplexity", "--data", text_file, "--json"),
    ):
        shown = []
        for flags in (("--model", attention_folder), both, ("--model", with_adapter)):
            assert main([*map(str, (*command, *flags))]) == 0
            shown.append(capsys.readouterr())
        base, wanted, got = (
            json.loads(each.out)["perplexity"]
            if command[0] == "perplexity"
            else each.out.replace(str(with_adapter), str(attention_folder))
            for each in shown
        )
        assert got == wanted != base
        assert [each.err.count(NOTICE) for each in shown] == [0, 0, 1]
    # another one takes its place
    other = adapter(attention_folder, with_adapter.with_name("other"), seed=2)
    found = []
    for model in (attention_folder, with_adapter):
        assert main([*map(str, (*generate, "--model", model, "--adapter-path", other))]) == 0
        found.append(capsys.readouterr())
    assert found[0].out == found[1].out and NOTICE not in found[1].err


def test_the_adapter_that_is_kept_is_merged_without_being_named(
    attention_folder: Path, adapter_path: Path, with_adapter: Path, tmp_path: Path
) -> None:
    flags = (
        "--model",
        str(with_adapter),
        "--format",
        "dense",
        "--save-path",
        str(tmp_path / "one"),
    )
    assert main(["fuse", *flags]) == 0
    assert fuse(attention_folder, adapter_path, tmp_path / "two", "--format", "dense") == 0
    one, two = (load_model(tmp_path / name)(TOKENS)[0] for name in ("one", "two"))
    assert mx.array_equal(one, two)


def test_the_certificate_counts_the_adapter(
    with_adapter: Path, attention_folder: Path, adapter_path: Path
) -> None:
    if native.unavailable() is not None:
        pytest.skip("certificates of cards need the compiled kernels")
    adapted = attach(load_model(attention_folder), read_adapter(adapter_path)).eval()
    card = (with_adapter / "README.md").read_text()
    assert section(certify(adapted)) in card
    assert section(certify(load_model(attention_folder))) not in card


@pytest.mark.parametrize("to", ["mlx", "hf", "gguf"])
def test_a_base_with_its_adapter_is_not_converted_without_it(
    with_adapter: Path, tmp_path: Path, to: str, capsys: Captured
) -> None:
    flags = ("--model", str(with_adapter), "--to", to, "--mlx-path", str(tmp_path / "converted"))
    assert main(["convert", *flags]) == 2
    assert "must hold no adapter beside its base model" in capsys.readouterr().err
    assert not (tmp_path / "converted").exists()


def test_a_base_with_its_adapter_is_not_trained_further(
    with_adapter: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "A dog. A cat."}) + "\n")
    flags = (
        "--model",
        str(with_adapter),
        "--data",
        str(tmp_path),
        "--adapter-path",
        str(tmp_path / "run"),
    )
    assert main(["lora", "--train", *flags]) == 2
    assert "--model must have no adapter yet but has one" in capsys.readouterr().err
    assert main(["lora", "--train", "--fine-tune-type", "full", *flags]) == 2
    assert "must hold no adapter beside its base model to be trained" in capsys.readouterr().err
    with pytest.raises(
        CheckpointError, match="must hold no adapter beside its base model to be tr"
    ):
        load_model(with_adapter, packed=False, rebuild_masters=True)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_an_adapter_that_is_gone_is_not_passed_over(with_adapter: Path, name: str) -> None:
    (with_adapter / name).unlink()
    with pytest.raises(CheckpointError, match=f"must hold the adapter .* lacks {name}"):
        load_model(with_adapter)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mark", ["adapters", "../adapter", 1, None, [], {"path": "/etc"}])
def test_the_mark_of_an_adapter_is_true_or_false(with_adapter: Path, mark: Any) -> None:
    file = with_adapter / "config.json"
    config = json.loads(file.read_text())
    assert config["mlx_mmfree"]["adapter"] is True
    config["mlx_mmfree"]["adapter"] = mark
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'adapter' of 'mlx_mmfree' must be true or false"):
        load_model(with_adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_an_adapter_lies_in_the_folder_itself(
    with_adapter: Path, tmp_path: Path, name: str
) -> None:
    (with_adapter / name).rename(tmp_path / name)
    (with_adapter / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match="is a link to"):
        load_model(with_adapter)


def test_an_adapter_comes_from_the_hub(
    attention_folder: Path, adapter_path: Path, with_adapter: Path, tmp_path: Path
) -> None:
    flags = ("--prompt", "A dog", "--ignore-chat-template", "-m", "8", "--verbose", "F")
    folders = {"me/kept": with_adapter, "me/base": attention_folder, "me/adapter": adapter_path}
    with HubServer(folders) as hub, HubClient(hub.url, tmp_path / "home", TOKEN) as client:
        shown = {}
        for name, chosen in {
            "both": ("--model", "me/kept"),
            "named": ("--model", "me/base", "--adapter-path", "me/adapter"),
            "local": ("--model", str(attention_folder), "--adapter-path", str(adapter_path)),
            "base": ("--model", "me/base"),
        }.items():
            status, shown[name], err = client.call("command", "generate", *chosen, *flags)
            assert status == 0, err
            assert (NOTICE in err) == (name == "both")
        assert shown["both"] == shown["named"] == shown["local"] != shown["base"]
        missing = ("--model", "me/base", "--adapter-path", "me/nothing")
        status, _, err = client.call("command", "generate", *missing, *flags)
        assert status == 2 and "'me/nothing'" in err


def test_ternary_again_prints_what_it_costs(
    attention_folder: Path, adapter_path: Path, text_file: Path, tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "fused"
    flags = ("--format", "ternary", "--data", text_file)
    assert fuse(attention_folder, adapter_path, target, *flags) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    losses = dict(re.findall(r"^(.+): (\d+\.\d{4}) nats", "\n".join(lines), re.M))
    for name, flags in {
        "base": ("--model", attention_folder),
        "base + adapter": ("--model", attention_folder, "--adapter-path", adapter_path),
        "ternary": ("--model", target),
    }.items():
        assert main(["perplexity", "--json", "--data", str(text_file), *map(str, flags)]) == 0
        metrics = json.loads(capsys.readouterr().out)
        assert float(losses[name]) == pytest.approx(mx.log(metrics["perplexity"]).item(), abs=2e-4)
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
    flags = ("--format", "ternary", "--data", data)
    assert fuse(attention_folder, adapter_path, tmp_path / "fused", *flags) == 2
    assert "must hold samples for a test or for validation" in capsys.readouterr().err
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
    assert fuse(attention_folder, adapter_path, target, "--format", "peft") == 0
    assert f"Wrote the adapter alone to {target}, for PEFT" in capsys.readouterr().out
    assert sorted(file.name for file in target.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    got, want = (adapted_logits(attention_folder, path) for path in (target, adapter_path))
    assert relative_error(got, want) <= TOLERANCE[mx.float32]


def test_dense_variant_of_a_matmul_free_model_is_refused_before_anything_is_measured(
    tmp_path: Path, text_file: Path, capsys: Captured
) -> None:
    path = adapter(demo.path(), tmp_path / "adapter")
    flags = ("--format", "dense", "--data", text_file)
    assert fuse(demo.path(), path, tmp_path / "fused", *flags) == 2
    found = capsys.readouterr()
    assert "has a norm inside" in found.err and not found.out


def test_dense_layers_hold_the_sum(
    attention_folder: Path, adapter_path: Path, tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "fused"
    assert fuse(attention_folder, adapter_path, target, "--format", "dense") == 0
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
        (("--format", "ternary"), "--data must be given with '--format ternary'"),
        (("--format", "dense"), "--format must be 'ternary'"),
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


def test_samples_of_a_file_have_the_names_of_the_training(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.csv").write_text("question,reply\nWho?,The King\nWhere?,At home\n")
    flags = ["--data", "~/my.csv", "--output", str(tmp_path / "run"), "--batch-size", "1"]
    flags += ["--prompt-feature", "question", "--completion-feature", "reply", "--steps", "1"]
    assert main(["lora", "--train", "--num-layers", "1", *flags]) == 0
    capsys.readouterr()
    flags = ["--adapter-path", str(tmp_path / "run"), "--output", str(tmp_path / "fused")]
    assert main(["fuse", *flags, "--data", "~/my.csv"]) == 0
    assert capsys.readouterr().out.count("nats a token") == 2
