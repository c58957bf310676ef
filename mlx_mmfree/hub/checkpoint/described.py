"""A checkpoint of which only the description is at hand, to plan with."""

from pathlib import Path

import mlx.core as mx

from ...errors import CheckpointError
from ...files.checkpoint_files import CONFIG_FILE, WEIGHTS_FILE
from ...files.json_file import read_json_object
from ...files.tensor_entry import TensorEntry
from ...layers.matrix import parameters
from ...models import find_described
from ...models.parts.fields import dtype_name
from ..names import WeightNames
from ..remote.download import local_folder
from .checkpoint import Checkpoint, has_weights


def described_checkpoint(path_or_repo: str) -> Checkpoint | None:
    """What a `config.json` describes, as floats, where it is all that is at hand.

    It stands alone in a folder, or is all that is downloaded of a repository of the Hub. A model can be
    opened from the result, which tells its shapes and its size, but not loaded. The tensors have the
    dtype that the configuration names, or bfloat16.

    Args:
        path_or_repo: As of `load`.

    Returns:
        `None` if there are weights too, or no configuration, or if a repository's weights are packed,
        since only they tell how.

    Raises:
        UnsupportedModelError: The architecture or an option is not implemented.
        CheckpointError: The configuration is damaged, or there is no such folder.
        DownloadError: The Hub does not hand out the repository.
    """
    folder = local_folder(path_or_repo, patterns=(CONFIG_FILE,))
    if not (folder / CONFIG_FILE).is_file() or has_weights(folder):
        return None
    config = read_json_object(folder / CONFIG_FILE)
    is_packed = any(config.get(key) for key in ("quantization", "quantization_config"))
    if is_packed and not Path(path_or_repo).is_dir():
        return None
    architecture = find_described(config)
    model = architecture.build(architecture.config.from_hub(config))
    names = WeightNames(architecture.weight_names)
    dtype = _dtype(dtype_name(config))
    tensors = {}
    for name, array in parameters(model).items():
        on_disk = names.to_disk(name)
        stop = array.size * dtype.size
        tensors[on_disk] = TensorEntry(on_disk, folder / WEIGHTS_FILE, dtype, array.shape, 0, stop)
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
