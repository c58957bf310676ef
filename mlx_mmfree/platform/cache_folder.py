"""The folder in which the library keeps results that it need not compute again."""

import os
from pathlib import Path

ENVIRONMENT_VARIABLE = "MLX_MMFREE_CACHE"


def cache_folder() -> Path | None:
    """The folder that `MLX_MMFREE_CACHE` names, else `mlx_mmfree` in `HF_HOME`; `None` if it is `0`."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if value == "0":
        return None
    return Path(value).expanduser() if value else _hub_folder() / "mlx_mmfree"


def _hub_folder() -> Path:
    """The folder `HF_HOME`, found as `huggingface_hub` does, whose import would be slow."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(os.environ.get("HF_HOME", default))))
