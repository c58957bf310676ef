"""Finds golden cases: folders with a checkpoint, a tokenizer or single operations, and references."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.hub import load_model, needed_bytes, open_checkpoint
from mlx_mmfree.hub.checkpoint.weight_format import PACKED_DTYPES
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.models import Decoder

DEFAULT_FOLDER = Path(__file__).parents[1] / "data" / "goldens"
GOLDEN_FILE = "golden.safetensors"


@dataclass(frozen=True)
class Case:
    """One checkpoint with reference inputs and outputs.

    Attributes:
        folder: Where it lies.
        reason: Why it cannot run yet; `None` if it can.
        formats: The formats that it can be loaded in, as values of `packed`.
    """

    folder: Path
    reason: str | None
    formats: tuple[bool, ...]

    def __str__(self) -> str:
        return self.folder.name


def find_cases(folder: Path) -> list[Case]:
    """Every folder but the folders of tokenizers, mixers, single operations and blocks of GGUF."""
    return [
        Case(entry, _reason(entry), _formats(entry))
        for entry in sorted(folder.iterdir())
        if entry.is_dir()
        and not entry.name.startswith(("gguf_blocks", "mixers", "ops", "tokenizer_"))
    ]


def is_embedding(folder: Path) -> bool:
    """Returns whether the case is of a model that embeds texts, without logits."""
    return (folder / GOLDEN_FILE).exists() and "last_hidden_state" in golden(folder)


def find_tokenizers(folder: Path) -> list[Path]:
    return sorted(entry.parent for entry in folder.glob("tokenizer_*/tokenizer_golden.json"))


@cache
def golden(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / GOLDEN_FILE))


@cache
def model_of(folder: Path, packed: bool, dtype: mx.Dtype | None) -> Decoder:
    return load_model(folder, packed=packed, dtype=dtype)


@cache
def _reason(folder: Path) -> str | None:
    if not (folder / GOLDEN_FILE).exists():
        return f"no {GOLDEN_FILE}: not a case of this suite"
    try:
        needed_bytes(open_checkpoint(folder))
    except UnsupportedModelError as error:
        return str(error)
    except CheckpointError:
        # its tests fail with the words, and the others run
        return None
    return None


@cache
def _formats(folder: Path) -> tuple[bool, ...]:
    """Checkpoints with packed weights alone have no float format, and dense ones no packed format."""
    if _reason(folder) is not None:
        return (True,)
    try:
        if any(each.dtype in PACKED_DTYPES for each in open_checkpoint(folder).tensors.values()):
            return (True,)
        found = matrices(model_of(folder, True, None)).values()
        return (True, False) if any(matrix.is_packed for matrix in found) else (False,)
    except CheckpointError:
        return (True,)
