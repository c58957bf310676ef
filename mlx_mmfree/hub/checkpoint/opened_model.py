"""A model that is built once, tells its size, and then loads its weights."""

import os
from typing import Any

import mlx.core as mx

from ...errors import CheckpointError
from ...files.checkpoint_files import ADAPTER_PATTERNS, CONFIG_FILE, GENERATION_FILE
from ...files.json_file import read_json_object
from ...images import ImageProcessor
from ...layers.matrix import converted, kept_names, parameters
from ...models import Decoder, EncoderDecoder, ImageClassifier, TokenModel, architecture_of
from ...models.parts.encoder_decoder import SearchFiles
from ...ops.backend.early_checks import check_early
from ...ops.backend.launch import MAX_GROUP_ROWS
from ...ops.float_dtypes import FLOATS
from ...tokenizer.pair_tokenizer import PairTokenizer, open_pair_tokenizer
from ...tokenizer.tokenizer import Tokenizer
from ...tokenizer.translation_tokenizer import TranslationTokenizer
from ..adapters.adapter import Adapter, attach
from ..adapters.adapter_folder import read_adapter
from .checkpoint import Checkpoint, open_checkpoint
from .fill import fill
from .masters import MASTERS_FOLDER, Masters
from .notice import notify
from .pack_cache import PackCache
from .skeleton import Skeleton, build_skeleton
from .writer_record import checked_rounding

Source = str | os.PathLike[str] | Checkpoint


class OpenedModel:
    """A model whose weights are not loaded yet.

    Args:
        checkpoint: The checkpoint.
        dtype, packed, rebuild_masters: As for `load`.

    Attributes:
        checkpoint: The checkpoint.
        keeps_adapter: Whether an adapter lies beside the weights and belongs to the model.
        nbytes: The number of bytes of the weights once they are loaded. Dense weights whose values turn
            out to be ternary take less.

    Raises:
        CheckpointError: The tensors do not belong to the configuration, or there are no masters.
        UnsupportedModelError: The architecture is not implemented.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: mx.Dtype | None = None,
        packed: bool = True,
        rebuild_masters: bool = False,
    ):
        self.checkpoint = checkpoint
        self.keeps_adapter = checkpoint.keeps_adapter
        if not packed:
            checkpoint.refuse_adapter("load", "to be trained further")
        self._dtype = dtype or checkpoint.dtype
        self._cache = PackCache(checkpoint)
        cached = _cached_skeleton(self._cache) if packed else None
        self._is_cached = cached is not None
        self._skeleton = cached or build_skeleton(checkpoint, packed=packed)
        self._kept = kept_names(self.model)
        if self._kept and not packed and not rebuild_masters:
            raise _without_masters(checkpoint)
        self._masters = Masters({} if packed else self._skeleton.training)
        self.nbytes = self._count_bytes()

    @property
    def model(self) -> Decoder:
        """The model. It has no weights before `load`."""
        return self._skeleton.model

    def tokenizer(self) -> Tokenizer:
        """Reads the tokenizer.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        return Tokenizer.from_folder(self.checkpoint.folder)

    def image_processor(self) -> ImageProcessor:
        """Reads how a model of images wants its pictures.

        Raises:
            CheckpointError, UnsupportedModelError: The files do not say it as they must.
        """
        return ImageProcessor.from_config(self.checkpoint.config)

    def processor(self) -> Tokenizer | TranslationTokenizer | ImageProcessor:
        """What prepares inputs of the model; raises as `tokenizer` and `image_processor` do."""
        model: Any = self.model
        if isinstance(model, ImageClassifier):
            return self.image_processor()
        if isinstance(model, EncoderDecoder):
            pair = self.pair_tokenizer()
            if isinstance(pair, TranslationTokenizer):
                return pair
        return self.tokenizer()

    def pair_tokenizer(self) -> PairTokenizer:
        """Reads the tokenizer of an encoder-decoder; raises as `tokenizer` does."""
        return open_pair_tokenizer(self.checkpoint.folder)

    def adapter(self) -> Adapter | None:
        """Reads the adapter that lies beside the weights, if there is one that belongs to the model.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        if not self.keeps_adapter:
            return None
        folder = self.checkpoint.folder
        if missing := [name for name in ADAPTER_PATTERNS if not (folder / name).exists()]:
            raise CheckpointError(
                f"[load] '{folder}' must hold the adapter that its {CONFIG_FILE} speaks of but lacks "
                f"{' and '.join(missing)}. Fetch the model again."
            )
        return read_adapter(folder)

    def load(self, adapter: Adapter | None = None) -> Decoder:
        """Reads the weights into the model, which is set to evaluation. It may be called once.

        Args:
            adapter: An adapter to put on the model. Default: the one that lies beside the weights, if
                there is one that belongs to the model; a line on stderr says so.

        Raises:
            CheckpointError: A tensor is damaged, or the adapter is or does not fit.
        """
        if adapter is None and (adapter := self.adapter()) is not None:
            notify(
                f"'{self.checkpoint.folder}' holds an adapter beside its base model; both are used."
            )
        if self._skeleton.is_packed:
            check_early(self._build_graphs)
        self._fill()
        model: Any = self.model
        self._masters.make(model)
        model.rounding = checked_rounding(self.checkpoint)
        if isinstance(model, EncoderDecoder):
            model.search_files = self._search_files()
        loaded: Decoder = converted(model, self._dtype)
        if adapter is not None:
            attach(loaded, adapter)
        loaded.eval()
        return loaded

    def _search_files(self) -> SearchFiles:
        file = self.checkpoint.folder / GENERATION_FILE
        generation = read_json_object(file) if file.exists() else {}
        return SearchFiles(generation, self.checkpoint.config)

    def without_values(self) -> Decoder:
        """The model with parameters of the dtypes that they will have, to build graphs of.

        They take no memory until something reads them, and have no meaning.
        """
        self.model.eval()
        modules = dict(self.model.named_modules())
        for name, array in parameters(self.model).items():
            if name not in self._kept:
                path, _, key = name.rpartition(".")
                dtype = self._skeleton.entries[name].dtype
                dtype = self._dtype if self._dtype and dtype in FLOATS else dtype
                setattr(modules[path], key, array.astype(dtype))
        return self.model

    def _build_graphs(self) -> None:
        """Builds the graphs of a decoded token, and of a prompt that is read in the largest groups."""
        model: Any = self.without_values()
        if not isinstance(model, TokenModel):
            model.predictions(architecture_of(model.config).sample(model.config))
            return
        model.predictions(mx.zeros((1, 1), mx.int32))
        # a prompt needs no logits but the last
        read = model.hidden if isinstance(model, Decoder) else model.predictions
        read(mx.zeros((1, MAX_GROUP_ROWS), mx.int32))

    def _fill(self) -> None:
        if self._is_cached:
            try:
                fill(self._skeleton)
            except CheckpointError as error:
                self._cache.notify_damage(error)
                self._skeleton = build_skeleton(self.checkpoint, packed=True)
            else:
                return
        fill(self._skeleton)
        if self._skeleton.is_packed:
            self._cache.store(self.model)

    def _count_bytes(self) -> int:
        total = self._masters.nbytes(self._dtype or mx.float32)
        for name, array in parameters(self.model).items():
            if name not in self._kept:
                total += array.size * (self._dtype or self._skeleton.entries[name].dtype).size
            elif name.rpartition(".")[0] not in self._masters.training:
                total += array.nbytes
        return total


def open_model(
    path_or_repo: Source,
    revision: str | None = None,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    latent: bool | None = None,
    rebuild_masters: bool = False,
) -> OpenedModel:
    """Finds a checkpoint and builds its model without the weights.

    Args:
        path_or_repo, revision, dtype, packed, latent, rebuild_masters: As for `load`.

    Raises:
        ValueError: `dtype` is not a float dtype.
        CheckpointError, DownloadError, UnsupportedModelError: As for `load`.
    """
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(
            f"[load] 'dtype' must be float32, float16, bfloat16 or None but got {dtype}. Leave it out "
            "to keep the checkpoint's."
        )
    if not isinstance(path_or_repo, Checkpoint):
        path_or_repo = open_checkpoint(path_or_repo, revision, latent)
    return OpenedModel(path_or_repo, dtype, packed, rebuild_masters)


def _cached_skeleton(cache: PackCache) -> Skeleton | None:
    cached = cache.find()
    try:
        return None if cached is None else build_skeleton(cached, packed=True)
    except CheckpointError as error:
        cache.notify_damage(error)
        return None


def _without_masters(checkpoint: Checkpoint) -> CheckpointError:
    beside = checkpoint.folder.parent / MASTERS_FOLDER
    place = f", '{beside}'" if beside.is_dir() else ""
    return CheckpointError(
        f"[load] 'packed' must be True for '{checkpoint.folder}', which holds packed weights "
        "without their float masters. To train, load the checkpoint that it was packed from"
        f"{place}, or pass rebuild_masters=True (--rebuild-masters), which makes masters up from "
        "the trits."
    )
