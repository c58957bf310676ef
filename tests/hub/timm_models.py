"""Models of timm with random weights, written as its checkpoint folders.

`python -m tests.hub.timm_models` writes the folders of `tests/data/timm`; it needs the extra `interop`.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

DATA = Path(__file__).parents[1] / "data" / "timm"


class Case(NamedTuple):
    """A model.

    Attributes:
        architecture: Its name in timm.
        arguments: Keyword arguments of `timm.create_model`.
        size: Height and width of the images that it is asked about.
    """

    architecture: str
    arguments: dict[str, Any]
    size: tuple[int, int]


_WINDOWS = {
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [1, 2],
}
_HALVING = {"widths": [4, 6, 8, 8, 12], "depths": [1, 2, 1, 1, 1], "head_dim": 4}
TINY = {
    "edgenext": Case(
        "edgenext_xx_small",
        {"dims": [8, 12, 16, 24], "depths": [2, 2, 1, 1], "heads": [2, 2, 4, 2]},
        (37, 45),
    ),
    "efficientvit": Case("efficientvit_b0", {**_HALVING, "head_widths": [16, 20]}, (37, 45)),
    "gmlp": Case("gmlp_s16_224", {"patch_size": 8, "embed_dim": 16, "num_blocks": 2}, (16, 24)),
    "mlp_mixer": Case(
        "mixer_b16_224", {"patch_size": 8, "embed_dim": 16, "num_blocks": 2}, (16, 24)
    ),
    "poolformer": Case(
        "poolformer_s12", {"dims": [8, 16, 16, 24], "depths": [1, 1, 2, 1]}, (37, 45)
    ),
    "swiftformer": Case(
        "swiftformer_xs",
        {"embed_dims": [8, 12, 16, 24], "layers": [1, 2, 1, 1], "mlp_ratios": 2},
        (37, 45),
    ),
    "swin": Case("swin_tiny_patch4_window7_224", _WINDOWS, (23, 18)),
    "vit": Case(
        "vit_tiny_patch16_224",
        {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
        (32, 24),
    ),
}
"""By the name of the family, models whose folders lie in `tests/data/timm`."""

FOLDERS = {
    "conv2former": (DATA.parent / "conv2former", (37, 45)),
    **{name: (DATA / name, case.size) for name, case in TINY.items()},
}
"""Small checkpoints, and the size of the images whose logits are kept."""

CLASSIFIERS = {
    "conv2former": {"pred.weight", "pred.bias"},
    "edgenext": {"head.fc.weight", "head.fc.bias"},
    "efficientvit": {"head.classifier.4.weight", "head.classifier.4.bias"},
    "gmlp": {"head.weight", "head.bias"},
    "mlp_mixer": {"head.weight", "head.bias"},
    "poolformer": {"head.fc.weight", "head.fc.bias"},
    "swiftformer": {f"head{part}.{kind}" for part in ("", "_dist") for kind in ("weight", "bias")},
    "swin": {"head.fc.weight", "head.fc.bias"},
    "vit": {"head.weight", "head.bias"},
}
"""The tensors that timm 1.0.31 draws anew in `reset_classifier`, by name; Conv2Former is not in it."""


def write_backbone(name: str, target: Path) -> None:
    """Writes the small checkpoint of a family as timm publishes models without classes."""
    folder, _ = FOLDERS[name]
    tensors = load_file(folder / "model.safetensors")
    backbone = {key: value for key, value in tensors.items() if key not in CLASSIFIERS[name]}
    target.mkdir()
    save_file(backbone, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_classes": 0}))


def images(size: tuple[int, int], count: int = 2) -> np.ndarray:
    """Fixed images `(B, H, W, 3)`."""
    return np.random.default_rng(0).standard_normal((count, *size, 3)).astype(np.float32)


def timm_model(case: Case, num_classes: int = 5) -> Any:
    """A model of timm with random weights and statistics, in evaluation."""
    import timm
    import torch

    torch.manual_seed(0)
    arguments: dict[str, Any] = {"num_classes": num_classes, **case.arguments}
    fixed = timm.get_pretrained_cfg(case.architecture).to_dict()
    if fixed["fixed_input_size"]:
        arguments["img_size"] = case.size
    if case.architecture.startswith(("mixer_", "gmlp_")):
        model = _perceptron(case.architecture, arguments)
    elif case.architecture.startswith("poolformer_") and case.arguments:
        model = _poolformer(arguments)
    else:
        model = timm.create_model(case.architecture, **arguments)
    return randomised(model)


def randomised(model: Any) -> Any:
    """Gives a model random weights and statistics, and puts it in evaluation."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            # numbers must neither fade nor grow through many convolutions
            spread = parameter[0].numel() ** -0.5 if parameter.ndim == 4 else 0.1
            parameter.add_(torch.randn_like(parameter) * spread)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
    return model.eval()


def _perceptron(architecture: str, arguments: dict[str, Any]) -> Any:
    """A model of this file of timm, whose functions do not let sizes be changed."""
    from timm.models import mlp_mixer

    sizes: dict[str, Any] = {"patch_size": 16}
    if architecture.startswith("gmlp_"):
        sizes |= {
            "mlp_ratio": 6,
            "block_layer": mlp_mixer.SpatialGatingBlock,
            "mlp_layer": mlp_mixer.GatedMlp,
        }
    make = partial(mlp_mixer.MlpMixer, **{**sizes, **arguments})
    return make()


def _poolformer(arguments: dict[str, Any]) -> Any:
    """Like `_perceptron`."""
    import torch.nn as nn
    from timm.layers import GroupNorm1
    from timm.models.metaformer import MetaFormer

    return MetaFormer(
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=GroupNorm1,
        layer_scale_init_values=1e-5,
        res_scale_init_values=None,
        use_mlp_head=False,
        **arguments,
    )


def write_folder(folder: Path, case: Case, model: Any) -> None:
    """Writes a model as timm does."""
    import timm
    from safetensors.torch import save_file as save_tensors

    fixed = timm.get_pretrained_cfg(case.architecture).to_dict()
    arguments = dict(case.arguments)
    if fixed["fixed_input_size"]:
        arguments["img_size"] = list(case.size)
    keys = (
        "input_size",
        "fixed_input_size",
        "interpolation",
        "crop_pct",
        "crop_mode",
        "mean",
        "std",
    )
    config = {
        "architecture": case.architecture,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "global_pool": getattr(model, "global_pool", "avg"),
        "model_args": arguments,
        "pretrained_cfg": {key: fixed[key] for key in keys},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})


def logits(model: Any, pictures: np.ndarray) -> np.ndarray:
    """The output of timm for images `(B, H, W, C)`."""
    import torch

    with torch.no_grad():
        result: np.ndarray = model(torch.tensor(pictures).permute(0, 3, 1, 2)).numpy()
    return result


def _write_all() -> None:
    for name, case in TINY.items():
        model = timm_model(case)
        write_folder(DATA / name, case, model)
        np.save(DATA / name / "logits.npy", logits(model, images(case.size)))
        model.reset_classifier(0)
        np.save(DATA / name / "features.npy", logits(model, images(case.size)))


if __name__ == "__main__":
    _write_all()
