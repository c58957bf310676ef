"""A tiny model with a tokenizer, loaded once in each process."""

from functools import cache
from pathlib import Path

from mlx_mmfree.hub import Tokenizer, load, save_model
from mlx_mmfree.models import Decoder
from tests.hub.checkpoints import GOLDENS, tiny_model, tiny_of, tiny_transformer

BASES = ("llama", "hgrn", "gated_deltanet", "rwkv7", "mamba2")
"""A model of each kind of state."""

_LINK = "base"


def make_base(folder: Path, base: str) -> None:
    """Writes a model of `BASES`, with float masters."""
    sizes = {"vocab_size": 518, "hidden_size": 16, "intermediate_size": 24}
    if base == "llama":
        model = tiny_transformer(**sizes)
    elif base == "hgrn":
        model = tiny_model(**sizes)
    else:
        model = tiny_of(base, vocab_size=518)
    save_model(folder, model, GOLDENS / "tokenizer_bpe")


def link_base(case: Path, base: Path) -> None:
    """Notes in a case which model belongs to it."""
    (case / _LINK).symlink_to(base)


def base_of(case: Path) -> tuple[Decoder, Tokenizer]:
    """The model of a case."""
    return _load((case / _LINK).resolve())


_load = cache(load)
