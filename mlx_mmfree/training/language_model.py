"""Trains a language model from text files: vocabulary, data, model, loop and the finished model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import TrainingError
from ..evaluation import measure_perplexity
from ..hub import load_tokenizer, save_model
from ..hub.vocabulary import train_vocabulary
from ..layers import pack_linears
from ..models import Decoder, find
from .batches import Batch
from .callbacks import BestWeights
from .checkpoint import load_trainable
from .corpus import END_OF_TEXT, Mixture, TokenStream, read_documents, tokenize
from .data_parallel import DataParallel
from .gradient_checkpoint import checkpoint_blocks
from .loop import Trainer
from .optimizer import build_optimizer, build_schedule
from .settings import Settings


def train_language_model(
    settings: Settings, processes: DataParallel | None = None
) -> dict[str, Any]:
    """Runs or resumes a training run and writes the packed model of its best weights.

    Writes into `settings.output`: `tokenizer/`, `log.jsonl`, `curve.png`, `checkpoint/`,
    `best.safetensors` and, at the end, `model/`.

    Args:
        settings: The run.
        processes: Those that train together, each on its share of the rows of a batch; `None`: all
            that `mlx.launch` started, or this one.

    Returns:
        The run's progress record and, in the first process, the packed model's held-out figures.

    Raises:
        TrainingError: A file or setting is wrong, or the loss is not finite.
    """
    output = settings.path(settings.output)
    output.mkdir(parents=True, exist_ok=True)
    processes = DataParallel() if processes is None else processes
    rank, ranks = processes.share(settings.batch_size)
    tokenizer_folder = processes.after_first(lambda: _tokenizer_folder(settings, output))
    streams = _streams(settings, tokenizer_folder)
    mixture = Mixture(
        {name: streams[name] for stage in settings.stages for name in stage.weights},
        settings.stages,
        settings.seed,
    )

    def batches(step: int) -> list[Batch]:
        size = settings.batch_size * settings.accumulation_steps
        rows = mixture.batch(step, settings.steps, size, settings.sequence_length)
        parts = np.split(rows, settings.accumulation_steps)
        return [Batch.of_rows(part[rank::ranks]) for part in parts]

    def validation(model: Decoder) -> dict[str, float]:
        return {"valid_loss": _loss_on_head(model, settings, streams[settings.valid[0]])}

    model = _build(settings)
    if settings.grad_checkpoint:
        checkpoint_blocks(model)
    best_file = output / "best.safetensors"
    progress = Trainer(
        model,
        settings.loop(),
        build_optimizer(settings),
        build_schedule(settings),
        batches,
        validation,
        processes=processes,
        callbacks=[BestWeights(model, best_file)],
    ).train()
    if not processes.is_first:
        return progress
    best = _build(settings)
    load_trainable(best, best_file)
    pack_linears(best)
    save_model(output / "model", best, tokenizer_folder, overwrite=True)
    return progress | {"held_out": _held_out(best, settings, streams)}


def _build(settings: Settings) -> Decoder:
    architecture = find(settings.model.get("model_type"))
    mx.random.seed(settings.seed)
    model: Decoder = architecture.build(architecture.Config.from_hub(settings.model))
    return model


def _tokenizer_folder(settings: Settings, output: Path) -> Path:
    if settings.tokenizer is not None:
        return settings.path(settings.tokenizer)
    folder = output / "tokenizer"
    if not (folder / "tokenizer_config.json").exists():

        def documents() -> Iterator[str]:
            for name in settings.stages[0].weights:
                yield from read_documents(settings.path(name))

        train_vocabulary(documents(), settings.model["vocab_size"], folder)
    return folder


def _streams(settings: Settings, tokenizer_folder: Path) -> dict[str, TokenStream]:
    tokenizer = load_tokenizer(tokenizer_folder)
    if tokenizer.vocab_size > settings.model["vocab_size"]:
        raise TrainingError(
            f"[train] 'vocab_size' must cover the tokenizer's {tokenizer.vocab_size} tokens but got "
            f"{settings.model['vocab_size']}."
        )
    [end_of_text] = tokenizer.encode(END_OF_TEXT, add_special_tokens=False, parse_special=True)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    names = {name for stage in settings.stages for name in stage.weights} | set(settings.valid)
    streams = {name: tokenize(settings.path(name), encode, end_of_text) for name in sorted(names)}
    for name, stream in streams.items():
        if len(stream.tokens) <= settings.sequence_length:
            raise TrainingError(
                f"[train] '{name}' must have more than 'sequence_length' tokens "
                f"({settings.sequence_length}) but got {len(stream.tokens)}."
            )
    return streams


def _loss_on_head(model: Decoder, settings: Settings, stream: TokenStream) -> float:
    """Nats a token on the first `valid_tokens` tokens, cheap enough to repeat."""
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
