"""A checkpoint is followed through `load`: its path goes through each stage in `hub` once.

The rule counts entries. `hub` is entered when one of its functions, or the constructor of one of its
classes, is called from another file of the package. Each of them is one stage, which may be entered
once during a load, since a later stage receives what the stage before made. Four kinds of calls do not
count:

- a method of an object, which was passed on by the stage that made it;
- a reader of single tensors: what lies in `formats`, which says how a stored format lays out a tensor,
  and any function that is given an array or the entry of a tensor;
- the table of weight formats, which is no stage of a load;
- what `hub` calls in the packages below it, which serve many callers.

The load that fills the cache of packed formats also writes a checkpoint, so the test follows the load
that reads the cache. GGUF is left out: its tensors are renamed one by one while its header is read.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mlx.core as mx
import pytest

import mlx_mmfree
from mlx_mmfree.files.tensors import TensorEntry
from mlx_mmfree.hub import convert, load, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint.weight_format import weight_formats
from mlx_mmfree.layers import pack_linears
from tests.files.torch_files import to_torch_checkpoint
from tests.hub.checkpoints import GOLDENS, tiny_model, tiny_transformer, write_bitnet_checkpoint

PACKAGE = Path(mlx_mmfree.__file__).parent
HUB = PACKAGE / "hub"
FORMATS = HUB / "checkpoint" / "formats"
TOKENIZER = GOLDENS / "tokenizer_bpe"
SIZES = {"vocab_size": 518}


def is_in(code: CodeType, folder: Path) -> bool:
    return Path(code.co_filename).is_relative_to(folder)


def is_entry(frame: FrameType) -> bool:
    """Returns whether a call enters a file of `hub`, by the rule at the head of this file."""
    code = frame.f_code
    if not is_in(code, HUB) or is_in(code, FORMATS) or code.co_name == weight_formats.__name__:
        return False
    caller = frame.f_back
    while caller is not None and not is_in(caller.f_code, PACKAGE):
        caller = caller.f_back
    if caller is not None and caller.f_code.co_filename == code.co_filename:
        return False
    if "." in code.co_qualname and code.co_name != "__init__":
        return False
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = [frame.f_locals[name] for name in arguments]
    return not any(isinstance(value, mx.array | TensorEntry) for value in values)


def entries(call: Callable[[], Any]) -> Counter[str]:
    """How often a call enters each stage in `hub`, by its file and name."""
    counted: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and is_entry(frame):
            file = Path(frame.f_code.co_filename).relative_to(HUB)
            counted[f"{file}: {frame.f_code.co_qualname}"] += 1

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counted


def check_once(call: Callable[[], Any]) -> None:
    """Asserts that a load enters each stage once."""
    counted = entries(call)
    assert len(counted) >= 5
    assert {stage: count for stage, count in counted.items() if count > 1} == {}


def masters(folder: Path) -> Path:
    save_model(folder, tiny_model(**SIZES), TOKENIZER)
    return folder


def packed(folder: Path) -> Path:
    save_model(folder, pack_linears(tiny_model(**SIZES)), TOKENIZER)
    return folder


def tied(folder: Path) -> Path:
    save_model(folder, tiny_model(**SIZES, tie_word_embeddings=True), TOKENIZER)
    return folder


def dense(folder: Path) -> Path:
    save_model(folder, tiny_model(**SIZES, linear_class="dense"), TOKENIZER)
    return folder


def bytes_of_bitnet(folder: Path) -> Path:
    save_model(folder / "source", tiny_transformer(**SIZES), TOKENIZER)
    write_bitnet_checkpoint(folder / "bytes", tiny_transformer(**SIZES), "autobitlinear")
    for file in (folder / "source").glob("*token*"):
        file.rename(folder / "bytes" / file.name)
    return folder / "bytes"


def codes_of_mlx(folder: Path) -> Path:
    convert(open_checkpoint(masters(folder / "source")), folder / "mlx", to="mlx", check=False)
    return folder / "mlx"


def torch_shards(folder: Path) -> Path:
    to_torch_checkpoint(masters(folder), shards=2)
    return folder


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "format",
    [masters, packed, tied, dense, bytes_of_bitnet, codes_of_mlx],
    ids=lambda format: format.__name__,
)
def test_each_stage_is_entered_once(tmp_path: Path, format: Callable[[Path], Path]) -> None:
    folder = format(tmp_path / "model")
    check_once(lambda: load(folder))


def test_weights_that_are_asked_for_second(tmp_path: Path) -> None:
    folder = torch_shards(tmp_path / "model")
    check_once(lambda: load(folder))


@pytest.mark.parametrize("format", [masters, packed], ids=lambda format: format.__name__)
def test_for_training(tmp_path: Path, format: Callable[[Path], Path]) -> None:
    folder = format(tmp_path / "model")
    check_once(lambda: load(folder, packed=False, rebuild_masters=format is packed))


def test_packed_format_in_the_cache(tmp_path: Path, cache: Path) -> None:
    folder = masters(tmp_path / "model")
    load(folder)
    assert list(cache.iterdir())
    check_once(lambda: load(folder))


def test_a_second_entry_is_seen(tmp_path: Path) -> None:
    """The rule can fail: a checkpoint that is opened twice enters its stage twice."""
    folder = masters(tmp_path / "model")
    counted = entries(lambda: load(open_checkpoint(folder)))
    assert counted["checkpoint/checkpoint.py: open_checkpoint"] == 1
    counted = entries(lambda: (open_checkpoint(folder), load(folder)))
    assert counted["checkpoint/checkpoint.py: open_checkpoint"] == 2
