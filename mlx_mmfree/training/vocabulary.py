"""The vocabulary that a run trains on its own texts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import TrainingError
from ..files.reading import MAX_BYTES, parse_json, read_member, write_json
from ..files.writing import new_folder
from ..tokenizer.documents import train_vocabulary
from .corpus.documents import read_documents
from .digests import text_digest
from .lines import read_lines
from .run_folder import writing

_ORIGIN = "trained_on.json"


def own_vocabulary(
    run: Path,
    files: Sequence[Path],
    vocab_size: int,
    *,
    keeps: bool,
    columns: Sequence[str] = (),
    mask_token: str | None = None,
) -> Path:
    """The folder of the run's own tokenizer, which is trained unless it is there already.

    A tokenizer that was trained on other texts or with another size is replaced, unless it is kept.

    Args:
        run: Folder of the run.
        files: The files to train on.
        vocab_size: Number of tokens.
        keeps: Whether to keep the tokenizer in any case, since a checkpoint of the run belongs to it.
        columns: The columns that hold texts, of JSON lines or tables; none of files that are texts.
        mask_token: As for `train_vocabulary`.

    Raises:
        TrainingError: A text cannot be read, or the folder cannot be written.
    """
    folder = run / "tokenizer"
    if keeps and folder.exists():
        return folder

    def documents() -> Iterator[str]:
        for path in files:
            yield from _texts_of_columns(path, columns) if columns else read_documents(path)

    origin: dict[str, Any] = {
        "vocab_size": vocab_size,
        "texts": [text_digest(path) for path in files],
    }
    # what was trained before there was a choice has no such keys
    if columns:
        origin["columns"] = list(columns)
    if mask_token is not None:
        origin["mask_token"] = mask_token
    if _origin(folder) != origin:
        with writing(run), new_folder(folder, replaces=True) as new:
            train_vocabulary(documents(), vocab_size, new, mask_token=mask_token)
            write_json(new / _ORIGIN, origin)
    return folder


def check_vocab_size(count: int, vocab_size: int) -> None:
    """Refuses a model with fewer rows than its tokenizer has tokens.

    Raises:
        TrainingError: There are fewer.
    """
    if count > vocab_size:
        raise TrainingError(
            f"[train] 'vocab_size' must cover the tokenizer's {count} tokens but got {vocab_size}. Set "
            "it to at least that number."
        )


def _texts_of_columns(path: Path, columns: Sequence[str]) -> Iterator[str]:
    for line in read_lines(path, lambda line: line, columns):
        yield from (line[name] for name in columns if isinstance(line.get(name), str))


def _origin(folder: Path) -> Any:
    """What a tokenizer was trained on, or `None` if that is unknown."""
    try:
        return parse_json(read_member(folder / _ORIGIN, MAX_BYTES))
    except (OSError, ValueError):
        return None
