"""`mmfree audit`: the certificate in the terminal, as JSON, as a picture and in a model card."""

import json
from pathlib import Path

import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli.audit import main
from mlx_mmfree.cli.convert import main as convert
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.hub.adapters.adapter_folder import write_adapter
from mlx_mmfree.layers.lora import add_adapters
from mlx_mmfree.models import find
from tests.evaluation.audit_models import needs_graphs
from tests.hub.checkpoints import tiny_transformer

Captured = pytest.CaptureFixture[str]


@needs_graphs
def test_the_packaged_model(capsys: Captured) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("MatMul-free: no product with a float matrix is left in the blocks.")
    assert any(line.startswith("bytes of the state") for line in lines)
    assert any(line.startswith("blocks.*.token_mixer.input_proj") for line in lines)
    assert "an estimate" in lines[-1] and "ISSCC 2014" in lines[-1]


@needs_graphs
def test_json_of_a_shape(capsys: Captured) -> None:
    assert main(["--config", "mmfreelm-370m", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_matmul_free"] is True and found["model"] == "mmfreelm-370m"
    assert found["state_bytes"] == 24 * 1024 * 4
    assert found["unknown_operations"] == {}
    twin, own = (found["energy_estimate"][name] for name in ("dense_twin", "model"))
    assert twin["total"] > own["total"] > 0


@needs_graphs
def test_attention_keeps_more_of_a_longer_text(capsys: Captured) -> None:
    sizes = []
    for position in ("16", "2048"):
        assert main(["--config", "bitnet-2b-4t", "--positions", position, "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["bytes"]["state_read"])
    # keys and values of 30 blocks, 5 heads of 128 numbers of 16 bits
    assert sizes[1] - sizes[0] >= (2048 - 16) * 30 * 2 * 5 * 128 * 2


@needs_graphs
def test_an_adapter_is_dense(tmp_path: Path, capsys: Captured) -> None:
    model = load_model(demo.path())
    name = "blocks.2.channel_mixer.down_proj"
    add_adapters(model, lambda path, _: path == name, rank=4)
    write_adapter(tmp_path, model, {})
    assert main(["--adapter-path", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    dense = [
        (p["path"], p["inputs"], p["outputs"]) for p in found["products"] if p["kind"] == "dense"
    ]
    assert found["is_matmul_free"] is False
    assert dense == [(f"{name}.lora_a", 1152, 4), (f"{name}.lora_b", 4, 384)]


def test_a_model_that_reads_both_ways_is_refused(tmp_path: Path, capsys: Captured) -> None:
    architecture = find("fnet")
    model = architecture.build(architecture.config.from_hub(architecture.tiny))
    save_model(tmp_path / "fnet", model)
    assert main(["--model", str(tmp_path / "fnet")]) == 2
    assert "must continue texts token by token but" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config", "no-such"], "must be one of bitnet-2b-4t"),
        (["--model", "folder", "--config", "mmfreelm-370m"], "must come without a model"),
        (["--revision", "main"], "must come with --model"),
        (["--model", "no-such-folder"], "no-such-folder"),
        (["--positions", "-1"], "position"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], message: str, capsys: Captured) -> None:
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@needs_graphs
@pytest.mark.parametrize("is_ternary", [False, True], ids=["dense", "ternary"])
def test_a_card_says_what_the_model_is(is_ternary: bool, tmp_path: Path, capsys: Captured) -> None:
    options = {} if is_ternary else {"linears": None}
    save_model(tmp_path / "source", tiny_transformer(**options))
    assert convert(["--model", str(tmp_path / "source"), "--mlx-path", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out/README.md").read_text()
    assert ("- ternary\n" in card) is is_ternary
    verdict = "MatMul-free: no product" if is_ternary else "Not MatMul-free: 14 products"
    assert f"## Cost of a token\n\n{verdict}" in card
    assert "nan" not in card and "| blocks.*.channel_mixer.down_proj |" in card


@pytest.mark.plot
@needs_graphs
def test_picture(tmp_path: Path) -> None:
    file = tmp_path / "token.png"
    assert main(["--picture", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
