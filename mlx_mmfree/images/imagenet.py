"""The names of the 1,000 classes of ImageNet, which checkpoints that were trained on them leave out.

The list is torchvision's; NOTICE has its licence.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_FILE = "imagenet_classes.txt"


def imagenet_names(pretrained_cfg: Mapping[str, Any], count: int) -> list[str]:
    """The names in the order of the classes; none where a model was trained on something else.

    Args:
        pretrained_cfg: That of timm's `config.json`. Its tag ends with what a model was trained on last.
        count: Number of the model's classes.
    """
    names = files(__package__).joinpath(_FILE).read_text(encoding="utf-8").splitlines()
    is_trained_on_them = str(pretrained_cfg.get("tag")).endswith("in1k")
    return names if is_trained_on_them and count == len(names) else []
