"""The training loop: steps, reports, validations, checkpoints, and resuming after a stop.

`train_model` runs it for a model of any kind, from files.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..errors import TrainingError
from ..models import Decoder, TokenModel, set_dropout
from .corpus.vocabulary import tokenizer_folder
from .data_parallel import DataParallel
from .first_model import FirstModel, task_of
from .losses.distillation_loss import distillation_loss
from .losses.loss import Loss
from .memory import MemoryPlan, plan_memory, plan_rows
from .optimizer import build_optimizer, build_schedule
from .optimizer_step import checkpoint_blocks
from .reports import describe_weights
from .results import Callback, TrainedModel
from .run_folder import check_record, own_run_folder, read_progress, weights_digest
from .settings import Settings
from .trainer import Trainer


def train_model(
    settings: Settings,
    processes: DataParallel | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    first: FirstModel | None = None,
) -> dict[str, Any]:
    """Begins or resumes a training run, and writes models with its best weights at the end.

    What is learned depends on the kind of the model: the next token of texts, tokens that are left out
    of them, the labels of texts or of images, or texts that belong to others. A teacher tells what it
    expects of the next token too.

    The folder `settings.output` gets `tokenizer/`, unless images are learned, `log.jsonl`, `curve.png`,
    `checkpoint/` and `best.safetensors`. At the end it gets `model/` and, for a ternary model,
    `masters/`, which holds float weights for further training. A finished run goes on if it is given
    more `steps`. Its further steps then follow the learning rate of the longer run.

    Args:
        settings: The run.
        processes: The processes that train together, each on its share of the rows of a batch; `None`
            takes all that `mlx.launch` started, or this one alone.
        callbacks: Are called with each record, best model and checkpoint.
        first: The model to begin with, if it has been built already.

    Returns:
        The progress of the run and, in the first process, the metrics of the packed model on the
        held-out files, under `held_out`.

    Raises:
        TrainingError: A file or setting is wrong, the folder cannot be written or belongs to another
            run at work, or the loss is not finite.
        TrainingStopped: A signal ended the run early. Its state is saved.
        TypeError: The settings are none.

    Example:
        >>> from pathlib import Path
        >>> from mlx_mmfree.training.corpus.mixture import Stage
        >>> written = Path("stories.txt").write_text("Once upon a time there was a frog. " * 400)
        >>> sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32}
        >>> model = {"model_type": "hgrn_bit", "num_hidden_layers": 1, **sizes}
        >>> stage = Stage(until=1, weights={"stories.txt": 1})
        >>> settings = Settings(output="run", model=model, stages=(stage,), steps=2, warmup_steps=1)
        >>> train_model(settings)["step"]
        2
    """
    if not isinstance(settings, Settings):
        raise TypeError(
            f"[train_model] 'settings' must be Settings but got {type(settings).__name__}. Read them: "
            "read_settings('run.yaml')."
        )
    first = first or FirstModel(settings)
    first.task.check_files(settings)
    if processes is None:
        processes = DataParallel(timeout_s=settings.process_timeout_s)
    with own_run_folder(settings.path(settings.output), is_first=processes.is_first):
        return _train(settings, processes, callbacks, first)


def _train(
    settings: Settings,
    processes: DataParallel,
    callbacks: Sequence[Callback],
    first: FirstModel,
) -> dict[str, Any]:
    output = settings.path(settings.output)
    share = processes.share(settings.batch_size)
    progress = read_progress(output)
    if progress is not None:
        # checked before anything is written for other settings
        check_record(output, progress, progress["settings"] | settings.record())
    model, kind = first.load(), first.task
    tokenizer = first.tokenizer_folder
    if tokenizer is None and kind.reads_text:
        tokenizer = processes.after_first(
            lambda: tokenizer_folder(
                settings,
                model.vocab_size,
                is_resumed=progress is not None,
                columns=kind.columns(settings),
                mask_token=kind.mask_token,
            )
        )
    # the first process makes the token files that the others read
    task = processes.after_first(lambda: kind(settings, model, tokenizer, share))
    teacher = first.load_teacher(tokenizer)
    record = {
        # random weights follow from the settings
        "weights": None if settings.init_from is None else weights_digest(model),
        "texts": dict(task.digests),
        **({} if teacher is None else {"teacher": weights_digest(teacher)}),
    }
    if processes.is_first:
        for words in (describe_weights(model), task.size()):
            for callback in callbacks:
                callback.on_start(words)
    _prepare(model, settings)
    result = TrainedModel(output, model, tokenizer, has_validation=bool(settings.valid))
    progress = Trainer(
        model,
        settings.loop(record, kind.unit),
        build_optimizer(settings),
        build_schedule(settings, model.dims),
        task.batches,
        task.validate if settings.valid else None,
        loss=_loss(settings, model, teacher),
        processes=processes,
        callbacks=[result, *callbacks],
    ).train()
    if not processes.is_first:
        return progress
    result.finish()
    model.eval()
    return progress | {"held_out": task.held_out(model)}


def plan_training(
    settings: Settings,
    model: TokenModel,
    processes: DataParallel,
    *,
    teacher: Decoder | None = None,
) -> MemoryPlan:
    """Plans the memory of each process of a run. Nothing is computed or written.

    Args:
        settings: The run.
        model: The model that it begins with, whose weights may be uncomputed still.
        processes: The processes that train together.
        teacher: Its teacher, if it has one, whose weights may have no values.

    Raises:
        TrainingError: A batch cannot be split between the processes, or the model has no dropout.
    """
    _, size = processes.share(settings.batch_size)
    _prepare(model, settings)
    task = task_of(model)
    step = partial(
        plan_memory,
        model,
        build_optimizer(settings),
        _loss(settings, model, teacher),
        settings=settings.loop({}),
        processes=processes,
        parts=settings.accumulation_steps,
        companions=() if teacher is None else [teacher],
    )
    batch_of = partial(task.largest_batch, settings, model)
    logits = settings.sequence_length * model.num_logits
    return plan_rows(step, batch_of, settings.batch_size // size, logits)


def _loss(settings: Settings, model: Any, teacher: Decoder | None) -> Loss:
    if teacher is None:
        return task_of(model).loss(settings)
    return distillation_loss(teacher, model, **settings.divergence)


def _prepare(model: TokenModel, settings: Settings) -> None:
    """Gives a model the dropout and the backward pass that the settings ask for."""
    if settings.dropout and not set_dropout(model, settings.dropout):
        raise TrainingError(
            "[train] 'dropout' must be 0 for a model without blocks of a token and a channel mixer, as "
            f"one of images or with reversible blocks, but got {settings.dropout}. Leave it out."
        )
    if settings.grad_checkpoint:
        checkpoint_blocks(model)
