"""Headers of safetensors files are checked before anything is read."""

import hashlib
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.files.tensors import DTYPES, UNREAD_BITS, read_header, read_tensors
from tests.hub.checkpoints import write_safetensors


def tensor(shape: Any = (2,), start: Any = 0, stop: Any = 8, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (3, 5)], ids=str)
def test_reads_what_mlx_writes(tmp_path: Path, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    file = tmp_path / "a.safetensors"
    want = (mx.random.normal(shape) * 3).astype(dtype)
    mx.save_safetensors(str(file), {"x": mx.arange(7), "y": want}, {"format": "mlx"})
    entries, metadata = read_header(file)
    assert metadata == {"format": "mlx"}
    assert entries["y"].nbytes == want.nbytes
    arrays = dict(read_tensors(file, entries.values()))
    assert arrays["y"].dtype == dtype
    assert arrays["y"].shape == shape
    assert mx.array_equal(arrays["y"], want)
    assert mx.array_equal(arrays["x"], mx.arange(7))


@pytest.mark.parametrize("dtype", UNREAD_BITS)
def test_other_types_of_the_format_are_named(tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "a.safetensors"
    size = 4 * UNREAD_BITS[dtype] // 8
    write_safetensors(file, {"x": tensor((4,), 0, size, dtype)}, bytes(size))
    with pytest.raises(
        UnsupportedModelError, match=f"holds {dtype} in tensor 'x', which is not"
    ) as e:
        read_header(file)
    assert "damaged" not in str(e.value)
    write_safetensors(file, {"x": tensor((4,), 0, size - 1, dtype)}, bytes(size))
    with pytest.raises(CheckpointError, match="damaged"):
        read_header(file)


@pytest.mark.interop
def test_every_type_of_the_format_is_known() -> None:
    from safetensors import torch

    assert set(torch._TYPES) <= DTYPES.keys() | UNREAD_BITS


def test_a_tensor_is_read_into_its_own_memory(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    mx.save_safetensors(str(file), {"x": mx.ones((1024, 1024), mx.bfloat16)})
    entries, _ = read_header(file)
    tracemalloc.start()
    try:
        [(_, array)] = read_tensors(file, entries.values())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert mx.all(array == 1).item()
    assert peak < array.nbytes / 4


def test_gaps_and_unknown_keys_are_allowed(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    header = {"b": tensor(start=12, stop=20) | {"note": 1}, "a": tensor((1,), 0, 4)}
    write_safetensors(file, header, np.arange(5, dtype="f4").tobytes())
    entries, _ = read_header(file)
    assert list(entries) == ["a", "b"]
    assert dict(read_tensors(file, entries.values()))["b"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": tensor(stop=9)}, "9 of at least|9 bytes"),
        ({"a": tensor(start=4, stop=12)}, "ends before tensor 'a'"),
        ({"a": tensor(start=8, stop=0)}, "-8 bytes where 8 are needed"),
        ({"a": tensor(), "b": tensor(start=4, stop=8, shape=[1])}, "'b' overlapping"),
        ({"a": tensor(dtype="F99")}, "'F99'"),
        ({"a": tensor(dtype=["F32"])}, r"\['F32'\]"),
        ({"a": tensor(shape=[-2])}, "impossible shape"),
        ({"a": tensor(shape=[2.0])}, "impossible shape"),
        ({"a": tensor(shape=[True, 2])}, "impossible shape"),
        ({"a": tensor(shape=[2**31])}, "impossible shape"),
        ({"a": tensor(shape=[2**30] * 8)}, "are needed"),
        ({"a": tensor(shape=[1] * 9)}, "impossible shape"),
        ({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, "impossible shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, "impossible offsets"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]}}, "impossible offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "impossible offsets None"),
        ({"a": 5}, "by an object but got 5"),
        ({"__metadata__": {"a": 1}}, "must have text in '__metadata__'"),
        (b'{"a": {}, "a": {}}', "repeats 'a'"),
        (b"[]", "must be an object"),
        (b"{", "must be JSON"),
        (b"\xff\xfe", "must be UTF-8"),
        (b"[" * 100_000, "must be nested at most 64 deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "at most 40 digits"),
        (b"", "must be JSON"),
    ],
)
def test_refuses_unsound_headers(tmp_path: Path, header: Any, message: str) -> None:
    file = tmp_path / "a.safetensors"
    write_safetensors(file, header, bytes(8))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 2**16, 2**40, 2**63, 2**64 - 1])
def test_refuses_wrong_header_lengths(tmp_path: Path, length: int) -> None:
    file = tmp_path / "a.safetensors"
    write_safetensors(file, {"a": tensor()}, bytes(8), length=length)
    with pytest.raises(CheckpointError, match=r"JSON|claims a header"):
        read_header(file)


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"1234567")
    for name, message in (("absent", "missing"), ("pipe", "is a pipe"), ("short", "at least 8")):
        with pytest.raises(CheckpointError, match=message):
            read_header(tmp_path / f"{name}.safetensors")


def test_notices_a_file_that_shrank_after_its_header_was_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    mx.save_safetensors(str(file), {"a": mx.arange(4)})
    entries, _ = read_header(file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="ends inside tensor 'a'"):
        list(read_tensors(file, entries.values()))
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        list(read_tensors(file, entries.values()))


def test_compares_checksums_where_known(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_safetensors(file, {"a": tensor()}, bytes(8))
    entry = read_header(file)[0]["a"]
    right = replace(entry, checksum=hashlib.sha256(bytes(8)).hexdigest())
    assert len(list(read_tensors(file, [right]))) == 1
    with pytest.raises(CheckpointError, match="changed bytes"):
        list(read_tensors(file, [replace(entry, checksum="0")]))
