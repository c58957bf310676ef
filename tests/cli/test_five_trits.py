"""Commands read a model in each format: five trits a byte or 2 bits, signs in GGUF or MLX."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.hub import convert, load_model, open_checkpoint
from tests.hub.test_gguf_q2_0 import mlx_source
from tests.hub.test_to_mlx import same_parameters

Captured = pytest.CaptureFixture[str]
TEXT = "The cat sat on the mat and looked at the dog. " * 4


@pytest.fixture(scope="module")
def five(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("five") / "tiny"
    flags = ["--model", str(folder), "--mlx-path", str(target), "--trits-per-byte", "5"]
    assert main(["convert", *flags]) == 0
    return target


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Matrices of 1 bit: a folder in MLX's format, and one with a GGUF file."""
    folder = tmp_path_factory.mktemp("signs")
    source = open_checkpoint(mlx_source(folder / "s", 128, 1))
    convert(source, folder / "g", to="gguf", gguf_type="q1_0", check=False)
    convert(open_checkpoint(folder / "g"), folder / "m", check=False)
    return folder / "m", folder / "g"


@pytest.fixture(params=["five trits", "signs"])
def pair(
    request: pytest.FixtureRequest, folder: Path, five: Path, signs: tuple[Path, Path]
) -> tuple[Path, Path]:
    return signs if request.param == "signs" else (folder, five)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": TEXT[n:]}) for n in range(4)]
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "A dog", "--temp", "0", "--max-tokens", "8", "--verbose", "F"],
        [
            *("generate", "--draft-model", "MODEL", "--prompt", "A dog", "--max-tokens", "8"),
            *("--verbose", "F", "--temp", "0"),
        ],
        ["perplexity", "--data", "text.txt", "--json"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_same_is_printed(
    pair: tuple[Path, Path],
    data: Path,
    command: list[str],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(data)
    shown = []
    for model in pair:
        flags = [str(model) if flag == "MODEL" else flag for flag in command]
        assert main([*flags, "--model", str(model)]) == 0
        out = capsys.readouterr().out.replace(str(model), "MODEL")
        if command[0] == "perplexity":
            out = str(json.loads(out)["perplexity"])
        shown.append(out)
    assert shown[0] and shown[0] == shown[1]


@pytest.mark.parametrize("flags", [["model"], ["weights", "--json"]], ids=str)
def test_the_same_is_shown(folder: Path, five: Path, flags: list[str], capsys: Captured) -> None:
    shown = []
    for model in (folder, five):
        assert main(["show", *flags, "--model", str(model)]) == 0
        shown.append(capsys.readouterr().out.replace(str(model), "MODEL"))
    assert shown[0] and shown[0] == shown[1]


def test_the_packaged_model_in_both_formats(tmp_path: Path, capsys: Captured) -> None:
    flags = ["--mlx-path", str(tmp_path / "five"), "--trits-per-byte", "5"]
    assert main(["convert", "--model", str(demo.path()), *flags]) == 0
    flags = ["--prompt", "Once upon a time", "--max-tokens", "40", "--verbose", "F"]
    capsys.readouterr()
    texts = []
    for model in (str(tmp_path / "five"), str(demo.path())):
        assert main(["generate", "--model", model, *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] and texts[0] == texts[1]


def test_bench(five: Path, capsys: Captured) -> None:
    flags = ["--quick", "--threads", "1", "--json"]
    assert main(["bench", "--model", str(five), *flags]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.exhaustive
def test_lora_and_fuse(pair: tuple[Path, Path], data: Path) -> None:
    flags = ["--train", "--data", str(data), "--iters", "2", "--batch-size", "2", "--seed", "1"]
    for model, name in zip(pair, "ab", strict=True):
        paths = ["--model", str(model), "--adapter-path", str(data / name)]
        assert main(["lora", *paths, *flags]) == 0
        assert main(["fuse", *paths, "--save-path", str(data / f"fused-{name}")]) == 0
    adapters = [dict(mx.load(str(data / name / "adapters.safetensors"))) for name in "ab"]
    assert adapters[0] and adapters[0].keys() == adapters[1].keys()
    assert all(mx.array_equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert same_parameters(data / "fused-a", data / "fused-b")
    # the adapter lies beside its packed base
    down_proj = load_model(data / "fused-b").blocks[0].channel_mixer.down_proj
    assert down_proj.base.weight.dtype == mx.uint32


def test_upload(five: Path, capsys: Captured) -> None:
    assert main(["upload", "--path", str(five), "--upload-repo", "me/five", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "mmfree_model.py" in shown
    assert "5 trits a byte, 1.6 bits each" in (five / "README.md").read_text()


def test_only_in_mlx_format(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    flags = ["--model", str(folder), "--mlx-path", str(tmp_path / "m"), "--trits-per-byte", "5"]
    assert main(["convert", *flags, "--to", "gguf"]) == 2
    assert "--trits-per-byte must come with '--to mlx'" in capsys.readouterr().err
