"""Trains a language model from text files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TrainingError
from ..evaluation import measure_perplexity
from ..hub import load_tokenizer
from ..models import Decoder
from .batches import Batch
from .callbacks import Callback
from .checkpoint import check_record, read_progress
from .corpus import END_OF_TEXT, Mixture, TokenStream, tokenize
from .data_parallel import DataParallel
from .digests import stream_digest, weights_digest
from .first_model import FirstModel
from .gradient_checkpoint import checkpoint_blocks
from .loop import Trainer, Validation
from .optimizer import build_optimizer, build_schedule
from .results import TrainedModel
from .run_folder import make_run_folder
from .settings import Settings
from .vocabulary import own_vocabulary


def train_language_model(
    settings: Settings,
    processes: DataParallel | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    first: FirstModel | None = None,
) -> dict[str, Any]:
    """Begins or resumes a training run, and writes models with its best weights at the end.

    The folder `settings.output` gets `tokenizer/`, `log.jsonl`, `curve.png`, `checkpoint/` and
    `best.safetensors`. At the end it gets `model/` and, for a ternary model, `masters/`, which holds
    float weights for further training. A finished run goes on if it is given more `steps`. Its further
    steps then follow the learning rate of the longer run.

    Args:
        settings: The run.
        processes: The processes that train together, each on its share of the rows of a batch; `None`
            takes all that `mlx.launch` started, or this one alone.
        callbacks: As for `Trainer`.
        first: The model to begin with, if it has been built already.

    Returns:
        The progress of the run and, in the first process, the figures of the packed model on the
        held-out files, under `held_out`.

    Raises:
        TrainingError: A file or setting is wrong, the folder cannot be written, or the loss is not
            finite.
        TrainingStopped: A signal ended the run early. Its state is saved.
    """
    output = settings.path(settings.output)
    make_run_folder(output)
    if processes is None:
        processes = DataParallel(timeout_s=settings.process_timeout_s)
    share = processes.share(settings.batch_size)
    progress = read_progress(output)
    if progress is not None:
        # checked before anything is written for other settings
        check_record(output, progress, progress["settings"] | settings.record())
    first = first or FirstModel(settings)
    model = first.load()
    tokenizer_folder = first.tokenizer_folder or processes.after_first(
        lambda: _tokenizer_folder(settings, output, model.vocab_size, progress is not None)
    )
    streams = _streams(settings, tokenizer_folder, model.vocab_size)
    record = {
        # random weights follow from the settings
        "weights": None if settings.init_from is None else weights_digest(model),
        "texts": {name: stream_digest(stream) for name, stream in streams.items()},
    }
    if settings.grad_checkpoint:
        checkpoint_blocks(model)
    result = TrainedModel(output, model, tokenizer_folder, has_validation=bool(settings.valid))
    progress = Trainer(
        model,
        settings.loop(record),
        build_optimizer(settings),
        build_schedule(settings),
        _batches(settings, streams, share),
        _validation(settings, streams),
        processes=processes,
        callbacks=[result, *callbacks],
    ).train()
    if not processes.is_first:
        return progress
    result.finish()
    model.eval()
    return progress | {"held_out": _held_out(model, settings, streams)}


def _tokenizer_folder(settings: Settings, output: Path, vocab_size: int, is_resumed: bool) -> Path:
    if settings.tokenizer is not None:
        return settings.path(settings.tokenizer)
    texts = [settings.path(name) for name in settings.stages[0].weights]
    return own_vocabulary(output, texts, vocab_size, keeps=is_resumed)


def _batches(
    settings: Settings, streams: Mapping[str, TokenStream], share: tuple[int, int]
) -> Callable[[int], list[Batch]]:
    """Maps a step to this process' share of its rows, in one batch for each forward pass."""
    names = {name for stage in settings.stages for name in stage.weights}
    mixture = Mixture({name: streams[name] for name in names}, settings.stages, settings.seed)
    rank, ranks = share

    def batches(step: int) -> list[Batch]:
        size = settings.batch_size * settings.accumulation_steps
        rows = mixture.batch(step, settings.steps, size, settings.sequence_length)
        parts = np.split(rows, settings.accumulation_steps)
        return [Batch.of_rows(part[rank::ranks]) for part in parts]

    return batches


def _validation(settings: Settings, streams: Mapping[str, TokenStream]) -> Validation | None:
    if not settings.valid:
        return None
    stream = streams[settings.valid[0]]
    return lambda model: {"valid_loss": _loss_on_head(model, settings, stream)}


def _streams(settings: Settings, tokenizer_folder: Path, vocab_size: int) -> dict[str, TokenStream]:
    tokenizer = load_tokenizer(tokenizer_folder)
    if tokenizer.vocab_size > vocab_size:
        raise TrainingError(
            f"[train] 'vocab_size' must cover the tokenizer's {tokenizer.vocab_size} tokens but got "
            f"{vocab_size}. Set it to at least that number."
        )
    ends = tokenizer.encode(END_OF_TEXT, add_special_tokens=False, parse_special=True)
    if len(ends) != 1:
        raise TrainingError(
            f"[train] the tokenizer in '{tokenizer_folder}' must have the token {END_OF_TEXT}, which "
            f"ends a document, but splits it into {len(ends)}. Use a tokenizer or a model that has it."
        )

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    names = {name for stage in settings.stages for name in stage.weights} | set(settings.valid)
    streams = {name: tokenize(settings.path(name), encode, ends[0]) for name in sorted(names)}
    for name, stream in streams.items():
        if len(stream.tokens) <= settings.sequence_length:
            raise TrainingError(
                f"[train] '{name}' must have more tokens than 'sequence_length', "
                f"{settings.sequence_length}, but has {len(stream.tokens)}. Lower 'sequence_length' or "
                "give a longer text."
            )
    return streams


def _loss_on_head(model: Decoder, settings: Settings, stream: TokenStream) -> float:
    """The loss on the first `valid_tokens` tokens, in nats a token. It is cheap enough to repeat."""
    tokens = stream.tokens[: settings.valid_tokens + 1]
    length = settings.sequence_length
    return measure_perplexity(model, tokens, stream.size_bytes, length=length).loss


def _held_out(
    model: Decoder, settings: Settings, streams: dict[str, TokenStream]
) -> dict[str, float]:
    """Perplexity and bits per byte of the whole held-out files."""
    figures: dict[str, float] = {}
    for name in settings.valid:
        measured = measure_perplexity(
            model, streams[name].tokens, streams[name].size_bytes, length=settings.sequence_length
        )
        label = Path(name).name.split(".")[0]
        figures[f"{label}/perplexity"] = measured.perplexity
        figures[f"{label}/bits_per_byte"] = measured.bits_per_byte
    return figures
