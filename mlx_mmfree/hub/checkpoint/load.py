"""Loads models and tokenizers from a folder or from the Hub."""

import os
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import CheckpointError
from ...files.checkpoint_files import TOKENIZER_PATTERNS, VOCABULARY_FILES
from ...files.tensor_entry import TensorEntry, read_tensors
from ...layers import BitLinear, PackedBitLinear, PackedLinear, TiedBitLinear, pack_linears
from ...models import Decoder
from ...ops import ternarize_packed
from ...ops.float_dtypes import FLOATS
from ...ops.host_blocks import all_finite
from ...tokenizer.tokenizer import Tokenizer
from ..remote.download import gguf_file, local_folder
from . import pack_cache
from .checkpoint import Checkpoint, open_checkpoint
from .forms.packed_format import has_valid_codes
from .forms.ternary_values import pack_ternary_values, simplify_affine
from .masters import MASTERS_FOLDER, masters_bytes, with_masters
from .skeleton import Skeleton, build_skeleton, kept_names, parameters
from .writer_record import rounding_of, warning

_PACKED_KEYS = ("weight", "scale", "input_scale")

Source = str | os.PathLike[str] | Checkpoint


def load(
    path_or_repo: Source,
    revision: str | None = None,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    latent: bool | None = None,
    rebuild_masters: bool = False,
) -> tuple[Decoder, Tokenizer]:
    """Loads a model and its tokenizer.

    Args:
        path_or_repo: A folder, a `.gguf` file, a repository `owner/name` of the Hub, a file
            `owner/name/file.gguf` in one, or an opened checkpoint.
        revision: Branch, tag or commit of the repository.
        dtype: Float dtype of weights and activations; `None` keeps the checkpoint's. Ternary
            weights do not depend on it.
        packed: Pack ternary matrices to 2 bits a weight, for inference. `False` keeps the float
            master weights, for training.
        latent: Whether float weights of a ternary Llama are masters to be ternarised (`True`) or
            meant as stored (`False`); `None` reads it from the configuration and the revision. An
            opened checkpoint knows it.
        rebuild_masters: With `packed=False`, make up masters where the checkpoint is packed without
            them: the model computes the same, but what its training had before rounding is lost.

    Returns:
        The model and the tokenizer.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent.
        DownloadError: The Hub does not hand out the repository.
        UnsupportedModelError: The architecture is not implemented.

    Example:
        >>> model, tokenizer = load("ridger/MMfreeLM-370M")  # doctest: +SKIP
        >>> logits, state = model(mx.array([tokenizer.encode("Hello")]))  # doctest: +SKIP
    """
    checkpoint = _opened(path_or_repo, revision, latent)
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    rows = build_skeleton(checkpoint).model.vocab_size
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"[load] the tokenizer in '{checkpoint.folder}' must have at most as many tokens as "
            f"the embedding has rows, {rows}, but has {tokenizer.vocab_size}. Use the tokenizer "
            "that belongs to the model."
        )
    model = load_model(checkpoint, dtype=dtype, packed=packed, rebuild_masters=rebuild_masters)
    return model, tokenizer


def load_model(
    path_or_repo: Source,
    revision: str | None = None,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    latent: bool | None = None,
    rebuild_masters: bool = False,
) -> Decoder:
    """Loads a model without a tokenizer.

    Args:
        path_or_repo, revision, dtype, packed, latent, rebuild_masters: As for `load`.

    Raises:
        CheckpointError, DownloadError, UnsupportedModelError: As for `load`.

    Example:
        >>> model = load_model("ridger/MMfreeLM-370M", dtype=mx.float32)  # doctest: +SKIP
    """
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(
            f"[load] 'dtype' must be float32, float16, bfloat16 or None but got {dtype}."
        )
    checkpoint = _opened(path_or_repo, revision, latent)
    if packed:
        model = _load_packed(checkpoint)
    elif rebuild_masters and kept_names(build_skeleton(checkpoint).model):
        model = with_masters(fill(checkpoint, packed=True).model)
    else:
        model = fill(checkpoint, packed=False).model
    model.rounding = rounding_of(checkpoint)
    if (text := warning(checkpoint, model.rounding)) is not None:
        pack_cache.notify(text)
    return converted(model, dtype or checkpoint.dtype)


def load_tokenizer(path_or_repo: str | os.PathLike[str], revision: str | None = None) -> Tokenizer:
    """Loads a tokenizer without its model; of a repository, only the small files are fetched.

    Args:
        path_or_repo: A folder, a `.gguf` file, a repository `owner/name` of the Hub, or a file
            `owner/name/file.gguf` in one.
        revision: Branch, tag or commit of the repository.

    Raises:
        CheckpointError: A file is missing or damaged.
        DownloadError: The Hub does not hand out the repository.
    """
    folder = local_folder(path_or_repo, revision, patterns=TOKENIZER_PATTERNS)
    has_vocabulary = any((folder / name).exists() for name in VOCABULARY_FILES)
    if not has_vocabulary and gguf_file(folder, path_or_repo, revision) is not None:
        folder = open_checkpoint(path_or_repo, revision).folder
    return Tokenizer.from_folder(folder)


def needed_bytes(
    checkpoint: Checkpoint,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    rebuild_masters: bool = False,
) -> int:
    """Bytes of the weights once loaded, from the headers alone. Arguments as `load`.

    Dense weights whose values turn out to be ternary take less.
    """
    skeleton = (
        build_skeleton(checkpoint) if rebuild_masters else _skeleton(checkpoint, packed=packed)
    )
    if not packed and kept_names(skeleton.model):
        return masters_bytes(skeleton.model, dtype or mx.float32)
    if packed:
        pack_linears(skeleton.model)
    kept, dtype = kept_names(skeleton.model), dtype or checkpoint.dtype
    return sum(
        array.nbytes if name in kept else array.size * (dtype or skeleton.entries[name].dtype).size
        for name, array in parameters(skeleton.model).items()
    )


def _opened(source: Source, revision: str | None, latent: bool | None) -> Checkpoint:
    return source if isinstance(source, Checkpoint) else open_checkpoint(source, revision, latent)


def _skeleton(checkpoint: Checkpoint, *, packed: bool) -> Skeleton:
    skeleton = build_skeleton(checkpoint)
    if not packed and kept_names(skeleton.model):
        beside = checkpoint.folder.parent / MASTERS_FOLDER
        place = f", '{beside}'" if beside.is_dir() else ""
        raise CheckpointError(
            f"[load] 'packed' must be True for '{checkpoint.folder}', which holds packed weights "
            "without their float masters. To train, load the checkpoint that it was packed from"
            f"{place}, or pass rebuild_masters=True (--rebuild-masters), which makes masters up from "
            "the trits."
        )
    return skeleton


def _load_packed(checkpoint: Checkpoint) -> Decoder:
    cached = pack_cache.find(checkpoint)
    if cached is not None:
        try:
            return fill(cached, packed=True).model
        except CheckpointError as error:
            pack_cache.notify(f"the cached packed form is made again: {error}")
    skeleton = fill(checkpoint, packed=True)
    pack_cache.store(checkpoint, skeleton)
    return skeleton.model


def fill(checkpoint: Checkpoint, *, packed: bool) -> Skeleton:
    """The model with its weights, in the dtypes of the file; packs each matrix as it arrives."""
    skeleton = _skeleton(checkpoint, packed=packed)
    model = skeleton.model
    modules = dict(model.named_modules())
    is_dense = packed and not any(
        isinstance(module, PackedBitLinear) or hasattr(module, "to_packed")
        for module in modules.values()
    )
    for name, array, entry in _arrays(skeleton):
        path, _, key = name.rpartition(".")
        module = modules[path]
        if name in skeleton.forms:
            array = skeleton.forms[name].read(array)
            mx.eval(array)
        setattr(module, key, array)
        if packed and key == "weight" and hasattr(module, "to_packed"):
            modules[path] = _pack(model, path, module, entry)
        elif isinstance(module, PackedBitLinear | PackedLinear) and key in _PACKED_KEYS:
            check_packed(array, key, module.input_dims, entry)
        else:
            check_finite(array, entry)
            if is_dense and key == "weight" and type(module) is nn.Linear:
                modules[path] = _pack_values(model, path, module)
    if is_dense:
        simplify_affine(model)
    if packed:
        for path, module in modules.items():
            if hasattr(module, "to_packed"):
                _pack(model, path, module, skeleton.entries["embed.weight"])
    # the memory of float matrices, each of which took that of one before
    mx.clear_cache()
    return skeleton


def _arrays(skeleton: Skeleton) -> Iterator[tuple[str, mx.array, TensorEntry]]:
    by_file: dict[Path, list[tuple[str, TensorEntry]]] = {}
    for name, entry in skeleton.entries.items():
        by_file.setdefault(entry.file, []).append((name, entry))
    for file, named in by_file.items():
        named.sort(key=lambda item: item[1].start)
        arrays = read_tensors(file, (entry for _, entry in named))
        for (name, entry), (_, array) in zip(named, arrays, strict=True):
            yield name, array, entry


def _pack(model: Decoder, path: str, module: nn.Module, entry: TensorEntry) -> PackedBitLinear:
    packed: PackedBitLinear = module.to_packed()
    if isinstance(module, BitLinear | TiedBitLinear):
        packed.weight, packed.scale = ternarize_packed(module.master)
    mx.eval(packed.weight, packed.scale)
    check_finite(packed.scale, entry)
    model.update_modules(tree_unflatten([(path, packed)]))
    return packed


def _pack_values(model: Decoder, path: str, linear: nn.Linear) -> nn.Module:
    """Packs a dense linear whose values are ternary; any other stays."""
    packed = pack_ternary_values(linear)
    if packed is None:
        return linear
    mx.eval(packed.parameters())
    model.update_modules(tree_unflatten([(path, packed)]))
    mx.clear_cache()
    return packed


def check_finite(array: mx.array, entry: TensorEntry) -> None:
    """Refuses NaN and infinity.

    Raises:
        CheckpointError: The tensor holds one.
    """
    # codes of MLX's affine form are whole numbers
    if mx.issubdtype(array.dtype, mx.floating) and not all_finite(array):
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must be finite but holds NaN or "
            "infinity. Fetch or make the checkpoint again."
        )


def check_packed(array: mx.array, key: str, input_dims: int, entry: TensorEntry) -> None:
    """Refuses codes or scales that no ternary matrix has.

    Args:
        array: The parameter.
        key: `"weight"`, or the name of scales.
        input_dims: Columns of the matrix.
        entry: Where it was read.

    Raises:
        CheckpointError: The parameter is damaged.
    """
    if key != "weight":
        check_finite(array, entry)
        is_valid, rule = mx.all(array > 0).item(), "be positive"
    else:
        is_valid = has_valid_codes(array, input_dims)
        rule = "hold ternary codes"
    if not is_valid:
        raise CheckpointError(
            f"[load] tensor {entry.name!r} in '{entry.file}' must {rule} but does not. Fetch or "
            "make the checkpoint again."
        )


def converted(model: Decoder, dtype: mx.Dtype | None) -> Decoder:
    """The model with its floats in another dtype, in place; `None` keeps them."""
    kept = kept_names(model)
    modules = dict(model.named_modules())
    for name, array in parameters(model).items():
        if dtype is not None and array.dtype != dtype and name not in kept:
            path, _, key = name.rpartition(".")
            array = array.astype(dtype)
            setattr(modules[path], key, array)
        mx.eval(array)
    return model
