"""GGUF models in several files: written, read, fetched, and what is wrong with them."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFReader

from mlx_mmfree.cli.convert import main
from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.files.gguf_file import (
    PlannedGGUFTensor,
    part_names,
    read_gguf,
    whole_models,
    write_gguf,
)
from mlx_mmfree.hub import convert, load, load_model, open_checkpoint, save_model
from tests.hub.checkpoints import GOLDENS, tiny_transformer
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import HubServer

TOKENS = mx.array([[1, 7, 3, 39, 0]])
SIZES: dict[str, Any] = {
    "vocab_size": 520,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 1,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_model(tmp_path / "s", tiny_transformer(**SIZES), GOLDENS / "tokenizer_bpe")
    return tmp_path / "s"


@pytest.fixture
def parts(tmp_path: Path, source: Path) -> list[Path]:
    convert(open_checkpoint(source), tmp_path / "m", to="gguf", max_part_bytes=60_000, check=False)
    return sorted((tmp_path / "m").glob("*.gguf"))


def test_names() -> None:
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert part_names(names[0]) == part_names(names[1]) == names
    assert whole_models([*names, "other.gguf"]) == [names[0], "other.gguf"]
    for name in ("m.gguf", "m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-1-of-2.gguf"):
        assert part_names(name) == [name]
    assert part_names("m-00001-of-99999.gguf") == ["m-00001-of-99999.gguf"]


def test_tensors_of_any_size_begin_at_aligned_offsets(tmp_path: Path) -> None:
    arrays = {f"t{size}": np.arange(size, dtype=np.float32) for size in (3, 8, 1)}
    planned = [
        PlannedGGUFTensor(name, "F32", array.shape, partial(array.view, np.uint8))
        for name, array in arrays.items()
    ]
    write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, planned)
    theirs = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    data = (tmp_path / "m.gguf").read_bytes()
    _, ours = read_gguf(tmp_path / "m.gguf")
    for name, array in arrays.items():
        assert np.array_equal(theirs[name], array)
        assert data[ours[name].start : ours[name].stop] == array.tobytes()


def test_parts_give_the_model_of_one_file(tmp_path: Path, source: Path, parts: list[Path]) -> None:
    assert len(parts) > 2
    assert [part.name for part in parts] == part_names(parts[0].name)
    convert(open_checkpoint(source), tmp_path / "whole", to="gguf", check=False)
    want = load_model(tmp_path / "whole")(TOKENS)[0]
    for path in (tmp_path / "m", parts[0], parts[-1]):
        model, tokenizer = load(path)
        assert mx.array_equal(model(TOKENS)[0], want)
        assert tokenizer.encode("Once")


def test_parts_are_read_by_the_package_gguf(parts: list[Path]) -> None:
    readers = [GGUFReader(part) for part in parts]
    for number, reader in enumerate(readers):
        for key, value in (("split.no", number), ("split.count", len(parts))):
            field = reader.get_field(key)
            assert field is not None and field.types[0].name == "UINT16"
            assert field.contents() == value
    assert sum(len(reader.tensors) for reader in readers) == 12
    assert all(sum(t.n_bytes for t in r.tensors) <= 60_000 or len(r.tensors) == 1 for r in readers)


def test_missing_part(tmp_path: Path, parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-.* cannot be read"):
        load_model(tmp_path / "m")


def test_exchanged_parts(tmp_path: Path, parts: list[Path]) -> None:
    content = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(content)
    with pytest.raises(CheckpointError, match=r"must be part 2 of \d but says"):
        load_model(tmp_path / "m")


def test_renamed_part(tmp_path: Path, parts: list[Path]) -> None:
    parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="must be named as one of the"):
        load_model(tmp_path / "model.gguf")


def test_tensor_in_two_parts(tmp_path: Path, parts: list[Path]) -> None:
    last = parts[-1].read_bytes()
    number = len(parts) - 1
    first = parts[1].read_bytes()
    # the same tensors under the number of another part
    key = b"split.no" + np.uint32(2).tobytes()
    assert key in first and key in last
    changed = first.replace(key + np.uint16(1).tobytes(), key + np.uint16(number).tobytes())
    parts[-1].write_bytes(changed)
    with pytest.raises(CheckpointError, match="must hold 12 different tensors but hold"):
        load_model(tmp_path / "m")


@pytest.mark.equal_bits
def test_repository(tmp_path: Path, parts: list[Path]) -> None:
    with (
        HubServer({"me/parts": tmp_path / "m"}) as hub,
        HubClient(hub.url, tmp_path / "h") as client,
    ):
        want = client.call("logits", str(tmp_path / "m"))
        assert client.call("logits", "me/parts") == want
        assert set(hub.downloaded()) >= {part.name for part in parts}
        assert client.call("logits", f"me/parts/{parts[0].name}") == want


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("3", "must be a whole number followed by M or G"),
        ("0G", "must be a whole"),
        ("-1M", "must be"),
    ],
)
def test_impossible_sizes(size: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "m", "--to", "gguf", f"--split-max-size={size}"]) == 2
    assert message in capsys.readouterr().err


def test_size_of_another_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "m", "--split-max-size", "1G"]) == 2
    assert "must come with '--to gguf'" in capsys.readouterr().err
