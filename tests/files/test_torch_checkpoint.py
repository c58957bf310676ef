"""PyTorch checkpoints are read as data; whatever else a file asks for is refused by name."""

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.files.tensors import read_tensors
from mlx_mmfree.files.torch_checkpoint import MAX_DIRECTORY_BYTES, MAX_PICKLE_BYTES, read_header
from mlx_mmfree.hub import load_model
from tests.files.torch_files import (
    STORAGE_NAMES,
    Call,
    Global,
    Reference,
    ZipPart,
    bytes_of,
    change_part,
    opcodes,
    pickled,
    tensor,
    to_torch_checkpoint,
    torch_parts,
    write_torch,
    write_zip,
)
from tests.hub.checkpoints import edit_json, tiny_checkpoint

TOKENS = mx.array([[1, 7, 3, 39, 0]])
EIGHT = {"0": np.arange(8, dtype="f4").tobytes()}
MATRIX = {"x": tensor((2, 4))}
PARTS = torch_parts(MATRIX, EIGHT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pytorch_model.bin"


def arrays(file: Path) -> dict[str, mx.array]:
    return dict(read_tensors(file, read_header(file).values()))


def written(file: Path, description: Any, storages: dict[str, bytes] = EIGHT) -> Path:
    write_zip(file, torch_parts(description, storages))
    return file


def refused(file: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        arrays(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("dtype", STORAGE_NAMES, ids=STORAGE_NAMES.get)
def test_types_and_shapes(file: Path, dtype: mx.Dtype) -> None:
    shapes = ((), (3,), (2, 0), (3, 5))
    want = {str(shape): (mx.random.normal(shape) * 3).astype(dtype) for shape in shapes}
    write_torch(file, want)
    got = arrays(file)
    assert list(got) == list(want)
    for name, array in want.items():
        assert (got[name].dtype, got[name].shape) == (dtype, array.shape)
        assert mx.array_equal(got[name], array)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32], ids=str)
def test_views_with_the_other_sign(file: Path, dtype: mx.Dtype) -> None:
    want = mx.array([1, -2, 0, 4], dtype)
    described = tensor((4,), kind=STORAGE_NAMES[dtype], metadata={"neg": True})
    content = np.array(want.view(mx.uint8)).tobytes()
    got = arrays(written(file, {"x": described}, {"0": content}))
    assert mx.array_equal(got["x"], -want)


def test_other_metadata_of_a_tensor_are_refused(file: Path) -> None:
    refused(written(file, {"x": tensor((8,), metadata={"conj": True})}), "which is not known")


def test_views_of_a_storage(file: Path) -> None:
    description = {
        "whole": tensor((8,)),
        "row": tensor((3,), offset=5, size=8),
        "column": tensor((2,), offset=1, strides=(4,), size=8),
        "transposed": tensor((4, 2), strides=(1, 4)),
        "tied": tensor((8,)),
        "other": tensor((16,), key="1"),
    }
    whole = mx.arange(8).astype(mx.float32)
    want = {
        "whole": whole,
        "row": whole[5:],
        "column": whole[1::4],
        "transposed": whole.reshape(2, 4).T,
        "tied": whole,
        "other": mx.zeros(16),
    }
    # without the other storage, the names for each byte would be too many
    got = arrays(written(file, description, EIGHT | {"1": bytes(64)}))
    assert {name: array.tolist() for name, array in got.items()} == {
        name: array.tolist() for name, array in want.items()
    }


def test_strides_and_offsets_that_do_not_matter(file: Path) -> None:
    far = 2**63 - 1
    description = {
        "one": tensor((1, 8), strides=(far, 1)),
        "none": tensor((8, 0, 2**31 - 1), offset=far, strides=(far,) * 3, size=8),
        "scalar": tensor((), offset=7, size=8),
    }
    got = arrays(written(file, description))
    assert got["one"].tolist() == [list(range(8))]
    assert got["none"].size == 0
    assert got["scalar"].item() == 7


def test_parameters_and_versions_of_modules(file: Path) -> None:
    parameter = Call(
        "torch._utils._rebuild_parameter", (tensor((8,)), True, Call("collections.OrderedDict", ()))
    )
    items = b"(" + opcodes("x") + opcodes(parameter) + b"u"
    metadata = opcodes({"_metadata": {"": {"version": 1}}})
    text = opcodes(Call("collections.OrderedDict", ())) + items + metadata + b"b"
    assert arrays(written(file, b"\x80\x02" + text + b"."))["x"].tolist() == list(range(8))


def test_memo_and_newer_protocol(file: Path) -> None:
    old, module, name = b"ctorch._utils\n_rebuild_tensor_v2\n", "torch._utils", "_rebuild_tensor_v2"
    stacked = opcodes(module) + b"\x94" + opcodes(name) + b"\x94\x93\x94"
    recalled = b"h\0h\1\x93"
    text = pickled({"x": tensor((8,)), "y": tensor((8,))})[2:]
    text = text.replace(old, stacked, 1).replace(old, recalled)
    newer = b"\x80\x04\x95" + len(text).to_bytes(8, "little") + text
    assert newer.count(b"\x93") == 2
    assert set(arrays(written(file, newer))) == {"x", "y"}


def test_large_zip_files_use_64_bits(file: Path) -> None:
    write_zip(file, PARTS, is_64=True)
    with zipfile.ZipFile(file) as other:
        assert other.testzip() is None
    assert arrays(file)["x"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_python_zips(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as other:
        for part in PARTS:
            other.writestr(part.name, part.content)
    assert arrays(file)["x"].shape == (2, 4)


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


@pytest.mark.parametrize("protocol", range(6))
def test_runs_nothing(
    file: Path, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = pickle.dumps({"x": Attack()}, protocol)
    message = r"posix\.system|nt\.system|pickle instruction"
    refused(written(file, text), message)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "torch.load",
        "torch._utils._rebuild_qtensor",
        "collections.OrderedDict.__init__",
        "collections.defaultdict",
        "torch.nn.modules.linear.Linear",
        "",
    ],
)
def test_other_names_are_refused(file: Path, name: str) -> None:
    refused(written(file, {"x": Call(name, ())}), f"asks for '.*{name}'.*weights_only=True")


@pytest.mark.parametrize("kind", ["Double", "ComplexFloat", "ComplexDouble"])
def test_other_types_of_numbers_are_named(file: Path, kind: str) -> None:
    message = f"holds numbers of the type torch.{kind}Storage, .*convert them to float32"
    refused(written(file, {"x": Call(f"torch.{kind}Storage", ())}), message)


STORAGE = ("storage", Global("torch.FloatStorage"), "0", "cpu", 8)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ([], "holds a list"),
        ({"x": 1}, "must hold a tensor under 'x' but holds a int"),
        ({"model": MATRIX}, "under 'model' but holds a dict"),
        ({1: tensor((8,))}, "by text but uses a int"),
        ({"x": tensor((9,), size=8)}, r"shape \(9,\) that needs more than the 8"),
        ({"x": tensor((8,), offset=1)}, "needs more than"),
        ({"x": tensor((2, 4), strides=(5, 1))}, "needs more than"),
        ({"x": tensor((2**20, 2**20), strides=(0, 0), size=8)}, "needs more than"),
        ({"x": tensor((2**30, 2**30), strides=(0, 0), size=8)}, "impossible shape"),
        ({"x": tensor((3, 3), strides=(0, 1), size=8)}, "needs more than"),
        ({"x": tensor((8,), offset=-1)}, "impossible shape"),
        ({"x": tensor((8,), offset=2.0)}, "impossible shape"),
        ({"x": tensor((-8,), size=8)}, "impossible shape"),
        ({"x": tensor((True,), size=8)}, "impossible shape"),
        ({"x": tensor((8,), strides=(-1,))}, "impossible shape"),
        ({"x": tensor((8,), strides=(1, 1))}, "impossible shape"),
        ({"x": tensor((2**31,), size=2**31)}, "impossible shape"),
        ({"x": tensor((1,) * 9, size=8)}, "impossible shape"),
        ({"x": tensor((0, 2**30, 2**30), size=8)}, "impossible shape"),
        ({"x": tensor([8], strides=(1,), size=8)}, "impossible shape"),
        ({"x": tensor((8,), key="1")}, "must have 32 bytes for tensor 'x' but has none"),
        ({"x": tensor((8,), key="../data/0")}, "but has none"),
        ({"x": tensor((8,), key=0)}, "storage that is not well described"),
        ({"x": tensor((8,), size=9)}, "must have 36 bytes for tensor 'x' but has 32"),
        ({"x": tensor((8,), size=-8)}, "storage that is not well described"),
        ({"x": tensor((8,), size=2**62)}, "but has 32"),
        ({"x": tensor((8,), kind="HalfStorage")}, "must have 16 bytes"),
        ({"x": Reference("0")}, "not to a storage"),
        ({"x": Reference(STORAGE[:4])}, "not to a storage"),
        ({"x": Reference(STORAGE)}, "holds a Storage"),
        ({"x": Call("torch._utils._rebuild_tensor_v2", (0,))}, "odd arguments"),
        ({"x": Call("torch._utils._rebuild_tensor_v2", (0,) * 6)}, "impossible shape"),
        ({"x": Call("torch._utils._rebuild_parameter", (0, 0, 0))}, "odd arguments"),
        ({"x": Call("collections.OrderedDict", ([],))}, "odd arguments"),
        ({"x": Call("torch.FloatStorage", ())}, "odd arguments"),
        ({f"x{k}": tensor((8,)) for k in range(3)}, "must share each byte among at most 2 tensors"),
        (b"\x80\x02.", "not well formed"),
        (b"\x80\x02(.", "not well formed"),
        (b"\x80\x02}}.", "not well formed"),
        (b"\x80\x02(t0.", "POP"),
        (b"\x80\x02h\x07.", "not well formed"),
        (b"\x80\x02q\x07.", "not well formed"),
        (b"\x80\x02}(K\x01u.", "not well formed"),
        (b"\x80\x02K\x01K\x02s.", "not well formed"),
        (b"\x80\x02}K\x01b", "exhausted"),
        (b"\x80\x02K\x01K\x02b.", "sets attributes"),
        (b"\x80\x02" + b"N" * 200_000 + b".", "too much memory"),
        (b"\x80\x02" + b"(" * 200_000 + b".", "too much memory"),
        (b"\x80\x02" + opcodes({"x": 1})[:-1] + opcodes("x") + b"Nu.", "'x' twice"),
        (b"\xff\xff", "instruction|opcode|unknown"),
        (b"", "exhausted"),
        (bytes(MAX_PICKLE_BYTES + 1), "must describe its tensors in at most"),
    ],
)
def test_unsound_descriptions(file: Path, description: Any, message: str) -> None:
    refused(written(file, description), message)


DATA = "model/data/0"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (change_part(PARTS, DATA, crc=1), "changed bytes in tensor 'x'"),
        (
            change_part(torch_parts({"x": tensor((7,), size=8)}, EIGHT), DATA, crc=1),
            "missing or changed bytes in its entry 'model/data/0'",
        ),
        (change_part(PARTS, "model/data.pkl", crc=1), "missing or changed bytes"),
        (change_part(PARTS, DATA, method=8), "compressed or encrypted"),
        (change_part(PARTS, DATA, flags=1), "compressed or encrypted"),
        (change_part(PARTS, DATA, size=2**31), "overlapping|outside"),
        (change_part(PARTS, DATA, start=0), "in two records that disagree"),
        (change_part(PARTS, DATA, start=2**32 - 9), "ends too early"),
        (change_part(PARTS, DATA, local_name="model/data/1"), "in two records that disagree"),
        (change_part(PARTS, DATA, name="model/data/../0"), "may lead elsewhere"),
        (change_part(PARTS, DATA, name="/model/data/0"), "may lead elsewhere"),
        (change_part(PARTS, DATA, name="model\\data\\0"), "may lead elsewhere"),
        (change_part(PARTS, "model/byteorder", content=b"big"), "little-endian"),
        (change_part(PARTS, "model/byteorder", content=bytes(99)), "little-endian"),
        ([*PARTS, PARTS[2]], "'model/data/0' twice"),
        ([*PARTS, ZipPart("other/data.pkl", b"")], "one data.pkl but holds 2"),
        (PARTS[1:], "one data.pkl but holds 0"),
        ([], "one data.pkl but holds 0"),
        (
            [ZipPart("x" * 60_000 + str(k), b"") for k in range(MAX_DIRECTORY_BYTES // 60_000 + 1)],
            "claims",
        ),
    ],
)
def test_unsound_containers(file: Path, parts: list[ZipPart], message: str) -> None:
    write_zip(file, parts)
    refused(file, message)


def test_truncated_files(file: Path) -> None:
    write_zip(file, PARTS)
    content = file.read_bytes()
    for size in (*range(0, len(content), 11), len(content) - 1):
        file.write_bytes(content[:size])
        refused(file, r"\[zip\]|\[torch\]")


def test_the_format_before_version_1_6(file: Path) -> None:
    file.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickled(MATRIX))
    refused(
        file, r"must be a zip file but is a bare pickle.*torch\.load\(\.\.\., weights_only=True"
    )


def test_files_that_change_after_their_header_was_read(file: Path) -> None:
    write_zip(file, PARTS)
    entries = read_header(file).values()
    content = file.read_bytes()
    start = content.index(EIGHT["0"])
    for changed in (content[: start + 4], content[:start] + b"\1" + content[start + 1 :]):
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"ends inside tensor|changed bytes"):
            dict(read_tensors(file, entries))
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        dict(read_tensors(file, entries))


@pytest.mark.parametrize("shards", [1, 3])
def test_whole_models(tmp_path: Path, shards: int) -> None:
    want = load_model(tiny_checkpoint(tmp_path / "a"))(TOKENS)[0]
    folder = to_torch_checkpoint(tiny_checkpoint(tmp_path / "b"), shards=shards)
    assert mx.array_equal(load_model(folder)(TOKENS)[0], want)


def test_a_tied_head_is_compared(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "a", tie_word_embeddings=True)
    want = load_model(folder)(TOKENS)[0]
    file = folder / "model.safetensors"
    tensors = dict(mx.load(str(file)))
    mx.eval(tensors)
    head = tensors["model.embeddings.weight"]
    for copy in (head, head + 1):
        mx.save_safetensors(str(file), tensors | {"lm_head.weight": copy})
        to_torch_checkpoint(folder)
        if copy is head:
            assert mx.array_equal(load_model(folder)(TOKENS)[0], want)
    with pytest.raises(CheckpointError, match="must equal 'model"):
        load_model(folder)


def test_safetensors_come_first(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "a")
    (folder / "pytorch_model.bin").write_text("not read")
    assert load_model(folder).vocab_size == 40


def test_unsound_indices(tmp_path: Path) -> None:
    folder = to_torch_checkpoint(tiny_checkpoint(tmp_path / "a"), shards=2)
    index = folder / "pytorch_model.bin.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    for name in ("../x.bin", "/x.bin", "model.safetensors", "x\\y.bin", "", 5):
        edit_json(index, weight_map=shards | {"lm_head.weight": name})
        with pytest.raises(CheckpointError, match=r"must name \.bin files of its own folder"):
            load_model(folder)
    edit_json(index, weight_map=shards | {"absent": next(iter(shards.values()))})
    with pytest.raises(CheckpointError, match="must hold tensor 'absent'"):
        load_model(folder)


def test_bits_are_kept(file: Path) -> None:
    odd = mx.array([0x7F800001, 0x80000000, 1], mx.uint32).view(mx.float32)
    write_torch(file, {"x": odd})
    assert bytes_of(arrays(file)["x"]) == bytes_of(odd)


@pytest.mark.interop
class TestTorch:
    """Files that torch itself writes."""

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_state_dictionary_of_a_module(self, file: Path, protocol: int) -> None:
        import torch

        module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)).bfloat16()
        want = module.state_dict()
        torch.save(want, file, pickle_protocol=protocol)
        got = arrays(file)
        assert list(got) == list(want)
        for name, array in got.items():
            assert array.shape == tuple(want[name].shape)
            assert (
                bytes_of(array)
                == want[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )

    def test_types_views_and_parameters(self, file: Path) -> None:
        import torch

        base = torch.arange(24)
        names = ("float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
        numbers = {name: base.to(getattr(torch, name)) for name in names}
        views = {
            "transposed": base.reshape(4, 6).T,
            "part": base.reshape(4, 6)[1:, 2:5],
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(2.5),
            "other sign": torch._neg_view(torch.arange(-3.0, 4.0)),
            "parameter": torch.nn.Parameter(torch.ones(3)),
        }
        torch.save(numbers | views, file)
        got = arrays(file)
        for name, want in (numbers | views).items():
            assert got[name].tolist() == want.tolist(), name
            assert (
                str(got[name].dtype)
                .rpartition(".")[2]
                .startswith(str(want.dtype).removeprefix("torch."))
            )

    def test_refusals(self, file: Path) -> None:
        import torch

        for value, message in (
            ({"x": torch.ones(2, dtype=torch.float64)}, "torch.DoubleStorage"),
            ({"x": torch.ones(2).to_sparse()}, "_rebuild_sparse_tensor"),
            (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
            ({"epoch": 3}, "under 'epoch' but holds a int"),
        ):
            torch.save(value, file)
            refused(file, message)
        torch.save({"x": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
        refused(file, "bare pickle")

    def test_torch_reads_the_files_of_these_tests(self, file: Path) -> None:
        import torch

        write_zip(file, PARTS, is_64=True)
        assert torch.load(file, weights_only=True)["x"].tolist() == arrays(file)["x"].tolist()
