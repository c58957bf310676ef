"""Fine-tunes a model on samples: the adapters, or the weights themselves."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from ..errors import TrainingError
from ..hub import Tokenizer
from ..hub.adapters.adapter_folder import load_adapter_weights
from ..hub.checkpoint.target_folder import check_apart
from ..hub.remote.download import dataset_folder
from ..layers.parameters import parameters
from ..models import Decoder, check_causal
from .batches import Batch, SampleBatches, evaluation_batches, padded_batch
from .callbacks import Callback
from .data_parallel import DataParallel
from .digests import samples_digest, weights_digest
from .distillation import distillation_loss
from .fine_tune_settings import FineTuneSettings
from .gradient_checkpoint import checkpoint_blocks
from .loop import Trainer
from .loss import Loss, next_token_loss
from .memory import MemoryPlan, plan_memory
from .optimizer import named_optimizer, named_schedule
from .pairs import pair_batch, read_pairs
from .preference_loss import is_mode, preference_loss, preferences
from .reference import reference_digest
from .results import AdapterFiles, TrainedModel
from .samples import Samples, find_splits, read_samples
from .trainable import adapt_layers, unfreeze_layers


def read_data(settings: FineTuneSettings, tokenizer: Tokenizer) -> dict[str, Samples[Any]]:
    """Reads the samples of each split that `settings.data` has: pairs for preferences.

    Raises:
        TrainingError: There is no such data, or a line cannot be used.
        DownloadError: The dataset cannot be downloaded from the Hub.
    """
    splits = find_splits(dataset_folder(settings.data))
    options: dict[str, Any] = {
        "max_length": settings.max_seq_length,
        "features": settings.features,
    }
    if settings.learns_preferences:
        return {name: read_pairs(file, tokenizer, **options) for name, file in splits.items()}
    options["mask_prompt"] = settings.mask_prompt
    return {name: read_samples(file, tokenizer, **options) for name, file in splits.items()}


def prepare(model: Decoder, settings: FineTuneSettings) -> list[str]:
    """Freezes everything that the run does not train, and adds the adapters that it trains.

    Args:
        model: The model, which is changed in place. For full fine-tuning, load it with `packed=False`.
        settings: The run.

    Returns:
        The Hub's names of what will be trained.

    Raises:
        TrainingError: There is nothing to train.
        CheckpointError: `resume_adapter_file` cannot be read or does not fit.
    """
    layers: dict[str, Any] = {"num_layers": settings.num_layers, "keys": settings.keys}
    if settings.is_full:
        return unfreeze_layers(model, **layers)
    mx.random.seed(settings.seed)
    names = adapt_layers(
        model,
        kind="dora" if settings.fine_tune_type == "dora" else "lora",
        rank=settings.rank,
        scale=settings.scale,
        dropout=settings.dropout,
        **layers,
    )
    if settings.resume_adapter_file is not None:
        load_adapter_weights(model, settings.resume_adapter_file)
    return names


def fine_tune(
    model: Decoder,
    tokenizer: Tokenizer,
    data: Mapping[str, Samples[Any]],
    settings: FineTuneSettings,
    *,
    teacher: Decoder | None = None,
    processes: DataParallel | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Begins or resumes a fine-tuning run.

    The folder `settings.adapter_path` gets `log.jsonl`, `curve.png` and `checkpoint/`. With adapters,
    it also gets the adapter that is best on the validation samples, the latest one in `last/`, and
    that of each checkpoint, such as `0000100_adapters.safetensors`. Full fine-tuning writes
    `best.safetensors` and, at the end, `model/` and, for a ternary model, `masters/`. Without
    validation samples, the latest weights count as the best.

    Args:
        model: The model, after `prepare`. In the first process it has the best weights at the end.
        tokenizer: The tokenizer of the model. Its files are copied beside a fully tuned model.
        data: The samples, from `read_data`; for DPO, with what `reference.with_reference` adds.
        settings: The run.
        teacher: A model whose predictions the loss compares too. Validation does not.
        processes: The processes that train together, each on its share of the rows of a batch; `None`
            takes all that `mlx.launch` started, or this one alone.
        callbacks: As for `Trainer`.

    Returns:
        The progress of the run: step, tokens, best loss and step.

    Raises:
        TrainingError: There are no samples, the loss is not finite, or the folder holds another run.
        CheckpointError: The folder is that of the model, or one of the two contains the other.
        TrainingStopped: A signal ended the run early.
    """
    check_causal(model)
    folder = Path(settings.adapter_path)
    check_apart(folder.resolve(), [tokenizer.folder], "lora")
    if "train" not in data:
        raise TrainingError(
            f"[data] 'data' must hold a train.jsonl but '{settings.data}' has none."
        )
    processes = DataParallel() if processes is None else processes
    batches = _batches(data["train"], settings, processes.share(settings.batch_size))
    if settings.grad_checkpoint:
        checkpoint_blocks(model)
    has_validation = "valid" in data
    result: AdapterFiles | TrainedModel
    if settings.is_full:
        result = TrainedModel(folder, model, tokenizer, has_validation)
    else:
        result = AdapterFiles(folder, model, settings.record(), has_validation)
    record = {
        "weights": weights_digest(model),
        "samples": samples_digest(data),
        "teacher": None if teacher is None else weights_digest(teacher),
    }
    if settings.train_mode == "dpo":
        record["reference"] = reference_digest(data)
    progress = Trainer(
        model,
        settings.loop(record),
        _optimizer(settings),
        _rate(settings),
        batches,
        _validation(data, settings),
        loss=_loss(settings) if teacher is None else _distillation(teacher, model, settings),
        processes=processes,
        callbacks=[result, *callbacks],
    ).train()
    if processes.is_first:
        result.finish()
    return progress


def plan_fine_tune(
    model: Decoder,
    data: Mapping[str, Samples[Any]],
    settings: FineTuneSettings,
    processes: DataParallel,
    *,
    teacher: Decoder | None = None,
) -> MemoryPlan:
    """Plans the memory of each process of a run, for its longest batch. Nothing is computed or written.

    Args:
        model: The model, after `prepare`.
        data, settings, processes, teacher: As for `fine_tune`.
    """
    if settings.grad_checkpoint:
        checkpoint_blocks(model)
    rows = settings.batch_size // processes.size
    if settings.pack:
        batch = _batches(data["train"], settings, (0, processes.size))(0)[0]
    else:
        longest = sorted(data["train"].samples, key=lambda sample: -sample.length)[:rows]
        # samples come again where a batch has more rows than there are samples
        batch = _maker(settings)([longest[n % len(longest)] for n in range(rows)])
    return plan_memory(
        model,
        _optimizer(settings),
        _loss(settings) if teacher is None else _distillation(teacher, model, settings),
        batch,
        settings.loop({}),
        processes=processes,
        parts=settings.grad_accumulation_steps,
        others=0 if teacher is None else sum(p.nbytes for p in parameters(teacher).values()),
    )


def _optimizer(settings: FineTuneSettings) -> optim.Optimizer:
    options = settings.optimizer_config.get(settings.optimizer)
    return named_optimizer(settings.optimizer, settings.learning_rate, options)


def _batches(
    samples: Samples[Any], settings: FineTuneSettings, share: tuple[int, int]
) -> Callable[[int], list[Batch]]:
    """Maps a step to this process' share of its rows, in one batch for each forward pass."""
    in_order = SampleBatches(
        samples.samples,
        settings.batch_size,
        settings.seed,
        settings.max_seq_length - 1 if settings.pack else None,
        share,
        _maker(settings),
    )
    parts = settings.grad_accumulation_steps
    return lambda step: [in_order.batch(step * parts + part) for part in range(parts)]


def _distillation(teacher: Decoder, student: Decoder, settings: FineTuneSettings) -> Loss:
    return distillation_loss(
        teacher,
        student,
        weight=settings.teacher_weight,
        temperature=settings.teacher_temperature,
        top_k=settings.teacher_top_k,
    )


def _loss(settings: FineTuneSettings) -> Loss:
    mode = settings.train_mode
    return preference_loss(mode, **_options(settings)) if is_mode(mode) else next_token_loss


def _options(settings: FineTuneSettings) -> dict[str, Any]:
    return {"beta": settings.beta, "loss_type": settings.loss_type}


def _maker(settings: FineTuneSettings) -> Callable[[Sequence[Any]], Batch]:
    return pair_batch if settings.learns_preferences else padded_batch


def mean_loss(model: Decoder, batches: Sequence[Batch]) -> float:
    """The mean cross-entropy of the learned tokens of some batches, in nats."""
    total = sum(float(next_token_loss(model, batch)) for batch in batches)
    return total / sum(batch.tokens for batch in batches)


def held_out_loss(model: Decoder, samples: Samples[Any], settings: FineTuneSettings) -> float:
    """The mean loss of the learned tokens, or of the pairs, of held-out samples, in nats."""
    return held_out_figures(model, samples, settings)["loss"]


def held_out_figures(
    model: Decoder, samples: Samples[Any], settings: FineTuneSettings
) -> dict[str, float]:
    """How well a model does on held-out samples.

    Returns:
        `loss`, the mean of the learned tokens or of the pairs, in nats. For preferences also
        `accuracy`, the share of pairs whose chosen answer has the larger reward, and `margin`, the mean
        difference of the rewards.
    """
    model.eval()
    batches = evaluation_batches(
        samples.samples, settings.batch_size, settings.test_batches, make=_maker(settings)
    )
    return _figures(model, batches, settings)


def _figures(
    model: Decoder, batches: Sequence[Batch], settings: FineTuneSettings
) -> dict[str, float]:
    mode = settings.train_mode
    if not is_mode(mode):
        return {"loss": mean_loss(model, batches)}
    parts = [preferences(model, batch, mode, **_options(settings)) for batch in batches]
    losses = np.concatenate([np.array(part.losses) for part in parts])
    margins = np.concatenate([np.array(part.margins) for part in parts])
    return {
        "loss": float(losses.mean(dtype=np.float64)),
        "accuracy": float((margins > 0).mean()),
        "margin": float(margins.mean(dtype=np.float64)),
    }


def _validation(
    data: Mapping[str, Samples[Any]], settings: FineTuneSettings
) -> Callable[[Decoder], dict[str, float]] | None:
    if "valid" not in data:
        return None
    batches = evaluation_batches(
        data["valid"].samples,
        settings.batch_size,
        settings.val_batches,
        settings.seed,
        _maker(settings),
    )

    def validate(model: Decoder) -> dict[str, float]:
        figures = _figures(model, batches, settings)
        return {f"valid_{name}": figure for name, figure in figures.items()}

    return validate


def _rate(settings: FineTuneSettings) -> Callable[[int], mx.array]:
    if settings.lr_schedule is not None:
        return named_schedule(settings.lr_schedule)
    return lambda step: mx.array(settings.learning_rate)
