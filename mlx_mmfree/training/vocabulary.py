"""The vocabulary that a run trains on its own texts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..files.json_file import write_json
from ..files.json_reader import MAX_BYTES, parse_json
from ..files.opening import read_member
from ..files.replacing import new_folder
from ..tokenizer.train_vocabulary import train_vocabulary
from .corpus.documents import read_documents
from .digests import file_digest
from .run_folder import writing

_ORIGIN = "trained_on.json"


def own_vocabulary(run: Path, texts: Sequence[Path], vocab_size: int, *, keeps: bool) -> Path:
    """The folder of the run's own tokenizer, which is trained unless it is there already.

    A tokenizer that was trained on other texts or with another size is replaced, unless it is kept.

    Args:
        run: Folder of the run.
        texts: The text files to train on.
        vocab_size: Number of tokens.
        keeps: Whether to keep the tokenizer in any case, since a checkpoint of the run belongs to it.

    Raises:
        TrainingError: A text cannot be read, or the folder cannot be written.
    """
    folder = run / "tokenizer"
    if keeps and folder.exists():
        return folder

    def documents() -> Iterator[str]:
        for path in texts:
            yield from read_documents(path)

    with writing(run):
        origin = {"vocab_size": vocab_size, "texts": [file_digest(path) for path in texts]}
        if _origin(folder) != origin:
            with new_folder(folder, replaces=True) as new:
                train_vocabulary(documents(), vocab_size, new)
                write_json(new / _ORIGIN, origin)
    return folder


def _origin(folder: Path) -> Any:
    """What a tokenizer was trained on, or `None` if that is unknown."""
    try:
        return parse_json(read_member(folder / _ORIGIN, MAX_BYTES))
    except (OSError, ValueError):
        return None
