"""The vocabulary of a run: one that exists, or one trained on the run's own texts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import TrainingError
from ...files.reading import MAX_BYTES, parse_json, read_file, write_json
from ...files.writing import new_folder
from ...tokenizer.documents import train_vocabulary
from ..corpus import tokenize
from ..run_folder import text_digest, writing
from ..settings import Settings
from .documents import TEXT_COLUMN, read_documents
from .rows import read_rows
from .tokenize import TOKENIZER_FOLDER

_ORIGIN = "trained_on.json"


def own_vocabulary(
    run: Path,
    files: Sequence[Path],
    vocab_size: int,
    *,
    keeps: bool,
    columns: Sequence[str] = (),
    mask_token: str | None = None,
    text_column: str = TEXT_COLUMN,
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
        text_column: The column of the texts of parquet and JSON lines otherwise.

    Raises:
        TrainingError: A text cannot be read, or the folder cannot be written.
    """
    folder = run / "tokenizer"
    if keeps and folder.exists():
        return folder

    def documents() -> Iterator[str]:
        for path in files:
            yield from (
                _texts_of_columns(path, columns) if columns else read_documents(path, text_column)
            )

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
    for line in read_rows(path, lambda line: line, columns):
        yield from (line[name] for name in columns if isinstance(line.get(name), str))


def _origin(folder: Path) -> Any:
    """The text that a tokenizer was trained on, or `None` if that is unknown."""
    try:
        return parse_json(read_file(folder / _ORIGIN, MAX_BYTES, is_member=True))
    except (OSError, ValueError):
        return None


def tokenizer_folder(
    settings: Settings,
    vocab_size: int,
    *,
    is_resumed: bool,
    columns: Sequence[str] = (),
    mask_token: str | None = None,
) -> Path:
    """The folder of the tokenizer of a run without a model to begin with.

    Args:
        settings: The run.
        vocab_size: Size of a vocabulary that is trained.
        is_resumed: Whether a checkpoint of the run belongs to the vocabulary that is there.
        columns, mask_token: As for `own_vocabulary`.

    Raises:
        TrainingError: There is no tokenizer beside the token files, or a text cannot be read.
    """
    if settings.tokenizer is not None:
        return settings.path(settings.tokenizer)
    files = [settings.corpus(name) for name in settings.stages[0].weights]
    paths = [path for each in files for path in each]
    made = next((path for path in paths if path.suffix == tokenize.SUFFIX), None)
    if made is None:
        run = settings.path(settings.output)
        return own_vocabulary(
            run,
            paths,
            vocab_size,
            keeps=is_resumed,
            columns=columns,
            mask_token=mask_token,
            text_column=settings.text_column,
        )
    folder = made.with_name(TOKENIZER_FOLDER)
    if not folder.is_dir():
        raise TrainingError(
            f"[train] 'tokenizer' must name the folder of the tokenizer that made '{made}', since "
            f"there is no '{folder}', but is not given."
        )
    return folder
