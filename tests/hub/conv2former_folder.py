"""Writes a small checkpoint folder of the Conv2Former that belongs to the paper (arXiv 2211.11943).

    python -m tests.hub.conv2former_folder MODELS

`MODELS` is the folder `models` of HVision-NKU/Conv2Former at commit 94fd1c4d0a8b. The script needs the
extra `interop`.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.hub.timm_models import images, logits, randomised

FOLDER = Path(__file__).parents[1] / "data" / "conv2former"
SIZE = (37, 45)
_SIZES = {
    "kernel_size": 5,
    "dims": [4, 6, 8, 8],
    "depths": [1, 1, 2, 1],
    "mlp_ratios": [2, 2, 2, 2],
}


def write(models: Path) -> None:
    """Writes the folder with the model of the source in a folder."""
    sys.path.insert(0, str(models))
    module = importlib.import_module("conv2former")
    torch.manual_seed(0)
    model = randomised(module.Conv2Former(num_classes=5, **_SIZES))
    FOLDER.mkdir(exist_ok=True)
    config = {"architecture": "conv2former_n", "num_classes": 5, "model_args": _SIZES}
    (FOLDER / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, FOLDER / "model.safetensors", {"format": "pt"})
    np.save(FOLDER / "logits.npy", logits(model, images(SIZE)))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
