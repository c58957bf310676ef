"""`mmfree convert` on small checkpoints."""

import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.evaluation import measure_perplexity
from mlx_mmfree.generation import generate_tokens
from mlx_mmfree.hub import load, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.conversion.convert import convert as convert_checkpoint
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from tests.hub.checkpoints import edit_json, tiny_transformer
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import TOKEN, HubServer, Repository

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


def convert(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


@pytest.mark.parametrize("flag", ["--model", "--hf-path"])
def test_packed_format_is_smaller_and_generates_the_same(flag: str, tmp_path: Path) -> None:
    source, target = GOLDENS / "hgrn_default", tmp_path / "packed"
    assert convert(flag, source, "--mlx-path", target) == 0
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (source, target)]
    assert sizes[1] < sizes[0] / 2
    tokens = [
        list(generate_tokens(load_model(folder), [1, 2, 3], max_tokens=12))
        for folder in (source, target)
    ]
    assert tokens[0] == tokens[1]


def test_packed_checkpoint_is_converted_again_without_change(folder: Path, tmp_path: Path) -> None:
    assert convert("--model", folder, "--mlx-path", tmp_path / "again", "--dtype", "float16") == 0
    model, tokenizer = load(tmp_path / "again")
    original, _ = load(folder)
    assert model.embed.weight.dtype == mx.float16
    name = "input_proj"
    ours, theirs = (m.blocks[0].token_mixer[name].weight for m in (model, original))
    assert mx.array_equal(ours, theirs)
    assert tokenizer.encode("A dog", add_special_tokens=False)


def test_existing_folder_is_kept(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(folder, tmp_path / "target")
    before = {file: file.read_bytes() for file in target.iterdir()}
    assert convert("--model", folder, "--mlx-path", target) == 2
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in target.iterdir()} == before


def test_an_odd_card_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(folder, tmp_path / "source")
    doubled = "".join(f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]\n" for n in range(1, 30))
    (source / "README.md").write_text(f"---\nb0: &b0 [x]\n{doubled}license: mit\n---\n# Odd\n")
    assert convert("--model", source, "--mlx-path", tmp_path / "out", "--no-verify") == 0
    notes = capsys.readouterr().err.splitlines()
    assert [line for line in notes if "at most 16 aliases" in line] == notes
    assert len(notes) == 1 and notes[0].startswith(f"note: '{source / 'README.md'}' cannot be read")
    (source / "README.md").unlink()
    assert convert("--model", source, "--mlx-path", tmp_path / "out2", "--no-verify") == 0
    assert capsys.readouterr().err == ""


def test_table_and_card(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = shutil.copytree(folder, tmp_path / "source")
    (source / "LICENSE").write_text("Apache License\nVersion 2.0, January 2004\n")
    assert convert("--model", source, "--mlx-path", tmp_path / "out", "--embed-bits", 8) == 0
    out = capsys.readouterr().out.splitlines()
    formats = FloatFormats(embed_bits=8)
    report = convert_checkpoint(open_checkpoint(source), tmp_path / "again", formats=formats)
    total = next(line.split() for line in out if line.startswith("total"))
    assert total[1] == str(report.total.tensors)
    assert total[4] == f"{report.total.source_bytes:,}"
    assert any("codes of ternary matrices are equal" in line for line in out)
    lines = out[out.index(f"Wrote {tmp_path / 'out'}. Programs that open it:") + 1 :]
    assert lines == [f"  {each.runtime:<12}  {each}" for each in report.openings]
    assert [line.split()[0] for line in lines] == [
        "mlx-lm",
        "transformers",
        "llama.cpp",
        "bitnet.cpp",
    ]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: apache-2.0" in card and "--trust-remote-code" in card
    assert all(f"| {each.runtime} | {each} |" in card for each in report.openings)
    assert "mmfree convert --model source --mlx-path out --embed-bits 8" in card
    assert str(tmp_path) not in card
    assert (tmp_path / "out" / "LICENSE").is_file()


def test_without_comparison(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("--model", folder, "--mlx-path", tmp_path / "m", "--no-verify") == 0
    assert "The result was not compared with the source." in capsys.readouterr().out
    assert "was not compared" in (tmp_path / "m" / "README.md").read_text()


def test_folder_is_replaced_on_demand(folder: Path, tmp_path: Path) -> None:
    target = shutil.copytree(folder, tmp_path / "target")
    assert convert("--model", folder, "--mlx-path", target, "--overwrite", "--no-verify") == 0
    assert (target / "mmfree_model.py").is_file()


@pytest.mark.parametrize("kind", ["tensor", "group"])
def test_dense_to_ternary(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    sizes = {"vocab_size": 518, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    save_model(tmp_path / "s", tiny_transformer(linears=None, **sizes), GOLDENS / "tokenizer_bpe")
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little dog.")
    flags = ("--ternarize", kind, "--data", text)
    assert convert("--model", tmp_path / "s", "--mlx-path", tmp_path / "m", *flags) == 0
    out = capsys.readouterr().out
    assert "without fine-tuning" in out
    for name, name_of_folder in (("source", "s"), ("ternary", "m")):
        model, tokenizer = load(tmp_path / name_of_folder)
        tokens = np.array(tokenizer.encode(text.read_text()), np.int32)
        loss = measure_perplexity(model, tokens, text.stat().st_size).loss
        assert f"{name}: {loss:.4f} nats a token" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", __file__), "must come with --ternarize"),
        (("--gguf-type", "i2_s"), "must come with '--to gguf'"),
        (("--keep-masters",), "must come with '--to hf'"),
        (("--ternarize", "--data", "absent.txt"), "must be a UTF-8 text file"),
        (
            ("--ternarize", "--data", demo.path() / "model.safetensors"),
            "must be a UTF-8 text file",
        ),
        (("--embed-bits", "3"), "invalid choice"),
        (("--upload-repo", "no-owner"), "'owner/name'"),
        (
            ("--ternarize",),
            "It is for gemma3_text, hybrid, llama, minicpm, ",
        ),
    ],
    ids=str,
)
def test_flags_that_do_not_fit(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    assert convert("--model", folder, "--mlx-path", tmp_path / "m", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_model_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert() == 2
    assert "--model/--hf-path" in capsys.readouterr().err


def test_masters_of_a_silent_llama(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "masters"
    save_model(source, tiny_transformer())
    edit_json(source / "config.json", quantization_config=..., is_bitnet_config=True)
    assert convert("--model", source, "--mlx-path", tmp_path / "a") == 2
    assert "--latent must be given" in capsys.readouterr().err
    for flag, is_ternary in [("--latent", True), ("--no-latent", False)]:
        target = tmp_path / flag
        assert convert("--model", source, "--mlx-path", target, flag) == 0
        assert (load_model(target).config.linears is not None) == is_ternary


def test_from_the_hub_and_back(folder: Path, tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    files["README.md"] = b"---\nlicense: mit\nlanguage: en\n---\n\nA model.\n"
    with HubServer() as hub, HubClient(hub.url, tmp_path / "home", TOKEN) as client:
        hub.repositories["them/tiny"] = Repository(branches={"main": files})
        flags = ("--mlx-path", str(tmp_path / "out"), "--upload-repo", "me/tiny-mlx")
        status, out, err = client.call("command", "convert", "--model", "them/tiny", *flags)
        assert status == 0, err
        assert f"Uploaded to {hub.url}/me/tiny-mlx" in out
        uploaded = hub.repositories["me/tiny-mlx"].branches["main"]
        assert uploaded == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
        card = uploaded["README.md"].decode()
        assert "base_model: them/tiny" in card and "license: mit" in card
        assert client.call("logits", "me/tiny-mlx") == client.call("logits", str(folder))
