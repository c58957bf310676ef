"""Loads models, tokenizers and image processors from a folder or from the Hub.

A model is built once, tells its size, and then loads its weights. Where its ternary matrices are packed
without float masters, these can be made up: what they were before they were rounded is lost, and the new
ones lie in the middle of what each trit stands for. The model computes the same with them, and training
goes on from there.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ... import models
from ...arguments import checks_names
from ...errors import CheckpointError, UnsupportedModelError
from ...files import checkpoint_files
from ...files.reading import read_json_object
from ...images import ImageProcessor
from ...layers.matrix import converted, fixed_dtype_names, matrices, parameters
from ...layers.merged import merge_projections
from ...layers.states import TAIL_SLOTS
from ...models.parts.encoders import SearchFiles
from ...ops import unpack_ternary
from ...ops.device import FEW_ROWS, FLOATS, check_early, on_cpu
from ...tokenizer.tokenizer import Tokenizer
from ...tokenizer.translation_tokenizer import (
    PairTokenizer,
    TranslationTokenizer,
    open_translation_tokenizer,
)
from ..adapters.adapter import Adapter, attach
from ..adapters.adapter_folder import adapter_template, read_adapter
from ..remote.source import find_source
from .checkpoint import Checkpoint, notify, open_checkpoint
from .embedding_files import read_embedding_use
from .pack_cache import PackCache
from .weight_format import PACKED_DTYPES
from .weights import Skeleton, build_skeleton, exact_floats, fill, simplified_bytes

MASTERS_FOLDER = "masters"
"""The folder of the float weights beside the packed model of a training run."""


def master_weight(packed: nn.Module) -> mx.array:
    r"""A float matrix that `ops.ternarize` turns into the packed one.

    .. math::
        w = t\,m / d

    with the trits :math:`t`, their scale :math:`m` and the share :math:`d` of trits that are not zero.
    So the mean of :math:`|w|` is :math:`m`, except for the rounding of that mean.

    Returns:
        float32 `(output_dims, input_dims)`.
    """
    trits = unpack_ternary(packed.weight, packed.input_dims)
    share = (trits != 0).astype(mx.int64).sum().item() / trits.size
    return trits * (packed.scale / (share or 1.0))


def _decoded_states(model: models.Decoder) -> Iterator[tuple[Any, ...]]:
    """States as the decoding loop has them on Metal, for a short text and for a long one."""
    try:
        models.check_causal(model)
    except UnsupportedModelError:
        return
    for length in (1, 4096):
        state = []
        for mixer, part in zip(model.token_mixers, model.init_state(1), strict=True):
            kind = mixer.state_kind
            fixed = kind.fixed(part, length)
            state.append(part if fixed is None else kind.with_tail(fixed[0], TAIL_SLOTS))
        yield tuple(state)


class OpenedModel:
    """A model whose weights are not loaded yet.

    Args:
        checkpoint: The checkpoint.
        dtype, packed, rebuild_masters: As for `load`.

    Attributes:
        checkpoint: The checkpoint.
        model: The model. It has no weights before `load`.
        keeps_adapter: Whether an adapter lies beside the weights and belongs to the model.

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
        is_packed = any(entry.dtype in PACKED_DTYPES for entry in checkpoint.tensors.values())
        self._cache = PackCache(checkpoint) if packed and not is_packed else None
        cached = None if self._cache is None else _cached_skeleton(self._cache)
        self._is_cached = cached is not None
        self._skeleton = cached or build_skeleton(checkpoint, packed=packed)
        self.model: models.Decoder = self._skeleton.model
        self._arrays = parameters(self.model)
        self._fixed_dtype = fixed_dtype_names(self.model)
        keeps_floats = dtype is None and checkpoint.dtype is not None
        self._exact = exact_floats(self._skeleton) if keeps_floats else set[str]()
        if self._fixed_dtype and not packed and not rebuild_masters:
            raise _without_masters(checkpoint)
        # the linears that are to get masters, in their training variant
        self._training = {} if packed else self._skeleton.training

    @property
    def nbytes(self) -> int:
        """The number of bytes of the weights once they are loaded.

        The first rows of float matrices decide whether they will be packed.
        """
        masters = (module.weight for module in self._training.values() if "weight" in module)
        total = sum(weight.size * (self._dtype or mx.float32).size for weight in masters)
        simplified = simplified_bytes(self._skeleton, self._dtype)
        for name, array in self._arrays.items():
            if name in simplified:
                total += simplified[name]
            elif name not in self._fixed_dtype:
                total += array.size * self._dtype_of(name).size
            elif name.rpartition(".")[0] not in self._training:
                total += array.nbytes
        return int(total)

    def _dtype_of(self, name: str) -> mx.Dtype:
        """The dtype that a parameter of floats will have."""
        stored: mx.Dtype = self._skeleton.entries[name].dtype
        is_free = self._dtype is not None and stored in FLOATS and name not in self._exact
        return self._dtype if self._dtype is not None and is_free else stored

    def processor(self) -> Any:
        """Reads the `Tokenizer`, the `TranslationTokenizer` of a Marian model or the `ImageProcessor`.

        Raises:
            CheckpointError: A file is missing or damaged.
            UnsupportedModelError: An option of the files is not implemented.
        """
        folder = self.checkpoint.folder
        if self.model.pipeline == "image-classification":
            return ImageProcessor.from_config(self.checkpoint.config)
        has_pair = (folder / checkpoint_files.TRANSLATION_FILES[0]).exists()
        if self.model.pipeline == "translation" and has_pair:
            return TranslationTokenizer(folder)
        return Tokenizer.from_folder(folder)

    def translation_tokenizer(self) -> PairTokenizer:
        """Reads the tokenizer of an encoder-decoder; raises as `processor` does."""
        return open_translation_tokenizer(self.checkpoint.folder)

    def adapter(self) -> Adapter | None:
        """Reads the adapter that lies beside the weights, if there is one that belongs to the model.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        if not self.keeps_adapter:
            return None
        folder = self.checkpoint.folder
        if missing := [
            name for name in checkpoint_files.ADAPTER_PATTERNS if not (folder / name).exists()
        ]:
            raise CheckpointError(
                f"[load] '{folder}' must hold the adapter that its "
                f"{checkpoint_files.CONFIG_FILE} speaks of but lacks "
                f"{' and '.join(missing)}. Fetch the model again."
            )
        return read_adapter(folder)

    def load(self, adapter: Adapter | None = None) -> models.Decoder:
        """Reads the weights into the model, which is set to evaluation. It may be called once.

        Args:
            adapter: An adapter to put on the model. Default: the one that lies beside the weights, if
                there is one that belongs to the model; a line on stderr says so.

        Raises:
            CheckpointError: A tensor is damaged, or the adapter is or does not fit.
        """
        if adapter is None and self.keeps_adapter:
            adapter = self.adapter()
            notify(
                f"'{self.checkpoint.folder}' holds an adapter beside its base model; both are used."
            )
        if self._skeleton.left_out:
            parts = " and ".join(self._skeleton.left_out)
            notify(
                f"'{self.checkpoint.folder}' also holds {parts}, which this library does not read."
            )
        if self._skeleton.is_packed and not on_cpu():
            check_early(self._build_graphs)
        if self._cache is None:
            fill(self._skeleton)
        else:
            self._fill_with(self._cache)
        model: Any = self.model
        if self._training:
            self._make_masters(model)
        if model.pipeline == "translation":
            model.search_files = self._search_files()
        if model.pipeline == "feature-extraction":
            model.embedding = read_embedding_use(self.checkpoint.folder)
        if self._dtype is not None:
            converted(model, self._dtype, self._exact, self._skeleton.names.to_disk)
        if adapter is not None:
            attach(model, adapter)
        # what was cast after it was read is lazy, and other threads cannot compute it
        mx.eval(model.parameters())
        model.eval()
        if not on_cpu():
            merge_projections(model)
        return self.model

    def _search_files(self) -> SearchFiles:
        file = self.checkpoint.folder / checkpoint_files.GENERATION_FILE
        generation = read_json_object(file, is_optional=True)
        return SearchFiles(generation, self.checkpoint.config)

    def without_values(self) -> models.Decoder:
        """The model with parameters of the dtypes that they will have, to build graphs of.

        They take no memory until something reads them, and have no meaning.
        """
        self.model.eval()
        modules = dict(self.model.named_modules())
        for name, array in parameters(self.model).items():
            if name not in self._fixed_dtype:
                path, _, key = name.rpartition(".")
                setattr(modules[path], key, array.astype(self._dtype_of(name)))
        return self.model

    def _build_graphs(self) -> None:
        """Builds the graphs of a decoded token, and of a prompt that is read in the largest groups."""
        model: Any = self.without_values()
        if model.pipeline == "image-classification":
            model.predictions(models.architecture_of(model.config).sample(model.config))
            return
        model.predictions(mx.zeros((1, 1), mx.int32))
        # a prompt needs no logits but the last
        read = model.hidden if isinstance(model, models.Decoder) else model.predictions
        read(mx.zeros((1, FEW_ROWS), mx.int32))
        for state in _decoded_states(model) if isinstance(model, models.Decoder) else ():
            model.hidden(mx.zeros((1, 1), mx.int32), state)

    def _fill_with(self, cache: PackCache) -> None:
        """Reads the weights of the packed format in the cache, or packs them and keeps that there."""
        if self._is_cached:
            try:
                fill(self._skeleton)
            except CheckpointError as error:
                cache.notify_damage(error)
                self._skeleton = build_skeleton(self.checkpoint, packed=True)
                self.model = self._skeleton.model
            else:
                return
        fill(self._skeleton)
        cache.store(self.model)

    def _make_masters(self, model: models.Decoder) -> None:
        """Gives the linears of a model their training variant, in place. Nothing else changes.

        Raises:
            CheckpointError: The head shares the weight of an embedding in few bits.
        """
        modules = dict(model.named_modules())
        few_bits = any(
            matrix.is_packed and not matrix.is_ternary for matrix in matrices(model).values()
        )
        for path, module in self._training.items():
            packed = modules[path]
            if "weight" in module:
                module.weight = master_weight(packed)
                mx.eval(module.weight)
            # a tied head reads the embedding, which has kept its floats
            elif few_bits:
                raise CheckpointError(
                    "[load] 'rebuild_masters' must be left out for a head that shares an embedding "
                    "in few bits, but was given. Load the checkpoint that it was made from."
                )
            if "bias" in packed:
                module.bias = packed.bias
        model.update_modules(tree_unflatten(list(self._training.items())))


def _cached_skeleton(cache: PackCache) -> Skeleton | None:
    cached = cache.find()
    try:
        return None if cached is None else build_skeleton(cached, packed=True)
    except CheckpointError as error:
        cache.notify_damage(error)
        return None


def _without_masters(checkpoint: Checkpoint) -> CheckpointError:
    beside = checkpoint.folder.parent / MASTERS_FOLDER
    where = f", '{beside}'" if beside.is_dir() else ""
    return CheckpointError(
        f"[load] '{checkpoint.folder}' must hold float master weights to be trained but holds "
        f"packed weights alone. Load the checkpoint that it was packed from{where}, or pass "
        "rebuild_masters=True (--rebuild-masters), which makes masters up from the trits."
    )


def _check_dtype(dtype: mx.Dtype | None) -> None:
    """Refuses a dtype that is no float, before anything is downloaded."""
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(
            "[load] 'dtype' must be mx.float32, mx.float16, mx.bfloat16 or None but got "
            f"{dtype!r:.60}. Leave it out to keep the checkpoint's."
        )


def _checkpoint(
    path_or_repo: str | os.PathLike[str] | Checkpoint, revision: str | None, latent: bool | None
) -> Checkpoint:
    """Opens a checkpoint, unless it is open already."""
    if isinstance(path_or_repo, Checkpoint):
        return path_or_repo
    return open_checkpoint(path_or_repo, revision, latent)


@checks_names
def load(
    path_or_repo: str | os.PathLike[str] | Checkpoint,
    revision: str | None = None,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    latent: bool | None = None,
    rebuild_masters: bool = False,
    adapter_path: str | os.PathLike[str] | None = None,
) -> tuple[Any, Any]:
    """Loads a model and what prepares its inputs: a tokenizer, or for images an image processor.

    Args:
        path_or_repo: A folder, a `.gguf` file, a repository `owner/name` of the Hub, a folder
            or a file in one, as `owner/name/folder/file.gguf`, or an opened checkpoint.
        revision: Branch, tag or commit of the repository.
        dtype: The float dtype of weights and activations; `None` keeps the checkpoint's. Ternary
            weights do not depend on it.
        packed: Pack ternary matrices to 2 bits a weight, for inference. `False` keeps the float master
            weights, for training.
        latent: Whether float weights of a ternary Llama are masters to be ternarised (`True`) or are
            meant as stored (`False`). `None` reads it from the configuration and the revision. An opened
            checkpoint knows it.
        rebuild_masters: With `packed=False`, make up masters if the checkpoint is packed without them.
            The model computes the same, but what its weights were before rounding is lost.
        adapter_path: The folder or repository of an adapter to put on the model. If it keeps a chat
            template, the tokenizer has it too. Default: the adapter in the model's folder that belongs
            to the model, if there is one.

    Returns:
        The model and the `Tokenizer`; for a Marian model its `TranslationTokenizer`, and for one of
        images the `ImageProcessor`.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent, or the adapter does not fit.
        DownloadError: The Hub does not hand out the repository.
        TypeError: The path is none, or an argument is misspelt.
        UnsupportedModelError: The architecture is not implemented.

    Example:
        >>> from mlx_mmfree import demo
        >>> model, tokenizer = load(demo.path())  # or load("ridger/MMfreeLM-370M")
        >>> logits, state = model(mx.array([tokenizer.encode("Hello")]))
        >>> logits.shape
        (1, 3, 2048)
    """
    _check_dtype(dtype)
    checkpoint = _checkpoint(path_or_repo, revision, latent)
    opened = OpenedModel(checkpoint, dtype, packed, rebuild_masters)
    processor = opened.processor()
    if adapter_path is None:
        return opened.load(), processor
    template = adapter_template(adapter_path)
    if template is not None and isinstance(processor, Tokenizer):
        processor = processor.with_chat_template(template)
    return opened.load(read_adapter(adapter_path)), processor


@checks_names
def load_model(
    path_or_repo: str | os.PathLike[str] | Checkpoint,
    revision: str | None = None,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    latent: bool | None = None,
    rebuild_masters: bool = False,
    adapter_path: str | os.PathLike[str] | None = None,
) -> models.Decoder:
    """Loads a model without a tokenizer.

    Args:
        path_or_repo: A folder, a `.gguf` file, a repository `owner/name` of the Hub, a folder
            or a file in one, as `owner/name/folder/file.gguf`, or an opened checkpoint.
        revision: Branch, tag or commit of the repository.
        dtype: The float dtype of weights and activations; `None` keeps the checkpoint's. Ternary
            weights do not depend on it.
        packed: Pack ternary matrices to 2 bits a weight, for inference. `False` keeps the float master
            weights, for training.
        latent: Whether float weights of a ternary Llama are masters to be ternarised (`True`) or are
            meant as stored (`False`). `None` reads it from the configuration and the revision. An opened
            checkpoint knows it.
        rebuild_masters: With `packed=False`, make up masters if the checkpoint is packed without them.
            The model computes the same, but what its weights were before rounding is lost.
        adapter_path: The folder or repository of an adapter to put on the model. Default: the adapter
            in the model's folder that belongs to the model, if there is one.

    Returns:
        The model.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent, or the adapter does not fit.
        DownloadError: The Hub does not hand out the repository.
        TypeError: The path is none, or an argument is misspelt.
        UnsupportedModelError: The architecture is not implemented.

    Example:
        >>> from mlx_mmfree import demo
        >>> load_model(demo.path(), dtype=mx.float32).dims
        384
    """
    _check_dtype(dtype)
    checkpoint = _checkpoint(path_or_repo, revision, latent)
    opened = OpenedModel(checkpoint, dtype, packed, rebuild_masters)
    return opened.load(None if adapter_path is None else read_adapter(adapter_path))


@checks_names
def load_tokenizer(path_or_repo: str | os.PathLike[str], revision: str | None = None) -> Any:
    """Loads a tokenizer without its model. Of a repository, only the small files are downloaded.

    Args:
        path_or_repo: A folder, a `.gguf` file, a repository `owner/name` of the Hub, or a folder
            or a file in one, as `owner/name/folder/file.gguf`.
        revision: Branch, tag or commit of the repository.

    Returns:
        The `Tokenizer`, or the `TranslationTokenizer` of a Marian model.

    Raises:
        CheckpointError: A file is missing or damaged.
        DownloadError: The Hub does not hand out the repository.
        TypeError: The path is none, or an argument is misspelt.

    Example:
        >>> from mlx_mmfree import demo
        >>> load_tokenizer(demo.path()).vocab_size
        2048
    """
    folder = _tokenizer_folder(path_or_repo, revision)
    if not _has_vocabulary(folder) and (folder / checkpoint_files.TRANSLATION_FILES[0]).exists():
        return TranslationTokenizer(folder)
    return Tokenizer.from_folder(folder)


def load_text_tokenizer(
    path_or_repo: str | os.PathLike[str], revision: str | None = None
) -> Tokenizer:
    """Like `load_tokenizer`, but refuses a tokenizer of two languages."""
    return Tokenizer.from_folder(_tokenizer_folder(path_or_repo, revision))


def _tokenizer_folder(path_or_repo: str | os.PathLike[str], revision: str | None) -> Path:
    source = find_source(path_or_repo, revision)
    folder = source.fetch(checkpoint_files.TOKENIZER_PATTERNS)
    if not _has_vocabulary(folder) and source.gguf_file(folder) is not None:
        return open_checkpoint(path_or_repo, revision).folder
    return folder


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).exists() for name in checkpoint_files.VOCABULARY_FILES)


def needed_bytes(
    checkpoint: Checkpoint,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    rebuild_masters: bool = False,
) -> int:
    """Computes what weights take once they are loaded, from the headers alone.

    Dense weights whose values turn out to be ternary take less.

    Args:
        checkpoint: The checkpoint.
        dtype: The float dtype of weights; `None` keeps the checkpoint's.
        packed: Whether ternary matrices are packed to 2 bits a weight.
        rebuild_masters: Whether masters are made up if the checkpoint is packed without them.

    Returns:
        The number of bytes.

    Raises:
        ValueError: The dtype is no float.

    Example:
        >>> from mlx_mmfree import demo
        >>> checkpoint = open_checkpoint(demo.path())
        >>> needed_bytes(checkpoint) < needed_bytes(checkpoint, packed=False, rebuild_masters=True)
        True
    """
    _check_dtype(dtype)
    return OpenedModel(checkpoint, dtype, packed, rebuild_masters).nbytes
