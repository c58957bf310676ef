"""Fine-tunes a model on samples: the adapters, or the weights themselves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from ...errors import CheckpointError, TrainingError
from ...files.reading import expanded
from ...hub import Tokenizer
from ...hub.adapters.adapter import frozen_copy
from ...hub.adapters.adapter_folder import adapter_options, load_adapter_weights
from ...hub.checkpoint.save import check_apart
from ...images import ImageProcessor
from ...layers.lora import AdapterKind, adapted_layers, add_adapters, can_adapt
from ...layers.matrix import matrix_of, parameters
from ...models import Decoder, check_causal
from ...models.parts.architecture import architecture_of, layer_numbers, weight_names
from ..batches import Batch, evaluation_batches
from ..data_parallel import DataParallel
from ..losses.distillation_loss import distillation_loss
from ..losses.grpo_loss import grpo_loss
from ..losses.loss import Loss, next_token_loss
from ..memory import MemoryPlan, plan_memory
from ..optimizer import named_optimizer, named_schedule
from ..optimizer_step import Batches, checkpoint_blocks
from ..reports import array_sizes, parameter_count
from ..results import AdapterFiles, Callback, TrainedModel
from ..run_folder import file_digest, own_run_folder, samples_digest, weights_digest
from ..samples import Samples
from ..tasks.corpus import summed_loss
from ..tasks.samples import ImageBatch, ImageTask
from ..trainer import Trainer
from .data import batch_maker, largest_batch, training_batches
from .preferences import PairBatch, is_mode, preference_loss, preferences, reference_digest
from .rollouts import Problems, Rollouts, mean_reward
from .settings import GRPO, FineTuneSettings


def adapt_layers(
    model: Decoder,
    *,
    kind: AdapterKind = "lora",
    num_layers: int = -1,
    keys: Sequence[str] | None = None,
    rank: int = 8,
    scale: float = 20.0,
    dropout: float = 0.0,
) -> list[str]:
    """Freezes a model and adds new adapters to some of its layers.

    Args:
        model: The model, which is changed in place.
        kind: `"lora"` or `"dora"`.
        num_layers: Number of layers that take part, counted from the last; -1 takes all.
        keys: Patterns (`fnmatch`) of names on the Hub, within a layer or in the whole model, or ends
            of names such as `q_proj`; `None` takes all linear layers of the blocks.
        rank, scale, dropout: As for `LoRALinear`.

    Returns:
        The Hub's names of the layers with adapters.

    Raises:
        TrainingError: A pattern matches nothing, no layer can have an adapter, or some have one.
    """
    candidates = [f"{name}.weight" for name, m in model.named_modules() if can_adapt(m)]
    chosen = _chosen(model, num_layers, keys, candidates)
    add_adapters(
        model,
        lambda name, _: f"{name}.weight" in chosen,
        kind=kind,
        rank=rank,
        scale=scale,
        dropout=dropout,
    )
    return sorted(chosen.values())


def unfreeze_layers(
    model: Decoder, *, num_layers: int = -1, keys: Sequence[str] | None = None
) -> list[str]:
    """Freezes a model except for the float weights of some of its layers, which become float32.

    Args:
        model: The model, which is changed in place.
        num_layers: As for `adapt_layers`.
        keys: As for `adapt_layers`.

    Returns:
        The Hub's names of the parameters that are not frozen.

    Raises:
        TrainingError: A pattern matches nothing, nothing would be trained, or a layer has no float
            weights.
    """
    modules = dict(model.named_modules())
    chosen = _chosen(model, num_layers, keys, list(parameters(model)))
    model.freeze()
    for name, hub_name in chosen.items():
        path, _, key = name.rpartition(".")
        matrix = matrix_of(modules[path])
        if matrix is not None and matrix.fixed_dtypes:
            raise TrainingError(
                f"[lora] '{hub_name}' must have float weights for full fine-tuning but is packed. Use a "
                "checkpoint with float master weights, or train an adapter."
            )
        modules[path].unfreeze(recurse=False, keys=[key])
        # 16 bits lose updates that are much smaller than the weights
        modules[path][key] = modules[path][key].astype(mx.float32)
    return sorted(chosen.values())


def trained_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of trained parameters and of all parameters. Each packed code counts as one."""
    return array_sizes(model.trainable_parameters()), parameter_count(model)


def _chosen(
    model: Decoder, num_layers: int, keys: Sequence[str] | None, candidates: Sequence[str]
) -> dict[str, str]:
    """Maps the names of the chosen parameters to their Hub names, without `.weight`."""
    if adapted_layers(model):
        raise TrainingError(
            "[lora] 'model' must have no adapter yet but has one. Merge it first with 'mmfree fuse', or "
            "train on its base model, starting with its file as 'resume_adapter_file'."
        )
    names = weight_names(model.config)
    within = architecture_of(model.config).within_mlx_lm
    numbers = layer_numbers(model, names)
    first = 0 if num_layers == -1 else max(0, len(numbers) - num_layers)
    known: set[str] = set()
    used: set[str] = set()
    chosen = {}
    for name in candidates:
        hub_name = names.to_disk(name).removesuffix(".weight")
        position = names.in_layer(hub_name)
        label = hub_name if position is None else position[1]
        known.add(label)
        fitting = [key for key in keys or () if _is_named(key, hub_name, label, within)]
        used.update(fitting)
        is_late = position is None or numbers[position[0]] >= first
        if is_late and (fitting or (keys is None and position is not None)):
            chosen[name] = hub_name
    if unused := [key for key in keys or () if key not in used]:
        raise TrainingError(
            "[lora] 'keys' must name layers that can be trained but got "
            f"{', '.join(map(repr, unused))}. The model has {', '.join(sorted(known))}."
        )
    if not chosen:
        raise TrainingError(
            "[lora] 'keys' must name at least one layer that can be trained but nothing would be "
            f"trained. The model has {', '.join(sorted(known)) or 'no such layer'}."
        )
    return chosen


def _is_named(key: str, hub_name: str, label: str, within: str) -> bool:
    """Returns whether a key names a layer: by a pattern of its name, also within a block, or its end."""
    names = label, hub_name, within + hub_name
    return any(fnmatchcase(name, key) for name in names) or hub_name.endswith(f".{key}")


def mean_loss(model: Decoder, batches: Sequence[Batch]) -> float:
    """The mean cross-entropy of the learned tokens of some batches, in nats."""
    total = sum(float(next_token_loss(model, batch)) for batch in batches)
    return total / sum(batch.tokens for batch in batches)


def held_out_loss(model: Decoder, samples: Samples[Any], settings: FineTuneSettings) -> float:
    """The mean loss of the learned tokens, or of the pairs, of held-out samples, in nats."""
    return held_out_metrics(model, samples, settings)["loss"]


def held_out_metrics(
    model: Decoder, samples: Samples[Any], settings: FineTuneSettings
) -> dict[str, float]:
    """How well a model does on held-out samples.

    Returns:
        `loss`, the mean of the learned tokens, of the pairs or of the images, in nats. For images also
        `accuracy`, the share of those that are sorted rightly. For preferences also `accuracy`, the
        share of pairs whose chosen answer has the larger reward, and `margin`, the mean difference of
        the rewards. For problems `reward`, the mean one, of which `loss` is the negative.
    """
    samples.check_some()
    model.eval()
    if isinstance(samples, Problems):
        return _reward_metrics(model, samples, settings, settings.test_batches)
    batches = evaluation_batches(
        samples.samples,
        settings.batch_size,
        settings.test_batches,
        make=batch_maker(samples, settings),
    )
    return _metrics(model, batches, settings)


def _metrics(
    model: Decoder, batches: Sequence[Batch], settings: FineTuneSettings
) -> dict[str, float]:
    mode = settings.train_mode
    if isinstance(batches[0], ImageBatch):
        return ImageTask.metrics(model, batches)
    if not is_mode(mode):
        return {"loss": mean_loss(model, batches)}
    parts = [preferences(model, batch, mode, **settings.preference_options) for batch in batches]
    losses = np.concatenate([np.array(part.losses) for part in parts])
    margins = np.concatenate([np.array(part.margins) for part in parts])
    return {
        "loss": float(losses.mean(dtype=np.float64)),
        "accuracy": float((margins > 0).mean()),
        "margin": float(margins.mean(dtype=np.float64)),
    }


def _reward_metrics(
    model: Decoder, problems: Problems, settings: FineTuneSettings, most_batches: int
) -> dict[str, float]:
    reward = mean_reward(model, problems, settings, most_batches)
    return {"loss": -reward, "reward": reward}


def validation(
    data: Mapping[str, Samples[Any]], settings: FineTuneSettings
) -> Callable[[Decoder], dict[str, float]] | None:
    """Maps a model to its metrics on the validation samples, if there are any."""
    if "valid" not in data:
        return None
    samples, most = data["valid"], settings.val_batches
    batches = []
    if not isinstance(samples, Problems):
        batches = evaluation_batches(
            samples.samples,
            settings.batch_size,
            most,
            settings.seed,
            batch_maker(samples, settings),
        )

    def validate(model: Decoder) -> dict[str, float]:
        if isinstance(samples, Problems):
            metrics = _reward_metrics(model, samples, settings, most)
        else:
            metrics = _metrics(model, batches, settings)
        return {f"valid_{name}": figure for name, figure in metrics.items()}

    return validate


def check_fine_tunable(model: Any) -> None:
    """Refuses a model that neither continues texts nor sorts images.

    Raises:
        UnsupportedModelError: It is such a model.
    """
    if model.pipeline != "image-classification":
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
        CheckpointError: `resume_adapter_file` cannot be read or does not fit, or its scale is another
            one.
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
        scale = adapter_options(settings.resume_adapter_file)["scale"]
        if settings.scale != scale:
            raise CheckpointError(
                f"[lora] 'scale' must be {scale}, as for the adapter in "
                f"'{settings.resume_adapter_file}', but got {settings.scale}. Give the adapter's."
            )
    return names


def fine_tune(
    model: Any,
    tokenizer: Tokenizer | ImageProcessor,
    data: Mapping[str, Samples[Any]],
    settings: FineTuneSettings,
    *,
    teacher: Decoder | None = None,
    reference: Decoder | None = None,
    processes: DataParallel | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Begins or resumes a fine-tuning run.

    The folder `settings.adapter_path` gets `log.jsonl`, `curve.png` and `checkpoint/`. With adapters,
    it also gets the adapter that is best on the validation samples, the latest one in `last/`, and one
    for each checkpoint, such as `0000100_adapters.safetensors`. Full fine-tuning writes
    `best.safetensors` and, at the end, `model/` and, for a ternary model, `masters/`. Without
    validation samples, the latest weights count as the best.

    Args:
        model: The model, after `prepare`. In the first process it has the best weights at the end.
        tokenizer: The tokenizer of the model, whose files are copied beside a fully tuned model, or its
            image processor.
        data: The samples, from `read_data`; for DPO, with what `reference.with_reference` adds.
        settings: The run.
        teacher: A model whose predictions the loss compares too. Validation does not.
        reference: Of GRPO, the model that the divergence is measured from; `None`: the model as it is.
        processes: The processes that train together, each on its share of the rows of a batch; `None`
            takes all that `mlx.launch` started, or this one alone.
        callbacks: As for `Trainer`.

    Returns:
        The progress of the run: step, tokens, best loss and step.

    Raises:
        TrainingError: There are no samples, the loss is not finite, or the folder holds another run or
            belongs to one at work.
        CheckpointError: The folder is the model's, or one of the two contains the other.
        TrainingStopped: A signal ended the run early.
    """
    check_fine_tunable(model)
    folder = Path(settings.adapter_path)
    source = tokenizer if isinstance(tokenizer, Tokenizer) else None
    check_apart(folder.resolve(), [source.folder] if source else [], "lora")
    if "train" not in data:
        raise TrainingError(
            "[data] 'data' must hold samples for training, such as train.jsonl, but "
            f"'{settings.data}' has none."
        )
    processes = DataParallel() if processes is None else processes
    with own_run_folder(folder, is_first=processes.is_first):
        share = processes.share(settings.batch_size)
        rollouts = None
        batches: Batches
        if isinstance(data["train"], Problems):
            if reference is None and settings.uses_reference:
                reference = frozen_copy(model)
                reference.eval()
            rollouts = Rollouts(model, data["train"], settings, share, reference)
            batches = cast(Batches, rollouts)
        else:
            batches = training_batches(data["train"], settings, share)
        if settings.grad_checkpoint:
            checkpoint_blocks(model)
        has_validation = "valid" in data
        result: AdapterFiles | TrainedModel
        if settings.is_full:
            result = TrainedModel(folder, model, source, has_validation)
        else:
            template = None if source is None else source.given_template
            result = AdapterFiles(folder, model, settings.record(), has_validation, template)
        record = {
            "weights": weights_digest(model),
            "samples": samples_digest(data),
            "teacher": None if teacher is None else weights_digest(teacher),
        }
        if settings.train_mode == "dpo":
            record["reference"] = reference_digest(data)
        if rollouts is not None:
            record |= _reward_record(settings, reference)
        progress = Trainer(
            model,
            settings.loop(record),
            _optimizer(settings),
            _rate(settings),
            batches,
            validation(data, settings),
            loss=_loss(model, settings, teacher),
            processes=processes,
            callbacks=[result, *([] if rollouts is None else [rollouts]), *callbacks],
            metrics=None if rollouts is None else rollouts.metrics,
        ).train()
        if processes.is_first:
            result.finish()
        return progress


def _reward_record(settings: FineTuneSettings, reference: Decoder | None) -> dict[str, Any]:
    """The other values that decide the course of a run that learns from rewards."""
    file = settings.reward_functions_file
    return {
        "reward_file": None if file is None else file_digest(expanded(file)),
        "reference": None if reference is None else weights_digest(reference),
    }


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
        _loss(model, settings, teacher),
        batch,
        settings.loop({}),
        processes=processes,
        parts=settings.grad_accumulation_steps,
        companions=() if teacher is None else [teacher],
    )


def _optimizer(settings: FineTuneSettings) -> optim.Optimizer:
    options = settings.optimizer_config.get(settings.optimizer)
    return named_optimizer(settings.optimizer, settings.learning_rate, options)


def _loss(model: Any, settings: FineTuneSettings, teacher: Decoder | None) -> Loss:
    if teacher is not None:
        return distillation_loss(teacher, model, **settings.divergence)
    mode = settings.train_mode
    if model.pipeline == "image-classification":
        return summed_loss(ImageTask, 0.0)
    if mode == GRPO:
        return grpo_loss(**settings.group_loss_options)
    if not is_mode(mode):
        return next_token_loss
    return preference_loss(mode, **settings.preference_options)


def _rate(settings: FineTuneSettings) -> Callable[[int], mx.array]:
    if settings.lr_schedule is not None:
        return named_schedule(settings.lr_schedule)
    return lambda step: mx.array(settings.learning_rate)
