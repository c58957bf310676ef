"""HGRN, HGRN2, GLA and RetNet from their folders: loaded, written, converted, generating."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.generation import generate
from mlx_mmfree.hub import load, load_model, open_checkpoint, save_model
from mlx_mmfree.models import find
from tests.hub.checkpoints import GOLDENS, TOKENS
from tests.tolerances import TOLERANCE, relative_error

KINDS = ("hgrn", "hgrn2", "gla", "retnet")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16, as published, with a tokenizer."""
    kind = request.param
    architecture = find(kind)
    mx.random.seed(0)
    sizes = {"vocab_size": 518, "initializer_range": 0.3}
    model = architecture.build(architecture.config.from_hub({**architecture.tiny, **sizes}))
    model.set_dtype(mx.bfloat16)
    folder = tmp_path_factory.mktemp(kind) / "model"
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return folder


def test_it_is_loaded_as_stored(folder: Path) -> None:
    logits, _ = load_model(folder)(TOKENS)
    assert logits.dtype == mx.bfloat16 and mx.isfinite(logits).all().item()
    exact, _ = load_model(folder, dtype=mx.float32)(TOKENS)
    assert relative_error(logits, exact) <= TOLERANCE[mx.bfloat16]


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


def test_it_is_converted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mlx"
    assert main(["convert", "--model", str(folder), "--mlx-path", str(target)]) == 0
    assert "no: it has no such architecture" in capsys.readouterr().out
    assert mx.array_equal(load_model(target)(TOKENS)[0], load_model(folder)(TOKENS)[0])


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
