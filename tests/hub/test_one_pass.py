"""A checkpoint becomes a model in one pass: its architecture is built once."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml
from mlx.utils import tree_flatten

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.files.checkpoint_files import CONFIG_FILE
from mlx_mmfree.files.tensors import TensorEntry
from mlx_mmfree.hub import convert, load, load_model, load_tokenizer, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint import weights
from mlx_mmfree.hub.checkpoint.load import OpenedModel
from mlx_mmfree.layers import BitLinear, pack_linears
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts.architecture import Config
from tests.hub.checkpoints import GOLDENS, edit_tensors, nbytes, tiny_checkpoint, tiny_model
from tests.training.conftest import run_values, without_curve  # noqa: F401

TOKENIZER = GOLDENS / "tokenizer_bpe"
VOCABULARY = 518


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The configurations that the architecture was asked to build, one entry for each.

    Model cards are left out. They describe a folder that was written, which is opened for that.
    """
    monkeypatch.setattr("mlx_mmfree.training.results.write_cards", lambda *_: None)
    architecture = find("hgrn_bit")
    build: Callable[[Any], Decoder] = architecture.build
    asked: list[Any] = []

    def counted(config: Any) -> Decoder:
        asked.append(config)
        return build(config)

    # the record is frozen
    object.__setattr__(architecture, "build", counted)
    yield asked
    object.__setattr__(architecture, "build", build)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name, options in {
        "masters": {},
        "tied": {"tie_word_embeddings": True},
        "dense": {"linear_class": "dense"},
    }.items():
        save_model(root / name, tiny_model(vocab_size=VOCABULARY, **options), TOKENIZER)
    packed = pack_linears(tiny_model(vocab_size=VOCABULARY))
    save_model(root / "packed", packed, TOKENIZER)
    # its tokenizer knows the end of a document
    own = load_tokenizer(demo.path())
    model = tiny_model(vocab_size=own.vocab_size)
    save_model(root / "own masters", model, own)
    save_model(root / "own packed", pack_linears(model), own)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture
def commands(tmp_path: Path) -> Callable[[str, Path], list[str]]:
    """The arguments of a short run of a command."""
    text = tmp_path / "text.txt"
    text.write_text("The dog runs. " * 8)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps({"text": "The dog runs."}) + "\n")
    (tmp_path / "data" / "test.jsonl").write_text(json.dumps({"text": "The dog runs."}) + "\n")
    run = ["--adapter-path", str(tmp_path / "run"), "--iters", "1", "--batch-size", "1"]
    data = ["--data", str(tmp_path / "data")]
    arguments = {
        "generate": ["-p", "The", "-m", "1", "--ignore-chat-template"],
        "chat": [],
        "perplexity": ["--data", str(text)],
        "lora": ["--train", *data, *run],
        "lora --test": ["--test", *data, "--fine-tune-type", "full"],
        "full": ["--train", *data, *run, "--fine-tune-type", "full"],
        "cache_prompt": ["--prompt", "The", "--prompt-cache-file", str(tmp_path / "cached")],
    }

    def line(command: str, folder: Path) -> list[str]:
        name = "lora" if command == "full" else command.split()[0]
        return [name, "--model", str(folder), *arguments[command]]

    return line


@pytest.mark.parametrize("format", ["masters", "packed", "tied", "dense"])
@pytest.mark.parametrize("packed", [True, False])
def test_load(folders: dict[str, Path], builds: list[Any], format: str, packed: bool) -> None:
    load(folders[format], packed=packed, rebuild_masters=not packed)
    assert len(builds) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "command, format",
    [
        ("generate", "masters"),
        ("generate", "packed"),
        ("chat", "packed"),
        ("perplexity", "packed"),
        ("cache_prompt", "packed"),
        ("lora", "packed"),
        ("lora --test", "packed"),
        ("full", "masters"),
    ],
)
def test_commands(
    folders: dict[str, Path],
    commands: Callable[[str, Path], list[str]],
    builds: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    format: str,
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: (_ for _ in ()).throw(EOFError))
    assert main(commands(command, folders[format])) == 0
    assert len(builds) == 1


def test_masters_are_made_up_in_the_model_that_was_built(
    folders: dict[str, Path],
    commands: Callable[[str, Path], list[str]],
    builds: list[Any],
) -> None:
    assert main([*commands("full", folders["packed"]), "--rebuild-masters"]) == 0
    assert len(builds) == 1


@pytest.mark.sample(2)
@pytest.mark.usefixtures("without_curve")
@pytest.mark.parametrize("format", [None, "own masters", "own packed"])
def test_training_from_texts(
    folders: dict[str, Path],
    builds: list[Any],
    run_values: dict[str, Any],  # noqa: F811
    tmp_path: Path,
    format: str | None,
) -> None:
    run_values |= {"steps": 1, "warmup_steps": 0}
    if format is not None:
        del run_values["model"]
        run_values |= {"init_from": str(folders[format]), "rebuild_masters": True}
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(run_values))
    assert main(["train", "--config", str(file)]) == 0
    assert len(builds) == 1


def test_a_teacher_is_built_once_too(
    folders: dict[str, Path], commands: Callable[[str, Path], list[str]], builds: list[Any]
) -> None:
    assert main([*commands("lora", folders["packed"]), "--teacher", str(folders["masters"])]) == 0
    assert len(builds) == 2


class TestPackCache:
    def test_filled_and_read(
        self, folders: dict[str, Path], cache: Path, builds: list[Any]
    ) -> None:
        for start in (1, 2):
            load(folders["masters"])
            assert len(builds) == start
        assert len(list(cache.iterdir())) == 1

    def test_damaged(self, folders: dict[str, Path], cache: Path, builds: list[Any]) -> None:
        want = load_model(folders["masters"])
        [file] = cache.iterdir()
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
        builds.clear()
        got = load_model(folders["masters"])
        # one for the packed format, one for its source
        assert len(builds) == 2
        tokens = mx.array([[1, 7, 3]])
        assert mx.array_equal(got(tokens)[0], want(tokens)[0])

    def test_of_another_model(
        self, folders: dict[str, Path], cache: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Such a format is noticed before its weights are read."""
        want = nbytes(load_model(folders["masters"]))
        [file] = cache.iterdir()
        tensors, metadata = mx.load(str(file), return_metadata=True)
        del tensors["model.norm.weight"]
        mx.save_safetensors(str(file), tensors, metadata)
        capsys.readouterr()
        opened = OpenedModel(open_checkpoint(folders["masters"]))
        assert "is made again" in capsys.readouterr().err
        assert opened.nbytes == want == nbytes(opened.load())

    @pytest.mark.parametrize("format", ["masters", "tied"])
    def test_size_is_that_of_the_source(
        self, folders: dict[str, Path], cache: Path, format: str
    ) -> None:
        first = OpenedModel(open_checkpoint(folders[format]))
        want = first.nbytes
        assert nbytes(first.load()) == want
        assert OpenedModel(open_checkpoint(folders[format])).nbytes == want


@pytest.mark.parametrize("verify", [True, False])
def test_conversion(
    folders: dict[str, Path], tmp_path: Path, builds: list[Any], verify: bool
) -> None:
    convert(open_checkpoint(folders["masters"]), tmp_path / "converted", check=verify)
    # the source, and what was written; both are loaded as a user does to compare their logits
    assert len(builds) == (4 if verify else 2)


def test_a_copy_of_a_tied_matrix_is_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", vocab_size=VOCABULARY, tie_word_embeddings=True)
    for file in TOKENIZER.iterdir():
        if file.name != CONFIG_FILE:
            shutil.copy(file, folder)
    embedding = mx.load(str(folder / "model.safetensors"))["model.embeddings.weight"]
    edit_tensors(folder / "model.safetensors", lm_head__weight=embedding)
    compared = []
    check = weights._check_copy

    def counted(copy: TensorEntry, original: TensorEntry, config: Config) -> None:
        compared.append(copy.name)
        check(copy, original, config)

    monkeypatch.setattr(weights, "_check_copy", counted)
    load(folder)
    assert compared == ["lm_head.weight"]


def test_masters_that_are_there_are_not_made_up(folders: dict[str, Path], tmp_path: Path) -> None:
    """Only what is stored packed gets masters that are made up."""
    shutil.copytree(folders["masters"], tmp_path / "mixed")
    packed = mx.load(str(folders["packed"] / "model.safetensors"))
    part = {name: packed[name] for name in ("lm_head.weight", "lm_head.weight_scale")}
    edit_tensors(
        tmp_path / "mixed" / "model.safetensors",
        **{name.replace(".", "__"): array for name, array in part.items()},
    )
    want = load_model(folders["masters"], packed=False)
    opened = OpenedModel(open_checkpoint(tmp_path / "mixed"), packed=False, rebuild_masters=True)
    model = opened.load()
    assert opened.nbytes == nbytes(model) == nbytes(want)
    assert all(type(linear) is BitLinear for linear in (model.head, want.head))
    got = dict(tree_flatten(model.parameters()))
    for name, array in tree_flatten(want.parameters()):
        assert mx.array_equal(got[name], array) == (name != "head.weight"), name
