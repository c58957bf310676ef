"""The tokens of a run: its vocabulary, and the token files that are made of its texts."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import TrainingError
from ..files.reading import MAX_BYTES, parse_json, read_file, write_json
from ..files.writing import new_file, new_folder
from ..hub.checkpoint.load import load_text_tokenizer
from ..hub.remote.download import names_split
from ..tokenizer.documents import tokenizer_digest, train_vocabulary
from ..tokenizer.tokenizer import Tokenizer
from .corpus import token_file
from .corpus.documents import FORMATS, TEXT_COLUMN, file_format, read_documents
from .corpus.token_file import Header, TokenFile
from .corpus.tokenize import TOKENIZER_FOLDER, write_token_file
from .run_folder import text_digest, writing
from .samples import read_lines
from .settings import Settings

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
    for line in read_lines(path, lambda line: line, columns):
        yield from (line[name] for name in columns if isinstance(line.get(name), str))


def _origin(folder: Path) -> Any:
    """What a tokenizer was trained on, or `None` if that is unknown."""
    try:
        return parse_json(read_file(folder / _ORIGIN, MAX_BYTES, is_member=True))
    except (OSError, ValueError):
        return None


_FOLDER = "tokens"
_AT_A_TIME = 2**22


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
    made = next((path for path in paths if path.suffix == token_file.SUFFIX), None)
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


def open_tokens(settings: Settings, folder: Path, vocab_size: int) -> dict[str, TokenFile]:
    """Opens the token files of a run by the names in its settings. Texts are tokenised first.

    The token files of texts lie in the run's folder, so that a later start finds them there.

    Args:
        settings: The run.
        folder: Folder of its tokenizer.
        vocab_size: Size of the model's vocabulary.

    Raises:
        TrainingError: A file cannot be read, does not belong to the tokenizer, or is too short.
    """
    tokenizer = load_text_tokenizer(folder)
    if settings.init_from is None:
        check_vocab_size(tokenizer.vocab_size, vocab_size)
    digest = tokenizer_digest(tokenizer)
    found = {}
    for name in settings.files:
        paths = settings.corpus(name)
        if paths[0].suffix == token_file.SUFFIX:
            file = token_file.open_token_file(paths[0])
        else:
            file = _of_texts(paths, settings, tokenizer, digest)
        _check_length(file.header, name, settings)
        _check(file, name, folder, digest)
        _check_ids(file, name, vocab_size)
        found[name] = file
    return found


def check_corpus(settings: Settings) -> None:
    """Refuses files of a run that are neither texts nor token files that are long enough.

    Of a token file the header is read alone.

    Raises:
        TrainingError: There is such a file.
    """
    for name in settings.files:
        path = settings.path(name)
        if not path.exists() and names_split(name):
            continue
        if path.suffix == token_file.SUFFIX:
            _check_length(token_file.read_token_header(path), name, settings)
        elif file_format(path.name) != FORMATS[0]:
            raise TrainingError(
                f"[train] '{path}' must be a text file or a token file. Make one of it: mmfree tokenize "
                f"--data '{path}' --output DIR"
            )


def _check_ids(file: TokenFile, name: str, vocab_size: int) -> None:
    """Refuses a file with a token that the model has no row for; a larger tokenizer may have some."""
    if file.header.vocab_size <= vocab_size:
        return
    for start in range(0, len(file.tokens), _AT_A_TIME):
        largest = int(file.tokens[start : start + _AT_A_TIME].max())
        if largest >= vocab_size:
            raise TrainingError(
                f"[train] '{name}' must hold tokens below {vocab_size}, the rows of the model's "
                f"embedding, but holds {largest}. Leave out what the tokenizer adds to the model's own "
                "tokens."
            )


def _of_texts(
    paths: Sequence[Path], settings: Settings, tokenizer: Tokenizer, digest: str
) -> TokenFile:
    run, column = settings.path(settings.output), settings.text_column
    parts = [text_digest(path) for path in paths]
    # a text has no columns
    parts += [] if file_format(paths[0].name) == FORMATS[0] else [column]
    origin = hashlib.sha256(" ".join([*parts, digest]).encode()).hexdigest()
    target = run / _FOLDER / f"{origin}{token_file.SUFFIX}"
    try:
        return token_file.open_token_file(target)
    except TrainingError:
        # it is missing, or was damaged since it was made
        size_bytes = sum(path.stat().st_size for path in paths)
        bar = token_file.byte_bar(size_bytes, f"tokenizing {paths[0].name}")
    with writing(run), new_file(target) as new, bar:
        documents = chain.from_iterable(read_documents(path, column, bar.update) for path in paths)
        write_token_file(documents, new, tokenizer, source=f"'{paths[0]}'")
    return token_file.open_token_file(target)


def _check(file: TokenFile, name: str, folder: Path, digest: str) -> None:
    if file.header.tokenizer != digest:
        raise TrainingError(
            f"[train] '{name}' must hold the ids of the run's tokenizer but was made with another one "
            f"than that in '{folder}'. Give its own as 'tokenizer', or write it again with `mmfree "
            "tokenize --model`."
        )


def _check_length(header: Header, name: str, settings: Settings) -> None:
    if header.tokens <= settings.sequence_length:
        raise TrainingError(
            f"[train] '{name}' must have more tokens than 'sequence_length', "
            f"{settings.sequence_length}, but has {header.tokens}. Lower 'sequence_length' or give a "
            "longer text."
        )
