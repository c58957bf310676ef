"""Fine-tunes a model on samples: the adapters, or the weights themselves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from ..errors import TrainingError
from ..hub import Tokenizer
from ..hub.adapters.adapter import load_adapter_weights
from ..hub.checkpoint.save import check_apart
from ..images import ImageProcessor
from ..models import Decoder, ImageClassifier, check_causal
from .callbacks import Callback
from .data_parallel import DataParallel
from .digests import samples_digest, weights_digest
from .distillation import distillation_loss
from .fine_tune_data import largest_batch, training_batches
from .fine_tune_settings import FineTuneSettings
from .gradient_checkpoint import checkpoint_blocks
from .held_out_samples import validation
from .loop import Trainer
from .loss import Loss, next_token_loss
from .memory import MemoryPlan, plan_memory
from .optimizer import named_optimizer, named_schedule
from .pairs import PairBatch
from .preference_loss import is_mode, preference_loss
from .reference import reference_digest
from .results import AdapterFiles, TrainedModel
from .run_folder import own_run_folder
from .samples import Samples
from .tasks.images import ImageTask
from .tasks.task import summed_loss
from .trainable import adapt_layers, unfreeze_layers


def check_fine_tunable(model: Any) -> None:
    """Refuses a model that neither continues texts nor sorts images.

    Raises:
        UnsupportedModelError: It is such a model.
    """
    if not isinstance(model, ImageClassifier):
        check_causal(model)


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
    model: Any,
    tokenizer: Tokenizer | ImageProcessor,
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
        tokenizer: The tokenizer of the model, whose files are copied beside a fully tuned model, or its
            image processor.
        data: The samples, from `read_data`; for DPO, with what `reference.with_reference` adds.
        settings: The run.
        teacher: A model whose predictions the loss compares too. Validation does not.
        processes: The processes that train together, each on its share of the rows of a batch; `None`
            takes all that `mlx.launch` started, or this one alone.
        callbacks: As for `Trainer`.

    Returns:
        The progress of the run: step, tokens, best loss and step.

    Raises:
        TrainingError: There are no samples, the loss is not finite, or the folder holds another run or
            is that of one at work.
        CheckpointError: The folder is that of the model, or one of the two contains the other.
        TrainingStopped: A signal ended the run early.
    """
    check_fine_tunable(model)
    folder = Path(settings.adapter_path)
    source = tokenizer if isinstance(tokenizer, Tokenizer) else None
    check_apart(folder.resolve(), [source.folder] if source else [], "lora")
    if "train" not in data:
        raise TrainingError(
            f"[data] 'data' must hold a train.jsonl but '{settings.data}' has none."
        )
    processes = DataParallel() if processes is None else processes
    with own_run_folder(folder, is_first=processes.is_first):
        batches = training_batches(data["train"], settings, processes.share(settings.batch_size))
        if settings.grad_checkpoint:
            checkpoint_blocks(model)
        has_validation = "valid" in data
        result: AdapterFiles | TrainedModel
        if settings.is_full:
            result = TrainedModel(folder, model, source, has_validation)
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
            validation(data, settings),
            loss=_loss(model, settings)
            if teacher is None
            else _distillation(teacher, model, settings),
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
        data, settings, processes, teacher: As for `fine_tune`. DPO's pairs need no reference yet.

    Raises:
        TrainingError: There are no samples, or a batch cannot be split between the processes.
    """
    if settings.grad_checkpoint:
        checkpoint_blocks(model)
    batch = largest_batch(data["train"], settings, processes.share(settings.batch_size))
    if isinstance(batch, PairBatch):
        # a plan needs no numbers
        batch = replace(batch, reference=np.zeros((batch.terms, 2), np.float32))
    return plan_memory(
        model,
        _optimizer(settings),
        _loss(model, settings) if teacher is None else _distillation(teacher, model, settings),
        batch,
        settings.loop({}),
        processes=processes,
        parts=settings.grad_accumulation_steps,
        companions=() if teacher is None else [teacher],
    )


def _optimizer(settings: FineTuneSettings) -> optim.Optimizer:
    options = settings.optimizer_config.get(settings.optimizer)
    return named_optimizer(settings.optimizer, settings.learning_rate, options)


def _distillation(teacher: Decoder, student: Decoder, settings: FineTuneSettings) -> Loss:
    return distillation_loss(
        teacher,
        student,
        weight=settings.teacher_weight,
        temperature=settings.teacher_temperature,
        top_k=settings.teacher_top_k,
    )


def _loss(model: Any, settings: FineTuneSettings) -> Loss:
    mode = settings.train_mode
    if isinstance(model, ImageClassifier):
        return summed_loss(ImageTask)
    if not is_mode(mode):
        return next_token_loss
    return preference_loss(mode, **settings.preference_options)


def _rate(settings: FineTuneSettings) -> Callable[[int], mx.array]:
    if settings.lr_schedule is not None:
        return named_schedule(settings.lr_schedule)
    return lambda step: mx.array(settings.learning_rate)
