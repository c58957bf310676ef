"""A tiny model with a tokenizer, loaded once in each process."""

from functools import cache
from pathlib import Path

from mlx_mmfree.hub import Tokenizer, load, save_model
from mlx_mmfree.models import Decoder
from tests.hub.checkpoints import GOLDENS, tiny_model, tiny_transformer

_LINK = "base"


def make_base(folder: Path, *, has_attention: bool) -> None:
    """Writes a model with float masters."""
    sizes = {"vocab_size": 518, "hidden_size": 16, "intermediate_size": 24}
    model = tiny_transformer(**sizes) if has_attention else tiny_model(**sizes)
    save_model(folder, model, GOLDENS / "tokenizer_bpe")


def link_base(case: Path, base: Path) -> None:
    """Notes in a case which model belongs to it."""
    (case / _LINK).symlink_to(base)


def base_of(case: Path) -> tuple[Decoder, Tokenizer]:
    """The model of a case."""
    return _load((case / _LINK).resolve())


_load = cache(load)
