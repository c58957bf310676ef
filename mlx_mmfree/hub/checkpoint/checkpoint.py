"""A checkpoint on disk: its configuration, where its tensors are stored, and who wrote it.

Nothing is loaded here but headers. The `config.json` of a written folder has an object `mlx_mmfree`, and
GGUF metadata have the same keys:

- `version` is the library's that wrote the folder;
- `adapter` is true if the files of an adapter lie beside the weights, and both are the model.
"""

import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import CheckpointError, UnsupportedModelError, shown_path
from ...files import checkpoint_files, torch_checkpoint
from ...files import tensors as safetensors
from ...files.reading import read_json_object, visible
from ...files.tensors import TensorEntry
from ...layers.matrix import parameters
from ...models import architectures, find_described
from ...models.parts.architecture import WeightNames
from ...models.parts.fields import dtype_name
from ...models.parts.ternary_linears import TernaryLinears
from ..remote.source import Source, find_source
from .embedding_files import with_embedding
from .gguf_checkpoint import read_gguf_checkpoint
from .weight_format import PACKED_DTYPES, WRITER_KEY, formats_of, weight_formats


def notify(text: str) -> None:
    """Prints one line on stderr, which names the user's files."""
    print(f"[load] {shown_path(text)}", file=sys.stderr)


RUN_MODEL = "model"
"""The folder of the model in the folder of a training run."""

_WEIGHT_FILES = (
    (checkpoint_files.WEIGHTS_FILE, checkpoint_files.INDEX_FILE, checkpoint_files.WEIGHTS_PATTERN),
    (
        checkpoint_files.TORCH_WEIGHTS_FILE,
        checkpoint_files.TORCH_INDEX_FILE,
        checkpoint_files.TORCH_WEIGHTS_PATTERN,
    ),
)
_COUNTED = re.compile(r".*-([0-9]{5})-of-([0-9]{5})\.\w+", re.ASCII | re.DOTALL)
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


ADAPTER_KEY = "adapter"
"""In the record of the writer."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose configuration and tensor headers were read.

    Attributes:
        folder: The local folder with the small files.
        config: The content of `config.json`.
        tensors: Every tensor by its name on the Hub.
        dtype: The float dtype to compute in; `None` keeps each tensor's own.

    Example:
        >>> from mlx_mmfree import demo
        >>> checkpoint = open_checkpoint(demo.path())
        >>> checkpoint.config["model_type"], len(checkpoint.tensors), checkpoint.nbytes
        ('hgrn_bit', 90, 5336164)
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    dtype: mx.Dtype | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors on disk."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def writer(self) -> str | None:
        """The program that laid out the weights, `pt` or `mlx`; `None` if the files do not name one.

        Safetensors name it as `format` in their metadata. `pt` stands for PyTorch, and so for the Hub.
        """
        files = {entry.file for entry in self.tensors.values()}
        formats = {_format(file) for file in files}
        return formats.pop() if len(formats) == 1 else None

    @property
    def keeps_adapter(self) -> bool:
        """True if an adapter lies beside the weights and belongs to the model.

        Raises:
            CheckpointError: The record of the writer says neither yes nor no.
        """
        described = self.config.get(WRITER_KEY)
        has_adapter = described.get(ADAPTER_KEY, False) if isinstance(described, Mapping) else False
        if not isinstance(has_adapter, bool):
            raise CheckpointError(
                f"[config.json] '{ADAPTER_KEY}' of '{WRITER_KEY}' must be true or false but got "
                f"{has_adapter!r:.80}. Fetch the file again."
            )
        return has_adapter

    def refuse_adapter(self, caller: str, rule: str) -> None:
        """Refuses a model to which an adapter beside its weights belongs.

        Args:
            caller: The command or function that reports it.
            rule: What only a model without one can be, for the message.

        Raises:
            CheckpointError: There is such an adapter.
        """
        if self.keeps_adapter:
            folder = shlex.quote(str(self.folder))
            raise CheckpointError(
                f"[{caller}] '{self.folder}' must hold no adapter beside its base model {rule} but "
                f"holds one. Merge it first: mmfree fuse --model {folder} --format ternary --data FILE, "
                "or --format dense if it is not MatMul-free."
            )


def open_checkpoint(
    path_or_repo: str | os.PathLike[str],
    revision: str | None = None,
    latent: bool | None = None,
) -> Checkpoint:
    """Finds or downloads a checkpoint and reads its headers.

    Args:
        path_or_repo: A folder, a `.gguf` file, a repository `owner/name` of the Hub, or a folder
            or a file in one, as `owner/name/folder/file.gguf`.
        revision: Branch, tag or commit of the repository.
        latent: Whether float weights of a ternary Llama are masters to be ternarised (`True`) or are
            meant as stored (`False`). `None` reads it from the configuration and the revision.

    Returns:
        The checkpoint, of whose tensors only the headers were read.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent, or it is the folder of an adapter.
        DownloadError: The Hub does not hand out the repository.
        TypeError: The path is none.
        UnsupportedModelError: The checkpoint asks for something that is not implemented.

    Example:
        >>> from mlx_mmfree import demo
        >>> sorted(open_checkpoint(demo.path()).tensors)[0]
        'lm_head.norm.weight'
    """
    source = find_source(path_or_repo, revision)
    folder = source.fetch()
    kind, _ = _weight_files(folder)
    if kind is None:
        file = source.gguf_file(folder)
        if file is not None:
            beside = folder if folder.is_dir() else None
            folder, config, tensors, dtype = read_gguf_checkpoint(file, beside)
            dtypes = {entry.dtype for entry in tensors.values()}
            config = with_latent(config, dtypes, revision, latent)
            return Checkpoint(folder, config, tensors, dtype)
    if kind != ".safetensors":
        folder = source.fetch(checkpoint_files.TORCH_PATTERNS)
    if not (folder / checkpoint_files.CONFIG_FILE).exists():
        raise _without_config(source, folder)
    config = read_json_object(folder / checkpoint_files.CONFIG_FILE)
    if _weight_files(folder)[0] is None:
        # weights would not help a model that is not known
        find_described(config)
    tensors = read_tensor_entries(folder)
    if (folder / checkpoint_files.SCALES_FILE).exists():
        tensors |= _read_scales(folder / checkpoint_files.SCALES_FILE, tensors)
    for format in weight_formats().values():
        if format.open_folder is not None:
            config, tensors = format.open_folder(folder, config, tensors)
    dtypes = {entry.dtype for entry in tensors.values()}
    # packed weights are no masters, whatever the configuration leaves open
    if latent is not None or dtypes.isdisjoint(PACKED_DTYPES):
        config = with_latent(config, dtypes, revision, latent)
    has_norms = any(name.endswith("_proj.norm.weight") for name in tensors)
    has_head = "lm_head.weight" in tensors
    is_embedder = (has_norms and not has_head) or (folder / checkpoint_files.MODULES_FILE).exists()
    if is_embedder or has_norms:
        config = with_embedding(config, has_norms, is_embedder)
    return Checkpoint(folder, config, tensors)


_MASTERS, _AS_STORED = "prequantized", "bfloat16"
"""The branches of Falcon-E's repositories."""


def with_latent(
    config: Mapping[str, Any],
    dtypes: Collection[mx.Dtype],
    revision: str | None,
    latent: bool | None,
) -> dict[str, Any]:
    """The configuration with the answer in its `quantization_config`.

    Fine-tuning needs float masters, so they are published too, sometimes with a configuration that does
    not say so. A model that uses them without ternarising them writes gibberish.

    Args:
        config: The content of `config.json`.
        dtypes: The dtypes of the checkpoint's tensors.
        revision: The branch of the repository.
        latent: The caller's answer; `None` if there is none.

    Raises:
        CheckpointError: The files do not tell, or the caller's answer contradicts them.
        UnsupportedModelError: The architecture leaves no such question.
    """
    described = config.get("quantization_config")
    described = described if isinstance(described, Mapping) else {}
    masters = TernaryLinears().to_hub()
    has_method = described.get("quant_method") == masters["quant_method"]
    has_floats = not any(dtype in PACKED_DTYPES for dtype in dtypes)
    known = architectures().get(str(config.get("model_type")))
    may_hold = known is not None and known.may_hold_masters
    if latent is not None and not may_hold:
        raise UnsupportedModelError(
            f"[load] 'latent' must be left out for 'model_type' {config.get('model_type')!r:.80}, "
            f"which decides it, but got {latent}. Leave it out."
        )
    if latent is not None and not has_floats:
        raise CheckpointError(
            f"[load] 'latent' must be left out for packed weights but got {latent}. Leave it out."
        )
    if latent is None:
        if not has_floats or not may_hold:
            return dict(config)
        is_packed = any(
            format.covers and format.covers(s) for format, s in formats_of(config).values()
        )
        # floats cannot be a packed format
        is_open = is_packed if has_method else config.get("is_bitnet_config") is True
        if revision == _MASTERS:
            latent = True
        elif not is_open:
            return dict(config)
        elif revision == _AS_STORED:
            latent = False
        else:
            raise CheckpointError(
                "[load] 'latent' must be given for this checkpoint: its configuration is that of a "
                "BitNet model but its weights are floats. Give True if they are masters to be "
                "ternarised, False if they are meant as stored."
            )
    if not latent:
        return {key: value for key, value in config.items() if key != "quantization_config"}
    own = described if has_method else {}
    return {**config, "quantization_config": {**own, **masters}}


def _format(file: Path) -> str | None:
    if file.suffix == ".bin":
        return "pt"
    return safetensors.read_header(file)[1].get("format") if file.suffix == ".safetensors" else None


_SHOWN = 8


def _listed(models: Sequence[str]) -> str:
    """The models that a user may give instead, as text."""
    shown = ", ".join(f"'{model}'" for model in models[:_SHOWN])
    more = f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else ""
    return f"Give one of the models within: {shown}{more}." if models else ""


def _without_config(source: Source, folder: Path) -> CheckpointError:
    """The error for a folder without a `config.json`."""
    if (folder / checkpoint_files.ADAPTER_CONFIG_FILE).exists():
        return CheckpointError(
            "[load] 'path_or_repo' must be a model, to which 'adapter_path' adds an adapter, but "
            f"'{source.name}' is the folder of an adapter. Name its base model."
        )
    within = source.models_within()
    if not folder.exists() and source.repository and source.inner.name:
        return CheckpointError(
            f"[load] '{source.name}' must be a folder or a file of the repository, with a checkpoint, "
            f"but there is none. {_listed(within) or 'Check the spelling.'}"
        )
    return CheckpointError(
        f"[load] '{source.name}' must hold a checkpoint but has no {checkpoint_files.CONFIG_FILE}. "
        f"{_where_it_may_be(folder, within)}"
    )


def _where_it_may_be(folder: Path, within: Sequence[str]) -> str:
    """Where the checkpoint may be that a folder does not hold, as text.

    Args:
        folder: The folder.
        within: The models in its folders, as a user may give them.
    """
    if (folder / RUN_MODEL / checkpoint_files.CONFIG_FILE).exists():
        return f"It is the folder of a run, whose model is '{folder / RUN_MODEL}'."
    if folder.is_dir() and (others := visible(folder, "*.pth")):
        return f"'{others[0].name}' is not read: give the GGUF file that is published beside it."
    return _listed(within) or "Give the folder that holds it."


def _weight_files(folder: Path) -> tuple[str | None, list[Path]]:
    """The suffix of the weights that a folder holds, and their one file, their index or all files.

    Safetensors go before PyTorch's files. Without an index, the files are those that mlx-lm takes.
    """
    for weights, index, pattern in _WEIGHT_FILES:
        suffix = Path(weights).suffix
        for name in (weights, index):
            if (folder / name).exists():
                return suffix, [folder / name]
        if files := visible(folder, pattern):
            return suffix, files
    return None, []


def read_tensor_entries(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint folder by their names, from the headers of its files.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent.
    """
    suffix, files = _weight_files(folder)
    if suffix is None:
        names = " or ".join(name for *names, _ in _WEIGHT_FILES for name in names)
        raise CheckpointError(
            f"[load] '{folder}' must hold {names} but has none of them. Give the folder that holds the "
            "weights, or fetch them again."
        )
    shards = {}
    if files[0].suffix == ".json":
        shards = _read_index(files[0], suffix)
        files = [folder / shard for shard in sorted(set(shards.values()))]
    # without an index the names tell whether some are absent
    counted = [] if shards else [each for file in files if (each := _COUNTED.fullmatch(file.name))]
    for count in {found[2] for found in counted}:
        numbers = {int(found[1]) for found in counted if found[2] == count}
        if absent := sorted(set(range(1, int(count) + 1)) - numbers):
            raise CheckpointError(
                f"[load] '{folder}' must hold all {int(count)} parts of the weights but lacks part "
                f"{absent[0]}, and there is no index. Fetch the checkpoint again."
            )
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        is_torch = suffix == ".bin"
        header = (
            torch_checkpoint.read_header(file) if is_torch else safetensors.read_header(file)[0]
        )
        if repeated := sorted(header.keys() & tensors.keys()):
            raise CheckpointError(
                f"[load] '{folder}' must hold tensor {repeated[0]!r:.100} once but both "
                f"{tensors[repeated[0]].file.name} and {file.name} have it. Fetch the checkpoint again."
            )
        tensors |= header
    for name, shard in shards.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"[load] '{folder / shard}' must hold tensor {name!r:.100}, as the index says, but "
                "does not. Fetch the checkpoint again."
            )
    return tensors


def _read_scales(file: Path, others: Collection[str]) -> dict[str, TensorEntry]:
    """The exact scales beside weights that were written for mlx-lm, see `formats.packed`."""
    scales = safetensors.read_header(file)[0]
    for name in scales:
        if name in others or not name.endswith(".weight_scale"):
            raise CheckpointError(
                f"[load] '{file}' must hold nothing but scales of its own but has {name!r:.100}. "
                "Fetch or make the checkpoint again."
            )
    return scales


def _read_index(file: Path, suffix: str) -> dict[str, str]:
    """The file of each tensor, as an index says."""
    shards = read_json_object(file).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(
            f"[load] '{file}' must map tensors to files in 'weight_map' but does not. Fetch the "
            "checkpoint again."
        )
    for name in shards.values():
        if not (isinstance(name, str) and _SHARD_NAME.fullmatch(name) and name.endswith(suffix)):
            raise CheckpointError(
                f"[load] '{file}' must name {suffix} files of its own folder but got "
                f"{name!r:.100}. Fetch the checkpoint again."
            )
    return shards


def described_checkpoint(source: Source) -> Checkpoint | None:
    """The model that a `config.json` describes, as floats, where nothing else is at hand.

    It stands alone in a folder, or is all that is downloaded of a repository of the Hub. A model can be
    opened from the result, which tells its shapes and its size, but not loaded. The tensors have the
    dtype that the configuration names, or bfloat16.

    Args:
        source: The folder or repository.

    Returns:
        `None` if there are weights too, or no configuration, or if a repository's weights are packed,
        since only they tell how.

    Raises:
        UnsupportedModelError: The architecture or an option is not implemented.
        CheckpointError: The configuration is damaged, or there is no such folder.
        DownloadError: The Hub does not hand out the repository.
    """
    folder = source.fetch((checkpoint_files.CONFIG_FILE,))
    if not (folder / checkpoint_files.CONFIG_FILE).is_file() or _weight_files(folder)[1]:
        return None
    config = read_json_object(folder / checkpoint_files.CONFIG_FILE)
    is_packed = any(config.get(key) for key in ("quantization", "quantization_config"))
    if is_packed and source.path is None:
        return None
    architecture = find_described(config)
    model = architecture.build(architecture.config.from_hub(config))
    names = WeightNames(architecture.weight_names)
    dtype = _dtype(dtype_name(config))
    tensors = {}
    for name, array in parameters(model).items():
        on_disk = names.to_disk(name)
        stop = array.size * dtype.size
        tensors[on_disk] = TensorEntry(
            on_disk, folder / checkpoint_files.WEIGHTS_FILE, dtype, array.shape, 0, stop
        )
    return Checkpoint(folder, config, tensors)


def _dtype(name: object) -> mx.Dtype:
    known = {
        "float32": mx.float32,
        "float16": mx.float16,
        "bfloat16": mx.bfloat16,
        None: mx.bfloat16,
    }
    if name not in known:
        raise CheckpointError(
            f"[config.json] 'dtype' must be float32, float16 or bfloat16 but got {name!r:.80}."
        )
    return known[name]
