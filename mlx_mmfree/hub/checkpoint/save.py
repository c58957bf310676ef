"""Writes a model as a checkpoint folder, which appears only when it is complete."""

import fnmatch
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...arguments import check_path, checks_names
from ...errors import CheckpointError, UnsupportedModelError
from ...files import checkpoint_files
from ...files.reading import open_file, read_json_object, real_path, tokenizer_files, write_json
from ...files.tensors import (
    HUB_METADATA,
    METADATA,
    PlannedTensors,
    write_safetensors,
    write_shards,
)
from ...files.writing import new_folder, target_of_stage, writing
from ...layers.lora import adapted_layers
from ...layers.matrix import matrices, parameters, stored_layouts
from ...models import TokenModel, architecture_of
from ...models.parts.architecture import WeightNames
from ...models.parts.encoders import SEARCH_KEYS
from ...ops.device import FLOATS
from ...tokenizer.tokenizer import Tokenizer
from ...tokenizer.translation_tokenizer import TranslationTokenizer
from ...version import __version__
from .weight_format import WRITER_KEY, weight_formats

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CHECKPOINT_FILES = (
    *checkpoint_files.TOKENIZER_PATTERNS,
    "model*.safetensors",
    checkpoint_files.INDEX_FILE,
    checkpoint_files.SCALES_FILE,
    checkpoint_files.PACKING_FILE,
    "pytorch_model*.bin",
    checkpoint_files.TORCH_INDEX_FILE,
    f"*{checkpoint_files.GGUF_SUFFIX}",
    "mmfree_model.py",
    # what folders brought for mlx-lm before it was one file
    *("five_trits.py", "hgrn_bit.py", "hybrid.py", "ternary_transformer.py"),
    "adapters.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
    "step.mlxfn",
    "step.json",
    "weights.safetensors",
    "merges.txt",
    "vocab.json",
    "README.md",
    "LICEN[CS]E*",
    "NOTICE*",
    ".DS_Store",
    ".gitattributes",
)
"""Files of this library, mlx-lm, transformers and PEFT. Any other file may be the user's own."""

_FOLDERS = {
    checkpoint_files.TEMPLATES_FOLDER: ".jinja",
    checkpoint_files.POOLING_FILE.partition("/")[0]: checkpoint_files.CONFIG_FILE,
}
"""The folders of such files, with how the names of these end."""


def check_target(
    target: Path, overwrite: bool, caller: str, sources: Iterable[Path | None] = ()
) -> None:
    """Refuses a folder that must not be replaced.

    Args:
        target: The folder to make.
        overwrite: Whether an existing checkpoint folder may be replaced.
        caller: The command or function that reports it.
        sources: The folders and files that it is made of.

    Raises:
        CheckpointError: The target is a file, a folder with other files, or not apart from a source.
    """
    check_apart(target, sources, caller)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise CheckpointError(
            f"[{caller}] 'path' must be a folder but '{target}' is a file. Choose another name."
        )
    if not overwrite:
        raise CheckpointError(
            f"[{caller}] 'path' must be a new or empty folder but '{target}' has files. Pass "
            "overwrite=True (--overwrite) to replace it."
        )
    if not (target / checkpoint_files.CONFIG_FILE).is_file() and not any(
        target.glob(f"*{checkpoint_files.GGUF_SUFFIX}")
    ):
        raise CheckpointError(
            f"[{caller}] 'path' must be a checkpoint folder to be replaced but '{target}' has no "
            f"{checkpoint_files.CONFIG_FILE} and no {checkpoint_files.GGUF_SUFFIX} file. "
            "Choose another folder."
        )
    if foreign := sorted(entry.name for entry in target.iterdir() if not _is_replaceable(entry)):
        raise CheckpointError(
            f"[{caller}] 'path' must hold nothing but a checkpoint to be replaced but '{target}' also "
            f"has {', '.join(map(repr, foreign[:5]))}. Move it elsewhere, or choose another folder."
        )


def check_apart(target: Path, sources: Iterable[Path | None], caller: str) -> None:
    """Refuses a folder that is a source of what is written to it, lies in one, or holds one.

    Raises:
        CheckpointError: The folder and a source are not apart, however their paths are written.
    """
    for source in sources:
        if source is None or not source.exists():
            continue
        if _contains(target, source):
            raise CheckpointError(
                f"[{caller}] 'path' must not be or hold what is read, '{source}', but got '{target}'. "
                "Choose another folder."
            )
        if source.is_dir() and _contains(source, target):
            raise CheckpointError(
                f"[{caller}] 'path' must lie outside of what is read, '{source}', but got '{target}'. "
                "Choose another folder."
            )


def _contains(folder: Path, path: Path) -> bool:
    """Returns whether a folder is a path or lies above it, also through links or with another case."""
    real = Path(os.path.realpath(path))
    return folder.exists() and any(
        parent.exists() and os.path.samefile(parent, folder) for parent in (real, *real.parents)
    )


def _is_replaceable(entry: Path) -> bool:
    if entry.name in _FOLDERS and entry.is_dir() and not entry.is_symlink():
        end = _FOLDERS[entry.name]
        return all(file.name.endswith(end) and not file.is_dir() for file in entry.iterdir())
    # a writer that was killed has left what it wrote of a file
    staged = target_of_stage(entry)
    return (staged is not None or not entry.is_dir()) and any(
        fnmatch.fnmatchcase(staged or entry.name, pattern) for pattern in CHECKPOINT_FILES
    )


def token_ids(source: Path | None) -> dict[str, Any]:
    """The ids of special tokens that a `config.json` names."""
    config = {} if source is None else read_json_object(source)
    return {key: config[key] for key in _TOKEN_IDS if key in config}


def copy_files(files: dict[str, Path], folder: Path) -> None:
    """Copies files of a checkpoint to their paths in another folder.

    Raises:
        OSError: A file cannot be read or written, or is a link out of its own folder.
    """
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with open_file(file, is_member=True) as source, open(folder / name, "xb") as copy:
            shutil.copyfileobj(source, copy)


@checks_names
def save_model(
    path: str | os.PathLike[str],
    model: TokenModel,
    tokenizer: Tokenizer | TranslationTokenizer | str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a model as a checkpoint folder that `load` reads back without loss.

    Packed linears are written packed (see `formats.packed`), and float ones as they are. Names and
    `config.json` follow the Hub. The folder appears under its name only when it is complete.

    Args:
        path: The folder to make.
        model: A model of a known architecture.
        tokenizer: A loaded tokenizer or a folder, whose files are copied; `None` copies none.
        overwrite: Replace an existing checkpoint folder.

    Raises:
        CheckpointError: The folder exists, the disk is full, or the model cannot be described.
        TypeError: The path is none, or an argument is misspelt.
        UnsupportedModelError: The model is no model of a known architecture, or has an adapter on it.

    Example:
        >>> from mlx_mmfree import demo
        >>> model, tokenizer = load(demo.path())
        >>> save_model("my-model", model, tokenizer)
        >>> load("my-model")[0].dims == model.dims
        True
    """
    check_path("save_model", "path", path, "the folder to make")
    if getattr(model, "config", None) is None:
        raise UnsupportedModelError(
            "[save_model] 'model' must be one of a known architecture, which 'config' describes, but "
            f"{type(model).__name__} has none. Write the weights of a network of your own with "
            "model.save_weights('weights.safetensors'), or register its architecture (load_plugin)."
        )
    if adapted_layers(model):
        raise UnsupportedModelError(
            "[save_model] 'model' must have no adapter on it but has one. Merge it first: fuse(model, "
            "'ternary'). The folder that lora wrote holds the adapter: load(path, adapter_path=...)."
        )
    target = real_path(path)
    template = tokenizer.given_template if isinstance(tokenizer, Tokenizer) else None
    if isinstance(tokenizer, Tokenizer | TranslationTokenizer):
        tokenizer = tokenizer.folder
    if tokenizer is not None:
        check_path("save_model", "tokenizer", tokenizer, "a tokenizer, or one that load gives,")
    source = None if tokenizer is None else Path(tokenizer)
    check_target(target, overwrite, "save_model", [source])
    copied = _tokenizer_files(source)
    tensors = disk_tensors(model)
    config = {**token_ids(copied.pop(checkpoint_files.CONFIG_FILE, None)), **describe_model(model)}
    needed = sum(array.nbytes for array in tensors.values())
    needed += sum(file.stat().st_size for file in copied.values())
    made = new_folder(target, replaces=overwrite, needed_bytes=needed)
    with writing("save_model", target), made as folder:
        write_json(folder / checkpoint_files.CONFIG_FILE, config)
        plan = [PlannedTensors.of(*item) for item in tensors.items()]
        has_layouts = architecture_of(model.config).layouts is not None
        write_shards(folder, plan, metadata=HUB_METADATA if has_layouts else METADATA)
        copy_files(copied, folder)
        if template is not None:
            shutil.rmtree(folder / checkpoint_files.TEMPLATES_FOLDER, ignore_errors=True)
            (folder / checkpoint_files.TEMPLATE_FILE).write_text(template, encoding="utf-8")
        if checkpoint_files.GENERATION_FILE not in copied and (searched := _searched(model)):
            write_json(folder / checkpoint_files.GENERATION_FILE, searched)


def disk_tensors(model: TokenModel) -> dict[str, mx.array]:
    """The parameters of a model by their names on disk."""
    architecture = architecture_of(model.config)
    names = WeightNames(architecture.weight_names)
    layouts = stored_layouts(model)
    tensors: dict[str, mx.array] = {}
    for name, array in parameters(model).items():
        if name in layouts and array.dtype in FLOATS:
            array = layouts[name].write(array)
        try:
            tensors[names.to_disk(name)] = array
        except KeyError as error:
            raise CheckpointError(
                f"[save_model] parameter '{name}' has no name on the Hub for this architecture. "
                "Fuse or remove what was added to the model."
            ) from error
    return tensors


def write_tensors(
    file: Path, tensors: dict[str, mx.array], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one safetensors file to the disk."""
    plan = [PlannedTensors.of(*item) for item in tensors.items()]
    write_safetensors(file, plan, {**METADATA, **(metadata or {})})


def describe_model(model: TokenModel) -> dict[str, Any]:
    """The content of `config.json` for a model, without the ids of special tokens."""
    config: dict[str, Any] = {**model.config.to_hub(), WRITER_KEY: {"version": __version__}}
    if model.pipeline == "translation":
        searched = model.search_files.config
        config |= {key: searched[key] for key in SEARCH_KEYS & searched.keys()}
    return config | described_matrices(model, config)


def described_matrices(model: TokenModel, config: Mapping[str, Any]) -> dict[str, Any]:
    """The format of the stored matrices in `config.json`, given the rest of it."""
    modules = matrices(model)
    names = WeightNames(architecture_of(model.config).weight_names).modules_to_disk(modules)
    on_disk = {name: modules[path] for path, name in names.items()}
    described: dict[str, Any] = {}
    for format in weight_formats().values():
        described |= format.describe(on_disk, {**config, **described})
    return described


def _tokenizer_files(source: Path | None) -> dict[str, Path]:
    if source is None:
        return {}
    if not source.is_dir():
        raise CheckpointError(
            f"[save_model] 'tokenizer' must be a folder with tokenizer files but '{source}' is not a "
            "folder. Give the folder of the checkpoint, or the loaded tokenizer."
        )
    return tokenizer_files(source)


def _searched(model: TokenModel) -> dict[str, Any]:
    """The `generation_config.json` of an encoder-decoder."""
    return dict(model.search_files.generation) if model.pipeline == "translation" else {}
