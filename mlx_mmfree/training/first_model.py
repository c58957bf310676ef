"""The model that a run from files begins with, with random weights or a checkpoint's."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from .. import models
from ..arguments import did_you_mean
from ..errors import (
    CheckpointError,
    DownloadError,
    MMFreeError,
    TrainingError,
    UnsupportedModelError,
)
from ..hub import Tokenizer
from ..hub.checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..hub.checkpoint.load import OpenedModel, load_text_tokenizer
from ..layers.matrix import matrices, matrix_of, parameters
from ..models.parts.ternary_linears import TernaryLinears
from .image_sets import read_classes
from .precision import compute_dtype
from .settings import Settings
from .tasks.corpus import CausalLMTask, MaskedLMTask, Task
from .tasks.samples import ClassifierTask, EncoderDecoderTask, ImageTask


def load_companion(opened: OpenedModel, tokenizer: Tokenizer) -> models.Decoder:
    """Loads a model whose predictions are compared with another model's that has the given tokenizer.

    Raises:
        TrainingError: It has another vocabulary.
        UnsupportedModelError: It does not continue texts.
        CheckpointError: It cannot be loaded.
    """
    models.check_causal(opened.model)
    _check_same_tokens(tokenizer, opened.processor(), str(opened.checkpoint.folder))
    return opened.load()


def _check_same_tokens(tokenizer: Tokenizer, other: Tokenizer, name: str) -> None:
    rule = f"[training] '{name}' must have the tokens of the model that is trained"
    hint = "Choose one with the same vocabulary."
    count = tokenizer.vocab_size
    if other.vocab_size != count:
        raise TrainingError(f"{rule}, {count}, but has {other.vocab_size}. {hint}")
    for token_id in range(count):
        wanted, got = tokenizer.id_to_piece(token_id), other.id_to_piece(token_id)
        if wanted != got:
            raise TrainingError(
                f"{rule} but its token {token_id} is {got!r:.80} instead of {wanted!r:.80}. {hint}"
            )


def described_classes(description: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The description of a new image model, with the classes of the training files.

    It also says how pictures are prepared, unless it does so itself: the middle square is scaled to the
    size of the model, and values lie from -1 to 1.

    Raises:
        TrainingError: The files cannot be read, or do not agree.
        CheckpointError, UnsupportedModelError: As for `ImageConfig.from_hub`.
    """
    described = dict(description)
    if not {"num_classes", "label_names"} & described.keys():
        count, names = _classes(settings)
        described |= {"num_classes": count, **({"label_names": list(names)} if names else {})}
    elif "num_classes" not in described and isinstance(described["label_names"], list):
        described["num_classes"] = len(described["label_names"])
    if "pretrained_cfg" not in described:
        config = models.find_described(described).config.from_hub(described)
        described["pretrained_cfg"] = {
            "input_size": [config.input_channels, *config.image_size],
            "fixed_input_size": config.has_fixed_size,
            "crop_pct": 1.0,
            "interpolation": "bicubic",
            "mean": [0.5] * config.input_channels,
            "std": [0.5] * config.input_channels,
        }
    return described


def with_classes(model: models.ImageClassifier, settings: Settings) -> models.ImageClassifier:
    """A model with the classes of the training files, and all weights that do not depend on classes.

    Raises:
        TrainingError: The files cannot be read, or do not agree.
    """
    count, names = _classes(settings)
    config = replace(
        model.config, num_classes=count, label_names=tuple(names), label_descriptions={}
    )
    build = models.architecture_of(config).build
    new: models.ImageClassifier = build(config)
    # weights of classes are those whose number the classes change
    larger = parameters(build(replace(config, num_classes=count + 1, label_names=())))
    known = parameters(model)
    unchanged = [
        (name, known[name])
        for name, array in parameters(new).items()
        if array.shape == larger[name].shape
    ]
    new.update(tree_unflatten(unchanged))
    return new


def _classes(settings: Settings) -> tuple[int, tuple[str, ...]]:
    """How many classes the training files have, and what they are called, if they say so."""
    files = sorted({name for stage in settings.stages for name in stage.weights})
    found = [read_classes(settings.path(name)) for name in files]
    names = {name for _, each in found for name in each}
    if names and not all(each for _, each in found):
        silent = next(file for file, (_, each) in zip(files, found, strict=True) if not each)
        raise TrainingError(
            f"[data] '{silent}' must say what its classes are called, as other training files do, but "
            "does not. Name them under 'label_names' of 'model'."
        )
    # numbered in the order of the first file, which may be a file of arrays with an order of its own
    ordered = dict.fromkeys(name for _, each in found for name in each)
    return len(ordered) or max(count for count, _ in found), tuple(ordered)


_TASKS: dict[str, type[Task]] = {
    "text-generation": CausalLMTask,
    "fill-mask": MaskedLMTask,
    "text-classification": ClassifierTask,
    "translation": EncoderDecoderTask,
    "image-classification": ImageTask,
}


def task_of(model: Any) -> type[Task]:
    """The task of a model in a run from files.

    Raises:
        UnsupportedModelError: Nothing, or the model is to continue texts but sees what comes after.
    """
    if model.pipeline == "text-generation":
        models.check_causal(model)
    if model.pipeline in _TASKS:
        return _TASKS[model.pipeline]
    raise UnsupportedModelError(
        f"[train] a model for {model.purpose} cannot be trained with `mmfree train`."
    )


DEFAULT_EMBEDDING_STD = 1.0
"""The standard deviation of a fresh embedding that no head shares.

Norms before the last projections of a block make what a block adds much larger than 0.02. A token with
a smaller embedding is not seen through it. The shortcut must be large (Takase et al., arXiv 2312.16903).
"""


class FirstModel:
    """The model that a run begins with, in its training variant, and its teacher.

    Their weights are not computed yet.

    Args:
        settings: The run.

    Attributes:
        model: The model. `load` gives it its weights.
        nbytes: Number of bytes of its float32 weights, and of the teacher's weights.
        task: What it learns.
        tokenizer_folder: Folder of the tokenizer that comes with the model or its teacher, or `None`.
        teacher: The teacher, or `None`.

    Raises:
        TrainingError: The settings ask for linear layers that the architecture does not have, for
            another embedding of a model that has none of its own, for longer rows than it takes, for a
            teacher of anything but the next token, or for what image models do not have; or classes
            cannot be read.
        CheckpointError, DownloadError, UnsupportedModelError: As for `load`; the last one also for a
            model that learns nothing from files.
    """

    def __init__(self, settings: Settings):
        self._opened: OpenedModel | None = None
        self.tokenizer_folder: Path | None = None
        if settings.init_from is None:
            mx.random.seed(settings.seed)
            self.model: Any = _random_model(settings)
            self.nbytes = sum(array.nbytes for array in parameters(self.model).values())
        else:
            self._opened = OpenedModel(
                _checkpoint(settings, "init_from", settings.latent),
                dtype=mx.float32,
                packed=False,
                rebuild_masters=settings.rebuild_masters,
            )
            self.model = self._opened.model
            self.nbytes = self._opened.nbytes
        self.task = task_of(self.model)
        self._settings = settings
        self.teacher = self._open_teacher()
        if self.model.pipeline == "image-classification":
            _check_images(settings)
            if not settings.new_head:
                self.model.check_classes("train")
            return
        if settings.new_head:
            raise TrainingError(
                f"[train] 'new_head' must be left out for a model for {self.model.purpose} but was "
                "given."
            )
        if self._opened is not None:
            self.tokenizer_folder = self._opened.checkpoint.folder
        elif self.teacher is not None and settings.tokenizer is None:
            self.tokenizer_folder = self.teacher.checkpoint.folder
        most = self.model.max_length
        if most is not None and settings.sequence_length > most:
            raise TrainingError(
                "[train] 'sequence_length' must be at most the number of positions of the model, "
                f"{most}, but got {settings.sequence_length}. Lower it, or raise "
                "'max_position_embeddings' of a new model."
            )

    def load(self) -> Any:
        """Returns the model with its weights. It may be called only once."""
        if self._opened is not None:
            self.model = self._opened.load()
            if self._settings.new_head:
                mx.random.seed(self._settings.seed)
                self.model = with_classes(self.model, self._settings)
        return self.model

    def load_teacher(self, tokenizer: Path | None) -> models.Decoder | None:
        """The teacher with its weights, if there is one. It may be called only once.

        Args:
            tokenizer: Folder of the model's tokenizer.

        Raises:
            TrainingError: The teacher has other tokens.
            CheckpointError: It cannot be loaded.
        """
        if self.teacher is None or tokenizer is None:
            return None
        return load_companion(self.teacher, load_text_tokenizer(tokenizer))

    def _open_teacher(self) -> OpenedModel | None:
        settings = self._settings
        if settings.teacher is None:
            return None
        if self.task is not CausalLMTask:
            raise TrainingError(
                f"[train] 'teacher' must be left out for a model for {self.model.purpose} but got "
                f"{settings.teacher!r:.80}."
            )
        opened = OpenedModel(_checkpoint(settings, "teacher"), compute_dtype(settings.dtype))
        if opened.model.pipeline != "text-generation":
            raise TrainingError(
                f"[train] 'teacher' must be a model that continues texts but '{settings.teacher}' is "
                f"one for {opened.model.purpose}."
            )
        self.nbytes += opened.nbytes
        return opened


def _checkpoint(settings: Settings, name: str, latent: bool | None = None) -> Checkpoint:
    """Opens the folder, or else the repository, that a setting names."""
    value = str(getattr(settings, name))
    local = settings.path(value)
    try:
        return open_checkpoint(local if local.exists() else value, latent=latent)
    except (CheckpointError, DownloadError) as error:
        raise type(error)(str(error).replace("'path_or_repo'", f"'{name}'")) from error


_OF_TRANSFORMERS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_position_embeddings",
        "mlx_mmfree",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
"""Keys that transformers and this library write into any `config.json`, from which people copy."""


def _check_keys(architecture: models.Architecture, described: Mapping[str, Any]) -> None:
    """Refuses keys of a description that its architecture does not read.

    A key is read if the architecture refuses a value of no type there, or makes another model of it.

    Raises:
        TrainingError: There is such a key. The message names the nearest one that is read.
    """
    config = architecture.config.from_hub(described)
    known = {*config.to_hub(), *architecture.tiny, "linear_class"}
    for key in sorted(described.keys() - known - _OF_TRANSFORMERS):
        try:
            is_read = architecture.config.from_hub({**described, key: object()}) != config
        except (MMFreeError, TypeError, ValueError):
            is_read = True
        if is_read:
            continue
        meant = did_you_mean(key, known) or f" Known are {', '.join(sorted(known))}."
        raise TrainingError(
            f"[train] 'model' must hold keys that '{architecture.name}' reads but got {key!r:.80}."
            f"{meant}"
        )


def _random_model(settings: Settings) -> Any:
    """A model with random weights, which take no memory until they are computed."""
    architecture = models.find_described(settings.model)
    described = _with_linear_class(settings.model)
    if architecture.variants:
        described = described_classes(described, settings)
    _check_keys(architecture, described)
    model: Any = architecture.build(architecture.config.from_hub(described))
    _check_linear_class(model, settings.model)
    if model.pipeline != "image-classification":
        _draw_embedding(model, settings.embedding_std)
    return model


def _check_images(settings: Settings) -> None:
    """Refuses what only models of texts have."""
    for name in ("embedding_std", "tokenizer"):
        if getattr(settings, name) is not None:
            raise TrainingError(
                f"[train] '{name}' must be left out for an image model but got "
                f"{getattr(settings, name)!r:.80}."
            )
    if settings.grad_checkpoint:
        raise TrainingError(
            "[train] 'grad_checkpoint' must be left out for an image model, whose blocks cannot be "
            "computed twice in a step, but was given. Lower 'batch_size' instead, with more "
            "'accumulation_steps'."
        )


def _draw_embedding(model: models.TokenModel, standard_deviation: float | None) -> None:
    """Draws the embedding anew. It is drawn last, so that the other weights do not depend on it."""
    head = matrix_of(model.head) if "head" in model else None
    if head is None or head.is_shared:
        if standard_deviation is not None:
            raise TrainingError(
                "[train] 'embedding_std' must be left out for a model with 'tie_word_embeddings', "
                f"whose head would share these weights, but got {standard_deviation}."
            )
        return
    if standard_deviation is None and getattr(model.config, "scale_embedding", False):
        return
    wanted = DEFAULT_EMBEDDING_STD if standard_deviation is None else standard_deviation
    if wanted != getattr(model.config, "initializer_range", None):
        model.embed.weight = mx.random.normal(model.embed.weight.shape, scale=wanted)


def _with_linear_class(model: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture, with `linear_class` translated into the keys of its own configuration."""
    kind = model.get("linear_class")
    names = {field.name for field in fields(models.find_described(model).config)}
    if kind is None or "linear_class" in names:
        return dict(model)
    ternary = model.get("quantization_config") or TernaryLinears().to_hub()
    rest = {k: v for k, v in model.items() if k not in ("linear_class", "quantization_config")}
    return rest | ({"quantization_config": ternary} if kind == "ternary" else {})


def _check_linear_class(model: models.TokenModel, described: Mapping[str, Any]) -> None:
    kind = described.get("linear_class")
    found = "ternary" if any(m.is_ternary for m in matrices(model).values()) else "dense"
    if kind not in (None, found):
        key = "model_type" if "model_type" in described else "architecture"
        raise TrainingError(
            f"[train] 'linear_class' must be {found} for {key!r} {described[key]!r:.80} but got "
            f"{kind!r:.80}."
        )
