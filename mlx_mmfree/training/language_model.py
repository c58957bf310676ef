"""Trains a language model from texts or token files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation import measure_perplexity
from ..models import Decoder
from .batches import Batch
from .callbacks import Callback
from .checkpoint import check_record, read_progress
from .corpus.epoch_mixture import EpochMixture
from .corpus.mixture import EPOCHS, RandomMixture
from .corpus.token_file import TokenFile
from .data_parallel import DataParallel
from .digests import weights_digest
from .first_model import FirstModel
from .gradient_checkpoint import checkpoint_blocks
from .loop import Trainer, Validation
from .loss import next_token_loss
from .memory import MemoryPlan, plan_memory
from .optimizer import build_optimizer, build_schedule
from .results import TrainedModel
from .run_folder import make_run_folder
from .run_tokens import open_tokens, tokenizer_folder
from .settings import Settings


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
    tokenizer = first.tokenizer_folder or processes.after_first(
        lambda: tokenizer_folder(settings, model.vocab_size, is_resumed=progress is not None)
    )
    # the first process makes the token files that the others read
    files = processes.after_first(lambda: open_tokens(settings, tokenizer, model.vocab_size))
    record = {
        # random weights follow from the settings
        "weights": None if settings.init_from is None else weights_digest(model),
        "texts": {name: file.header.checksum for name, file in files.items()},
    }
    if settings.grad_checkpoint:
        checkpoint_blocks(model)
    result = TrainedModel(output, model, tokenizer, has_validation=bool(settings.valid))
    progress = Trainer(
        model,
        settings.loop(record),
        build_optimizer(settings),
        build_schedule(settings),
        _batches(settings, files, share),
        _validation(settings, files),
        processes=processes,
        callbacks=[result, *callbacks],
    ).train()
    if not processes.is_first:
        return progress
    result.finish()
    model.eval()
    return progress | {"held_out": _held_out(model, settings, files)}


def plan_language_model(settings: Settings, model: Decoder, processes: DataParallel) -> MemoryPlan:
    """Plans the memory of each process of a run. Nothing is computed or written.

    Args:
        settings: The run.
        model: The model that it begins with, whose weights may be uncomputed still.
        processes: The processes that train together.
    """
    if settings.grad_checkpoint:
        checkpoint_blocks(model)
    rows = settings.batch_size // processes.size
    return plan_memory(
        model,
        build_optimizer(settings),
        next_token_loss,
        Batch.of_rows(np.zeros((rows, settings.sequence_length + 1), np.int32)),
        settings.loop({}),
        processes=processes,
        parts=settings.accumulation_steps,
    )


def _batches(
    settings: Settings, files: Mapping[str, TokenFile], share: tuple[int, int]
) -> Callable[[int], list[Batch]]:
    """Maps a step to this process' share of its rows, in one batch for each forward pass."""
    names = {name for stage in settings.stages for name in stage.weights}
    mixture = (EpochMixture if settings.order == EPOCHS else RandomMixture)(
        {name: files[name].tokens for name in names},
        settings.stages,
        settings.seed,
        steps=settings.steps,
        rows=settings.batch_size * settings.accumulation_steps,
        length=settings.sequence_length,
    )
    rank, ranks = share

    def batches(step: int) -> list[Batch]:
        parts = np.split(mixture.rows(step), settings.accumulation_steps)
        return [Batch.of_rows(part[rank::ranks]) for part in parts]

    return batches


def _validation(settings: Settings, files: Mapping[str, TokenFile]) -> Validation | None:
    if not settings.valid:
        return None
    file = files[settings.valid[0]]
    return lambda model: {"valid_loss": _loss_on_head(model, settings, file)}


def _loss_on_head(model: Decoder, settings: Settings, file: TokenFile) -> float:
    """The loss on the first `valid_tokens` tokens, in nats a token. It is cheap enough to repeat."""
    tokens = file.tokens[: settings.valid_tokens + 1]
    length = settings.sequence_length
    return measure_perplexity(model, tokens, file.header.size_bytes, length=length).loss


def _held_out(
    model: Decoder, settings: Settings, files: Mapping[str, TokenFile]
) -> dict[str, float]:
    """Perplexity and bits per byte of the whole held-out files."""
    figures: dict[str, float] = {}
    for name in settings.valid:
        file = files[name]
        measured = measure_perplexity(
            model, file.tokens, file.header.size_bytes, length=settings.sequence_length
        )
        label = Path(name).name.split(".")[0]
        figures[f"{label}/perplexity"] = measured.perplexity
        figures[f"{label}/bits_per_byte"] = measured.bits_per_byte
    return figures
