"""Saving a model: without loss, whole or not at all."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.files import tensors as safetensors_writer
from mlx_mmfree.hub import Tokenizer, load, load_model, load_tokenizer, save_model
from mlx_mmfree.hub.checkpoint import save
from mlx_mmfree.layers import pack_linears
from tests.hub.checkpoints import GOLDENS, TOKENS, tiny_checkpoint, tiny_model

OPTIONS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": True, "linear_class": "dense"},
    {"conv_size": 3},
    {"conv_size": 3, "share_conv_kernel": False},
    {"use_lower_bound": False, "expand_ratio": 2.0},
    {"num_heads": 4},
]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_round_trip(
    tmp_path: Path, options: dict[str, Any], is_packed: bool, dtype: mx.Dtype
) -> None:
    model = tiny_model(**options)
    if is_packed:
        pack_linears(model)
    model.set_dtype(dtype)
    if is_packed:
        for module in model.modules():
            if "scale" in module:
                module.scale = module.scale.astype(mx.float32)
    save_model(tmp_path / "m", model)
    again = load_model(tmp_path / "m", packed=is_packed or "linear_class" in options)
    want, got = (dict(tree_flatten(m.parameters())) for m in (model, again))
    assert set(want) == set(got)
    for name in want:
        assert want[name].dtype == got[name].dtype
        assert mx.array_equal(want[name], got[name]), name
    assert mx.array_equal(again(TOKENS)[0], model(TOKENS)[0])
    assert again.config == model.config


def test_names_and_settings_are_the_hubs(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m")
    tensors, metadata = mx.load(str(folder / "model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}
    assert tensors["model.layers.1.mlp.gate_proj.weight"].shape == (80, 24)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "hgrn_bit"
    assert "quantization_config" not in config
    save_model(tmp_path / "p", load_model(folder))
    tensors = mx.load(str(tmp_path / "p" / "model.safetensors"))
    assert tensors["model.layers.1.mlp.gate_proj.weight"].shape == (80, 2)
    assert tensors["model.layers.1.mlp.gate_proj.weight_scale"].dtype == mx.float32
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "mmfree",
        "bits": 2,
        "format_version": 1,
    }


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writer, "MAX_SHARD_BYTES", 8000)
    model = tiny_model()
    save_model(tmp_path / "m", model)
    shards = sorted(tmp_path.glob("m/*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert not (tmp_path / "m" / "model.safetensors").exists()
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    total = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert index["metadata"]["total_size"] == total
    again = load_model(tmp_path / "m", packed=False)
    assert mx.array_equal(again(TOKENS)[0], model(TOKENS)[0])


@pytest.mark.parametrize("as_object", [True, False])
def test_tokenizer_and_its_ids_go_along(tmp_path: Path, as_object: bool) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / "tokenizer_spm", source, copy_function=shutil.copyfile)
    (source / "config.json").write_text('{"eos_token_id": [2, 5], "bos_token_id": 1, "other": 3}')
    (source / "notes.txt").write_text("stays")
    tokenizer = Tokenizer.from_folder(source)
    save_model(tmp_path / "m", tiny_model(vocab_size=700), tokenizer if as_object else source)
    assert sorted(files(tmp_path / "m")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.model",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == ([2, 5], 1)
    assert "other" not in config
    _, again = load(tmp_path / "m")
    assert again.encode("Hello there") == tokenizer.encode("Hello there")
    assert again.eos_token_ids == tokenizer.eos_token_ids


def test_named_chat_templates_go_along(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    shutil.copytree(GOLDENS / "tokenizer_bpe", source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    messages = [{"role": "user", "content": "Hi"}]
    for _ in range(2):
        # the second time, the folder is replaced
        save_model(tmp_path / "model", tiny_model(vocab_size=520), source, overwrite=True)
        tokenizer = load_tokenizer(tmp_path / "model")
        text = tokenizer.apply_chat_template(messages, tools=[{}], tokenize=False)
        assert text == "with tools" != tokenizer.apply_chat_template(messages, tokenize=False)
    (tmp_path / "model" / "additional_chat_templates" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="also has 'additional_chat_templates'"):
        save_model(tmp_path / "model", tiny_model(vocab_size=520), source, overwrite=True)


def test_tokenizer_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'tokenizer' must be a folder"):
        save_model(tmp_path / "m", tiny_model(), tmp_path / "absent")
    assert not any(tmp_path.iterdir())


def test_existing_folders(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m")
    before = files(folder)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        save_model(folder, tiny_model())
    assert files(folder) == before
    (folder / "notes.txt").touch()
    (folder / "runs").mkdir()
    with pytest.raises(CheckpointError, match=r"also has 'notes\.txt', 'runs'"):
        save_model(folder, tiny_model(vocab_size=41), overwrite=True)
    (folder / "notes.txt").unlink()
    (folder / "runs").rmdir()
    save_model(folder, tiny_model(vocab_size=41), overwrite=True)
    assert sorted(files(folder)) == sorted(before)
    assert load_model(folder).vocab_size == 41
    (tmp_path / "empty").mkdir()
    tiny_checkpoint(tmp_path / "empty")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "m"]


def test_replaces_checkpoints_only(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        save_model(tmp_path, tiny_model(), overwrite=True)
    with pytest.raises(CheckpointError, match="is a file"):
        save_model(tmp_path / "photo.jpg", tiny_model(), overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["photo.jpg"]


def test_loaded_model_replaces_its_own_folder(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m")
    model = load_model(folder)
    want = model(TOKENS)[0]
    save_model(folder, model, overwrite=True)
    assert mx.array_equal(load_model(folder)(TOKENS)[0], want)


def test_makes_parents_and_ordinary_permissions(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "a" / "b" / "m")
    (tmp_path / "ordinary").mkdir()
    assert folder.stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "error", [OSError("disk failed"), RuntimeError("[write] failed"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("step", ["write_shards", "copy_files", "write_json"])
@pytest.mark.parametrize("exists", [True, False])
def test_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: str, exists: bool
) -> None:
    if exists:
        tiny_checkpoint(tmp_path / "m")
    before = files(tmp_path / "m") if exists else None
    real = getattr(save, step)

    def fail(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise error

    monkeypatch.setattr(save, step, fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError
    with pytest.raises(expected):
        save_model(tmp_path / "m", tiny_model(vocab_size=41), overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == (["m"] if exists else [])
    assert before is None or files(tmp_path / "m") == before


def test_failed_exchange_keeps_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "m")
    before = files(folder)
    rename = Path.rename

    def refuse_new(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(CheckpointError, match="cannot be written: no"):
        save_model(folder, tiny_model(vocab_size=41), overwrite=True)
    assert files(folder) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(
        CheckpointError,
        match=r"0\.1 MB are needed and 16\.0 MB stay free, but only 1\.0 MB are free",
    ):
        save_model(tmp_path / "m", tiny_model())
    assert not any(tmp_path.iterdir())


def test_parameters_that_the_hub_does_not_know(tmp_path: Path) -> None:
    model = tiny_model()
    model.blocks[0].adapter = mx.zeros(3)
    with pytest.raises(CheckpointError, match=r"'blocks\.0\.adapter' has no name on the Hub"):
        save_model(tmp_path / "m", model)
